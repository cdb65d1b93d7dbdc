"""The vectors of an outer step that a rendezvous decided: the average, and the members' outer gradients.

Shapes: N elements of one fragment.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from diloco.engine.guards import are_equal, is_long
from diloco.errors import UserError
from diloco.reduction import Reduction
from diloco.reduction.reduction import Average, add_up
from diloco.rendezvous.averages import joined
from diloco.rendezvous.contract import Content, Decision, Form
from diloco.wire.payload import Key


def average(form: Form, decision: Decision, content: Content, to_N: Tensor) -> Average:
    """Δ_p, added up in the members' order from their payloads, or joined from the averages of its shares."""
    if content.averages:
        return joined(form, decision.fragment, decision.round, decision.cohort, content.averages, to_N)
    return add_up(form.codec, content.payloads, to_N, _keys(form, decision), decision.cohort)


class EqualityWatch:
    """Notices replicas that train on the same data: in every fragment, they make the same outer gradient.

    In one fragment they may be equal without that, where it has no gradients and the weights decay. With averages
    of shares nobody has the payloads, and nothing is noticed.

    Args:
        form: of payloads.
        reduction: how they are encoded.
        replica: this replica.
    """

    def __init__(self, form: Form, reduction: Reduction, replica: int) -> None:
        self._form, self._reduction, self._replica = form, reduction, replica
        self._are_equal = {p: False for p in range(len(form.sizes)) if is_long(form.share_bytes(p))}

    def check(self, decision: Decision, content: Content) -> None:
        """Look at an outer step with a payload of this replica.

        Raises:
            UserError: if the newest ones of all fragments that are long enough were equal.
        """
        if len(content.payloads) < 2 or decision.fragment not in self._are_equal:
            return
        p, form = decision.fragment, self._form
        key = form.key(p, decision.base_rounds[self._replica], self._replica)
        self._are_equal[p] = are_equal(content.payloads, self._reduction, form.sizes[p], key, decision.cohort)
        if all(self._are_equal.values()):
            raise UserError(
                f"all {len(decision.cohort.members)} replicas of the outer steps made the same outer gradients, "
                "to the last bit: they train on the same data; let each read from its own rendezvous.slot and "
                "rendezvous.start, and let nothing average gradients across replicas"
            )


def remade(
    form: Form, decision: Decision, content: Content, device: torch.device
) -> tuple[Callable[[], Tensor], Callable[[], Iterator[Tensor]]]:
    """Two functions for logs: one makes Δ_p again, one each member's outer gradient."""
    size = form.sizes[decision.fragment]

    def make_average() -> Tensor:
        return average(form, decision, content, torch.empty(size, device=device)).divided()

    def make_deltas() -> Iterator[Tensor]:
        for key in _keys(form, decision):
            if content.payloads:  # with averages nobody has all payloads
                to_N = torch.empty(size, device=device)
                yield form.codec.decode_into(to_N, content.payloads[key.replica], key)

    return make_average, make_deltas


def _keys(form: Form, decision: Decision) -> list[Key]:
    bases = decision.base_rounds
    return [form.key(decision.fragment, bases[m], m) for m in decision.cohort.members]
