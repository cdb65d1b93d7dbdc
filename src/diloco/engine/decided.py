"""The vectors of an outer step that a rendezvous decided: the average, and the members' outer gradients.

Shapes: N elements of one fragment.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from diloco.engine.guards import refuse_equal_payloads
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


def refuse_equal(form: Form, decision: Decision, content: Content, reduction: Reduction, replica: int) -> None:
    """Refuse members' outer gradients that are equal to the last bit, where their payloads are here.

    Raises:
        UserError: as `refuse_equal_payloads`.
    """
    if content.payloads:
        key = form.key(decision.fragment, decision.base_rounds[replica], replica)
        refuse_equal_payloads(content.payloads, reduction, form.sizes[decision.fragment], key, decision.cohort)


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
