"""Hooks on what the user passes: inner steps of an optimizer are counted, loads into the model are noticed."""

import functools
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from diloco.engine.outer_state import OUTER
from diloco.engine.replica import Replica
from diloco.errors import UserError, listed


class Attachment:
    """Calls a function after every inner step of an optimizer until it is removed.

    Args:
        count: the function.
        optimizer: a torch optimizer, or a wrapper that holds one as `optimizer`, or several as `optimizers`, of
            which the last counts. A step of a wrapper that is no Optimizer, such as DeepSpeed's, counts once,
            however often it steps the inner one; if the wrapper has `overflow`, a step that it skips, too.
        scaler: the GradScaler that steps it; None is the wrapper's own, where it has one.
        patience: steps of another optimizer of the same parameters, without one of this, after which to warn.

    Raises:
        UserError: if they are something else, or the steps of this optimizer are counted already.
    """

    def __init__(
        self, count: Callable[[], object], optimizer: object, scaler: object = None, *, patience: int
    ) -> None:
        self._optimizer, wrappers = _unwrapped(optimizer)
        other = _ATTACHMENTS.get(id(self._optimizer))
        if other is not None and other.is_attached:
            raise UserError(
                "this optimizer is attached to another engine already, which would go on beside this one: call "
                "remove() of what its attach() returned",
                "optimizer",
            )
        scaler = getattr(optimizer, "scaler", None) if scaler is None else scaler
        if not isinstance(scaler, torch.amp.GradScaler | None):
            raise UserError(f"scaler={scaler!r} must be a torch.amp.GradScaler, or None", "scaler")
        self._count = count
        self.is_counting = False
        """True while the function runs."""
        # torch calls hooks for the step of each class whose step calls super's: the outermost one counts.
        self._depth = 0
        self._num_around = 0  # calls of a wrapper's or the scaler's step that are running
        self._is_due = False
        # Called as they are where torch.compile traces the optimizer's step.
        before, after = map(torch.compiler.disable, (self._before, self._after))
        self._before_handle = self._optimizer.register_step_pre_hook(cast(Any, before))
        self._after_handle = self._optimizer.register_step_post_hook(cast(Any, after))
        self._replaced: list[tuple[Any, object, object]] = []
        self._replace_step(self._optimizer, self._step_of_optimizer)
        for wrapper in wrappers:
            around = functools.partial(self._step_of_wrapper, is_due=hasattr(wrapper, "overflow"))
            self._replace_step(wrapper, around)
        if scaler is not None:
            self._replace_step(scaler, self._step_of_scaler)
        _ATTACHMENTS[id(self._optimizer)] = self
        self._trained = {id(parameter) for _, parameter in trained_by(self._optimizer)}
        self._patience, self._num_others = patience, 0
        notice = weakref.WeakMethod(self._notice)
        hook = torch.compiler.disable(lambda other, *_: (method := notice()) is not None and method(other))
        weakref.finalize(self, register_optimizer_step_post_hook(hook).remove).atexit = False

    @property
    def is_attached(self) -> bool:
        """True until `remove()`, and while the optimizer is alive."""
        return self._after_handle.id in (self._after_handle.hooks_dict_ref() or {})

    def remove(self) -> None:
        """Stop counting."""
        self._before_handle.remove()
        self._after_handle.remove()
        for owner, step, before in self._replaced:
            if vars(owner).get("step") is not step:
                continue  # replaced again since: ours stays below it, and passes calls on
            if before is None:
                del owner.step
            else:
                owner.step = before
        self._replaced.clear()

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _before(self, *_: object) -> None:
        self._depth += 1

    def _after(self, *_: object) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self._depth = 0
        if self._num_around:
            self._is_due = True
        else:
            self._counted()

    def _replace_step(self, owner: Any, around: Callable[..., Any]) -> None:
        """Call `around` with the owner's step, and its arguments, in the place of the step."""
        before, step = vars(owner).get("step"), owner.step

        @functools.wraps(step)
        def replacing(_: object, *args: Any, **kwargs: Any) -> Any:
            return around(step, *args, **kwargs)

        # Bound, since a learning-rate schedule binds it again.
        owner.step = types.MethodType(replacing, owner)
        self._replaced.append((owner, owner.step, before))

    def _step_of_optimizer(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._depth = 0  # an earlier step may have raised, and not counted down
        return step(*args, **kwargs)

    def _step_of_wrapper(self, step: Callable[..., Any], *args: Any, is_due: bool, **kwargs: Any) -> Any:
        return self._counted_once(functools.partial(step, *args, **kwargs), is_due=is_due)

    def _step_of_scaler(self, step: Callable[..., Any], optimizer: object, *args: Any, **kwargs: Any) -> Any:
        """The scaler's step: counted even if it skips the optimizer's, so that replicas stay in step."""
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
            self._counted()
        return result

    def _notice(self, other: Optimizer) -> None:
        """Warn once if another optimizer has taken the place of this one, whose steps alone are counted."""
        if other is self._optimizer or self._depth or not self.is_attached:
            return  # a base optimizer steps inside of it
        _, first = next(trained_by(other), (None, None))
        self._num_others += id(first) in self._trained
        if self._num_others == self._patience:
            warnings.warn(
                f"{type(other).__name__} has taken {self._patience} steps on the parameters of the attached "
                f"{type(self._optimizer).__name__}, which has taken none since, so that none was counted: call "
                "remove() of what attach() returned, and attach the optimizer that steps now",
                stacklevel=5,
            )

    def _counted(self) -> None:
        self.is_counting, self._num_others = True, 0
        try:
            self._count()
        finally:
            self.is_counting = False


_ATTACHMENTS: "weakref.WeakValueDictionary[int, Attachment]" = weakref.WeakValueDictionary()
"""The newest attachment of each optimizer, by its id()."""


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
        inner = _inside(inner)[-1]
    return cast(Optimizer, inner), wrappers


def _inside(wrapper: Any) -> Sequence[Any]:
    """The optimizers that a wrapper holds; None alone if it holds none."""
    if hasattr(wrapper, "optimizer"):
        return (wrapper.optimizer,)
    several = getattr(wrapper, "optimizers", None)
    return several if isinstance(several, Sequence) and several else (None,)


def trained_by(optimizer: object) -> Iterator[tuple[str | None, Tensor]]:
    """The parameters of an optimizer, or of all those in a wrapper; each with its name, or None."""
    if not _takes_hooks(optimizer):
        for inner in _inside(optimizer):
            yield from () if inner is None else trained_by(inner)
        return
    for group in cast(Optimizer, optimizer).param_groups:
        names = group.get("param_names", [None] * len(group["params"]))
        yield from zip(names, group["params"], strict=True)


def check_trains(optimizers: Sequence[object], own: Mapping[str, Tensor]) -> None:
    """Refuse optimizers that train none of these parameters, and warn of other parameters that they train.

    Raises:
        UserError: if they train none of them, which would never be exchanged, or one is no optimizer.
    """
    for optimizer in optimizers:
        _unwrapped(optimizer)
    ids = {id(parameter) for parameter in own.values()}
    held = [pair for optimizer in optimizers for pair in trained_by(optimizer)]
    outside = [(name, each) for name, each in held if id(each) not in ids and each.requires_grad]
    if outside and not any(id(each) in ids for _, each in held):
        raise UserError(
            f"the optimizer trains none of the parameters that the engine exchanges ({listed([*own], 4)}): build "
            "both on one model, or, where the optimizer trains copies, give these to the engine as masters=",
            "optimizer",
        )
    if outside:
        named = listed([name or f"1 of shape {tuple(parameter.shape)}" for name, parameter in outside], 4)
        warnings.warn(
            f"the optimizer also trains {named}, outside of the engine's model: that is never exchanged, and "
            "differs between replicas; build the engine on one module that holds all that is trained",
            stacklevel=4,
        )


def check_wrapped(optimizers: Sequence[object], wrapper: object) -> None:
    """Refuse an optimizer without the wrapper that steps it, maybe several times per inner step, or not at all.

    Raises:
        UserError: naming both.
    """
    for optimizer in optimizers:
        if not any(each is wrapper for each in _unwrapped(optimizer)[1]):
            raise UserError(
                f"this {type(optimizer).__name__} is stepped once per group of its parameters, and not where "
                f"gradients overflow: attach the {type(wrapper).__name__} around it, of which a step is an inner "
                "step",
                "optimizer",
            )


def _takes_hooks(optimizer: object) -> bool:
    """True for an Optimizer that has been initialised as one; some wrappers are not."""
    if not isinstance(optimizer, Optimizer):
        return False
    try:
        optimizer.register_step_post_hook(lambda *_: None).remove()
    except AttributeError:
        return False
    return True


class ModelLoads:
    """Notices calls of `load_state_dict` of the model, its parts or what wraps it.

    A call is right if the engine loads its own state before the next inner step, too, or if it changes nothing.

    Args:
        model: whose parameters the engine exchanges; it does not keep this object alive.
        replica: the engine's.
    """

    def __init__(self, model: nn.Module, replica: Replica) -> None:
        self.pending: Literal["loaded", "excused"] | None = None
        """None: nothing to check. loaded: check before the next step. excused: loads until then are accepted."""
        self._replica = replica
        names = (name for fragment in replica.settings.fragments for name in fragment.parameters)
        owners = {name.rpartition(".")[0] for name in names}
        hook = _Hook(weakref.ref(self))
        handles = [model.get_submodule(owner).register_load_state_dict_post_hook(hook) for owner in owners]
        if replica.parameters.has_master_tensors:
            handles.append(register_optimizer_step_pre_hook(torch.compiler.disable(hook.before_inner_step)))
        weakref.finalize(self, _remove, handles).atexit = False

    def notice(self) -> None:
        """Remember that parameters were loaded."""
        self.pending = self.pending or "loaded"

    def accept(self, *, until_next_step: bool = False) -> None:
        """Accept the parameters loaded so far; with `until_next_step`, those loaded before the next step, too."""
        self.pending = "excused" if until_next_step else None

    @contextmanager
    def undone(self) -> Iterator[None]:
        """A context after which the parameters have their values from before."""
        before = self.pending
        try:
            yield
        finally:
            self.pending = before

    def check(self) -> None:
        """Refuse to go on with parameters that were loaded and are not Θ; every shard must call it.

        Raises:
            UserError: saying how to load them.
        """
        if self.pending == "loaded":
            replica = self._replica
            with replica.fail_together():
                replica.parameters.check_still_the_models(range(replica.state.num_fragments))
                if not self._is_outer():
                    raise UserError(
                        "parameters were loaded into the model after the engine had taken its outer parameters: "
                        "build the engine after model.load_state_dict, load the engine's own state after it, or "
                        "call engine.reset_outer() where all replicas have loaded the same; to evaluate other "
                        "parameters, load them in engine.outer_parameters_applied(), which puts the model's own "
                        "back"
                    )
        self.accept()

    def check_masters(self, optimizer: Optimizer) -> None:
        """Refuse masters that this optimizer trains, and that the parameters loaded last do not follow.

        Raises:
            UserError: naming the parameter.
        """
        if self.pending is not None:
            self._replica.parameters.check_masters(tensor for _, tensor in trained_by(optimizer))

    def _is_outer(self) -> bool:
        """True if θ = Θ, bit for bit."""
        parameters, home = self._replica.parameters, self._replica.state.at_home(OUTER)
        # All of them, even after one that is not: the shards of a replica go through the fragments together.
        equal = [torch.equal(parameters.flat(p).to(outer_N.device), outer_N) for p, outer_N in enumerate(home)]
        return all(equal)


class _Hook:
    """A hook on a module that keeps no engine alive; in a copy of the module, pickled or not, it does nothing."""

    def __init__(self, loads: Callable[[], ModelLoads | None] = lambda: None) -> None:
        self._loads = loads

    def __call__(self, module: nn.Module, incompatible_keys: object) -> None:
        if (loads := self._loads()) is not None:
            loads.notice()

    def before_inner_step(self, optimizer: Optimizer, *_: object) -> None:
        """Refuse the step of any optimizer that would write masters over parameters loaded without them.

        Raises:
            UserError: naming the parameter; nothing was written.
        """
        if (loads := self._loads()) is not None:
            loads.check_masters(optimizer)

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
