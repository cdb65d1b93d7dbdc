"""The inner steps of a torch optimizer, counted by its hooks; a step that a GradScaler skips is counted too."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from diloco.errors import UserError


class Attachment:
    """Calls a function after every inner step of an optimizer until it is removed.

    Args:
        count: the function.
        optimizer: a torch optimizer, or a wrapper that holds one as `optimizer`, or several as `optimizers`, of
            which the last counts.
        scaler: the GradScaler that steps it; None is the wrapper's own, where it has one.

    Raises:
        UserError: if they are something else.
    """

    def __init__(self, count: Callable[[], object], optimizer: object, scaler: object = None) -> None:
        self._optimizer = _innermost(optimizer)
        self._scaler: Any = getattr(optimizer, "scaler", None) if scaler is None else scaler
        if not isinstance(self._scaler, torch.amp.GradScaler | None):
            raise UserError(f"scaler={scaler!r} must be a torch.amp.GradScaler, or None", "scaler")
        self._count = count
        self.is_counting = False
        """True while the function runs."""
        self._num_counted = 0
        # torch calls hooks for the step of each class whose step calls super's: the outermost one counts.
        self._depth = self._most_depth = 0
        self._num_levels = 0  # steps in each other, known after the first one
        # Called as they are where torch.compile traces the optimizer's step.
        before, after = map(torch.compiler.disable, (self._before, self._after))
        self._before_handle = self._optimizer.register_step_pre_hook(cast(Any, before))
        self._after_handle = self._optimizer.register_step_post_hook(cast(Any, after))
        if self._scaler is not None:
            step = self._scaler.step
            self._scaler_step = functools.wraps(step)(functools.partial(self._step_of_scaler, step))
            self._scaler.step = self._scaler_step

    @property
    def is_attached(self) -> bool:
        """True until `remove()`, and while the optimizer is alive."""
        return self._after_handle.id in (self._after_handle.hooks_dict_ref() or {})

    def remove(self) -> None:
        """Count no more."""
        self._before_handle.remove()
        self._after_handle.remove()
        # If another attachment has replaced the scaler's step since, ours stays, and only passes calls on.
        if self._scaler is not None and vars(self._scaler).get("step") is self._scaler_step:
            del self._scaler.step

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _before(self, *_: object) -> None:
        self._depth += 1
        if self._num_levels and self._depth > self._num_levels:
            self._depth = self._num_levels  # a step that raised has left it too high
        self._most_depth = max(self._most_depth, self._depth)

    def _after(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._num_levels = self._most_depth
            self._counted()

    def _step_of_scaler(self, step: Callable[..., Any], optimizer: object, *args: Any, **kwargs: Any) -> Any:
        """The scaler's step; it is counted if it skipped ours, so that replicas stay in step."""
        before = self._num_counted
        result = step(optimizer, *args, **kwargs)
        if self.is_attached and _innermost(optimizer) is self._optimizer and self._num_counted == before:
            self._counted()
        return result

    def _counted(self) -> None:
        self._num_counted += 1
        self.is_counting = True
        try:
            self._count()
        finally:
            self.is_counting = False


def _innermost(optimizer: object) -> Optimizer:
    """The torch optimizer in wrappers, such as accelerate's, which is an Optimizer that has no hooks."""
    inner = optimizer
    while not _takes_hooks(inner):
        if inner is None or isinstance(inner, nn.Module | type) or not hasattr(inner, "zero_grad"):
            raise UserError(
                f"optimizer={type(optimizer).__name__} is no torch.optim.Optimizer, nor a wrapper that holds one "
                "as `optimizer` or several as `optimizers`: pass the optimizer, or call engine.step() after each "
                "step",
                "optimizer",
            )
        several = getattr(inner, "optimizers", None)
        last = several[-1] if isinstance(several, Sequence) and several else None
        inner = getattr(inner, "optimizer", last)
    return cast(Optimizer, inner)


def _takes_hooks(optimizer: object) -> bool:
    """True for an Optimizer that has been initialised as one; some wrappers are not."""
    if not isinstance(optimizer, Optimizer):
        return False
    try:
        optimizer.register_step_post_hook(lambda *_: None).remove()
    except AttributeError:
        return False
    return True
