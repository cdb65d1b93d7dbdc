"""The inner steps of an optimizer, counted: the outermost `step()` once, a step that a scaler skips included."""

import functools
import sys
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
        optimizer: a torch optimizer, or a wrapper with `optimizer` or `optimizers`.
        scaler: the GradScaler that steps it; None is the wrapper's own, where it has one.

    Raises:
        UserError: if they are something else.
    """

    def __init__(self, count: Callable[[], object], optimizer: object, scaler: object = None) -> None:
        self._optimizer, wrappers = _unwrapped(optimizer)
        scaler = getattr(optimizer, "scaler", None) if scaler is None else scaler
        if not isinstance(scaler, torch.amp.GradScaler | None):
            raise UserError(f"scaler={scaler!r} must be a torch.amp.GradScaler, or None", "scaler")
        self._count = _untraced(self._counting(count))
        self.is_counting = False
        """True while the function runs."""
        self._depth = 0  # calls of the optimizer's step that are running
        self._num_around = 0  # calls of a wrapper's or the scaler's step that are running
        self._is_due = False
        self._before_handle = self._optimizer.register_step_pre_hook(_untraced(self._before))
        self._after_handle = self._optimizer.register_step_post_hook(_untraced(self._after))
        self._replaced: list[tuple[Any, object, object]] = []
        for wrapper in wrappers:
            self._replace_step(wrapper, self._step_of_wrapper)
        if scaler is not None:
            self._replace_step(scaler, self._step_of_scaler)

    def _counting(self, count: Callable[[], object]) -> Callable[[], None]:
        """The function, with `is_counting` while it runs."""

        def counted() -> None:
            self.is_counting = True
            try:
                count()
            finally:
                self.is_counting = False

        return counted

    @property
    def is_attached(self) -> bool:
        """True until `remove()`, and while the optimizer is alive."""
        return self._after_handle.id in (self._after_handle.hooks_dict_ref() or {})

    def remove(self) -> None:
        """Count no more."""
        self._before_handle.remove()
        self._after_handle.remove()
        for owner, step, before in self._replaced:
            if vars(owner).get("step") is not step:
                continue  # somebody has replaced it again, and ours does nothing any more
            if before is None:
                del owner.step
            else:
                owner.step = before
        self._replaced.clear()

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _before(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._depth and _num_running(optimizer) < 2:
            self._depth = 0  # a step that raised has left it
        self._depth += 1

    def _after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        # torch calls hooks for the step of each class whose step calls super's.
        self._depth -= 1
        if self._depth:
            return
        if self._num_around:
            self._is_due = True
        else:
            self._count()

    def _replace_step(self, owner: Any, around: Callable[..., Any]) -> None:
        """Call `around` with the owner's step, and its arguments, in the place of the step."""
        before = vars(owner).get("step")
        step = functools.wraps(owner.step)(functools.partial(around, owner.step))
        owner.step = step
        self._replaced.append((owner, step, before))

    def _step_of_wrapper(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._counted_once(functools.partial(step, *args, **kwargs), is_due=False)

    def _step_of_scaler(self, step: Callable[..., Any], optimizer: object, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(step, optimizer, *args, **kwargs)
        is_ours = _unwrapped(optimizer)[0] is self._optimizer
        return self._counted_once(call, is_due=True) if is_ours else call()

    def _counted_once(self, call: Callable[[], Any], *, is_due: bool) -> Any:
        """Make the call, and count one step if the optimizer has stepped in it, or if it is due anyway."""
        if not self.is_attached:
            return call()
        self._is_due = is_due or (self._is_due and self._num_around > 0)
        self._num_around += 1
        try:
            result = call()
        finally:
            self._num_around -= 1
        if self._is_due and not self._num_around:
            self._is_due = False
            self._count()
        return result


def attached(
    before: Attachment | None, count: Callable[[], object], optimizer: object, scaler: object
) -> Attachment:
    """A new attachment in the place of an earlier one, which must have been removed.

    Raises:
        UserError: if it has not, or as `Attachment`.
    """
    if before is not None and before.is_attached:
        raise UserError(
            "the engine is attached already, and would count every inner step twice: attach it alone to the "
            "optimizer that steps last"
        )
    return Attachment(count, optimizer, scaler)


def refuse_second_count(attachment: Attachment | None) -> None:
    """Refuse to count an inner step that the attachment counts, too.

    Raises:
        UserError: if the engine is attached, and it is not the attachment that counts.
    """
    if attachment is not None and not attachment.is_counting and attachment.is_attached:
        raise UserError(
            "the engine is attached to an optimizer and counts its steps: leave out engine.step(), or call "
            "remove() of what attach() returned"
        )


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called as it is where torch.compile traces an optimizer's step."""
    return cast(Callable[..., Any], torch.compiler.disable(function))


def _unwrapped(optimizer: object) -> tuple[Optimizer, list[Any]]:
    """The torch optimizer inside any wrappers, and those wrappers whose step is no optimizer's.

    accelerate's AcceleratedOptimizer is an Optimizer that has no hooks, and may step nothing. Others, such as
    DeepSpeed's and containers of several optimizers, may step several times.
    """
    wrappers, inner = [], optimizer
    while not _takes_hooks(inner):
        if inner is None or isinstance(inner, nn.Module | type) or not hasattr(inner, "zero_grad"):
            raise UserError(
                f"optimizer={type(optimizer).__name__} is no torch.optim.Optimizer, nor a wrapper that holds one "
                "as `optimizer` or several as `optimizers`: pass the optimizer, or call engine.step() after each "
                "step",
                "optimizer",
            )
        if not isinstance(inner, Optimizer):
            wrappers.append(inner)
        several = getattr(inner, "optimizers", None)
        several = list(several) if isinstance(several, Sequence) else []
        inner = getattr(inner, "optimizer", several[-1] if several else None)
    assert isinstance(inner, Optimizer), "it takes hooks"
    return inner, wrappers


def _takes_hooks(optimizer: object) -> bool:
    """True for an Optimizer that has been initialised as one; some wrappers are not."""
    if not isinstance(optimizer, Optimizer):
        return False
    try:
        optimizer.register_step_post_hook(lambda *_: None).remove()
    except AttributeError:
        return False
    return True


_STEP_CODE = Optimizer.profile_hook_step(lambda *_: None).__code__
"""The code of the function that torch puts around the step of each class of optimizers, and that calls hooks."""


def _num_running(optimizer: Optimizer) -> int:
    """The number of calls of an optimizer's step on the stack."""
    count, frame = 0, sys._getframe()
    while frame is not None:
        count += frame.f_code is _STEP_CODE and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return count
