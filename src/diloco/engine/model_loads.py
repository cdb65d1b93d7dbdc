"""Parameters that are loaded into the model beside the engine, whose Θ knows nothing of them."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from diloco.engine.loading import refuse_together
from diloco.engine.replica_rounds import ReplicaRounds
from diloco.engine.rounds import Rounds
from diloco.engine.state import OUTER
from diloco.errors import UserError
from diloco.outer.digest import parameters_hash


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


def adopt(rounds: Rounds) -> None:
    """Θ ← θ, and zeros for all other vectors; it is refused on all replicas, or on none.

    Raises:
        DisagreementError: if θ or the number of inner steps differ between replicas.
        UserError: if something is in flight, or a parameter was replaced.
    """
    parameters, refusal = rounds.parameters, None
    fragments = range(rounds.state.num_fragments)
    in_flight = [list(flight.sync) for flight in rounds.in_flight]
    try:
        parameters.check_still_the_models(fragments)
        if in_flight:
            raise UserError(f"fragment {in_flight[0][0]} is in flight: call finish() before adopt()")
    except UserError as error:
        refusal = str(error)
    facts = {
        "why adopt() is refused": refusal,
        "number of inner steps at adopt()": rounds.num_steps,
        "the model's parameters at adopt(), which all replicas must have loaded alike (SHA-256)": [
            parameters_hash({"θ": parameters.flat(p)}) for p in fragments
        ],
    }
    with rounds.all_shards_or_none():
        refuse_together(rounds, facts, refusal)
    for kind in rounds.state.kinds:
        for p, vector_N in enumerate(rounds.state.at_home(kind)):
            if kind == OUTER:
                vector_N.copy_(parameters.flat(p))
            else:
                vector_N.zero_()


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
