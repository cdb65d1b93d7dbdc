"""Parameters that are loaded into the model beside the engine, whose Θ knows nothing of them."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from diloco.engine.outer_state import OUTER
from diloco.engine.replica import ReplicaRounds
from diloco.errors import UserError


class ModelLoads:
    """Notices calls of `load_state_dict` of the model, its parts or what wraps it.

    A call is right if the engine loads its own state before the next inner step, too, or if it changes nothing.

    Args:
        model: whose parameters the engine exchanges; it does not keep this object alive.
        rounds: the engine's.
    """

    def __init__(self, model: nn.Module, rounds: ReplicaRounds) -> None:
        self.pending = False
        """True if `check` has something to do: an attribute, since it is read at every step."""
        self._rounds = rounds
        self._noticed = self._excused = False
        names = (name for fragment in rounds.settings.fragments for name in fragment.parameters)
        owners = {name.rpartition(".")[0] for name in names}
        hook = _Hook(weakref.ref(self))
        handles = [model.get_submodule(owner).register_load_state_dict_post_hook(hook) for owner in owners]
        weakref.finalize(self, _remove, handles).atexit = False

    def notice(self) -> None:
        """Remember that parameters were loaded."""
        self._noticed = self.pending = True

    def excuse(self, *, later: bool) -> None:
        """Forget what was loaded, and, with `later`, what is loaded until the next step."""
        self._noticed, self._excused, self.pending = False, later, later

    @contextmanager
    def undone(self) -> Iterator[None]:
        """A context after which the parameters have their values from before."""
        before = self._noticed, self.pending
        try:
            yield
        finally:
            self._noticed, self.pending = before

    def check(self) -> None:
        """Refuse to go on with parameters that were loaded and are not Θ; every shard must call it.

        Raises:
            UserError: saying how to load them.
        """
        if self._noticed and not self._excused:
            rounds = self._rounds
            with rounds.all_shards_or_none():
                rounds.parameters.check_still_the_models(range(rounds.state.num_fragments))
                if not self._is_outer():
                    raise UserError(
                        "parameters were loaded into the model after the engine had taken its outer parameters: "
                        "build the engine after model.load_state_dict, load the engine's own state after it, or "
                        "call engine.adopt() where all replicas have loaded the same; to evaluate other "
                        "parameters, load them in engine.outer_in_place(), which puts the model's own back"
                    )
        self.excuse(later=False)

    def _is_outer(self) -> bool:
        """True if θ = Θ, bit for bit."""
        parameters, home = self._rounds.parameters, self._rounds.state.at_home(OUTER)
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

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
