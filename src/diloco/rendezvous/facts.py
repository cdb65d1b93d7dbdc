"""The facts of entry 0, read back: the form of the payloads, the outer rule, the parameters' names and places.

Shapes: N elements of one fragment.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import diloco
from diloco.errors import UserError
from diloco.files import memory_bytes
from diloco.outer.digest import parameters_hash
from diloco.outer.rule import RULE, OuterRule
from diloco.reduction import reduction_of
from diloco.rendezvous.contract import Form
from diloco.rendezvous.entries import Create, LogError
from diloco.wire.payload import codec

_PLACE = "shape, fragment and place of parameter "
INITIAL = "initial parameters (SHA-256)"
"""The fact that proves the initial parameters equal."""


@dataclass(frozen=True)
class Place:
    """A parameter in the flat vector of its fragment."""

    shape: tuple[int, ...]
    fragment: int
    start: int

    @property
    def stop(self) -> int:
        """The end of its elements."""
        return self.start + math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The model and the outer step as entry 0 describes them."""

    form: Form
    outer: OuterRule | None
    """The outer rule; None for one that is not diloco's own."""
    outer_name: str
    """The name of the rule's class."""
    places: Mapping[str, Place]
    """The places by parameter name."""
    initial_sha256: str
    """SHA-256 of the initial parameters."""

    @classmethod
    def of(cls, create: Create) -> "RunFacts":
        """The facts of an entry 0.

        Raises:
            LogError: if an engine of diloco would not have written them.
        """
        facts = create.facts
        try:
            places = {
                name.removeprefix(_PLACE): Place(tuple(map(int, shape)), int(fragment), int(start))
                for name, (shape, fragment, start) in (
                    item for item in facts.items() if item[0].startswith(_PLACE)
                )
            }
            sizes = _sizes(places.values(), create.rules.num_fragments)
            wire = codec(facts["wire"])
            second = reduction_of(facts["combine"], wire).second
            form = Form(codec=wire, sizes=sizes, seed=int(facts["seed"]), second=second)
            form = form.cut(create.rules.num_shares)
            name = str(facts["outer rule"])
            rule = _own_rule(name, facts)
            return cls(form=form, outer=rule, outer_name=name, places=places, initial_sha256=str(facts[INITIAL]))
        except LogError:
            raise
        except KeyError as error:
            raise LogError(f"entry 0 of the log does not describe a run: it lacks {error}") from None
        except (AttributeError, TypeError, ValueError) as error:
            raise LogError(f"entry 0 of the log does not describe a run: {error}") from None

    def check_memory(self) -> None:
        """Refuse parameters that this machine's memory can't hold, before anything of them is allocated.

        Raises:
            UserError: with the bytes that they take.
        """
        num_bytes, memory = 4 * sum(self.form.sizes), memory_bytes()
        if num_bytes > memory:
            raise UserError(
                f"the run's parameters, as entry 0 of the log describes them, take {num_bytes:,} bytes, and this "
                f"machine has {memory:,} bytes of memory",
                "run",
            )

    def flat(self, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """Each fragment's flat FP32 vector (N), from the run's initial parameters by name; others are ignored.

        Raises:
            LogError: if entry 0 gives one another shape.
            UserError: if they are not those with which the run began.
        """
        missing = [name for name in self.places if name not in parameters]
        if missing:
            raise UserError(f"initial: the run's parameter {missing[0]} is not among these parameters", "initial")
        own = {name: parameters[name].detach().float().cpu() for name in self.places}
        if parameters_hash(own) != self.initial_sha256:
            raise UserError(
                "initial: these are not the parameters with which the run began: their SHA-256 is another",
                "initial",
            )
        vectors = [torch.empty(size) for size in self.form.sizes]
        for name, place in self.places.items():
            if own[name].shape != place.shape:
                raise LogError(f"entry 0 of the log describes {name:.80} in another shape than it has")
            vectors[place.fragment][place.start : place.stop] = own[name].reshape(-1)
        return vectors

    def named(self, vectors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Views of the fragments' flat vectors by parameter name."""
        return {
            name: vectors[place.fragment][place.start : place.stop].view(place.shape)
            for name, place in self.places.items()
        }


def _own_rule(name: str, facts: Mapping[str, Any]) -> OuterRule | None:
    """The outer rule of a class that `diloco` exports, from its facts; None for another."""
    of_facts = getattr(getattr(diloco, name, None), "of_facts", None)
    if of_facts is None:
        return None
    return of_facts({fact.removeprefix(RULE): value for fact, value in facts.items() if fact.startswith(RULE)})


def _sizes(places: Iterable[Place], num_fragments: int) -> tuple[int, ...]:
    """N of each fragment, if the places lie one after another."""
    sizes = [0] * num_fragments
    for place in sorted(places, key=lambda place: (place.fragment, place.start, place.stop)):
        is_in_order = 0 <= place.fragment < num_fragments and place.start == sizes[place.fragment]
        if not is_in_order or min(place.shape, default=0) < 0:
            raise ValueError("the places of its parameters leave holes, or overlap")
        sizes[place.fragment] = place.stop
    return tuple(sizes)
