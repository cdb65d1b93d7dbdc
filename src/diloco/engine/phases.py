"""The phases of a round's exchange: every member's payload, or shares and then their averages."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from diloco.engine.guards import refuse_equal_payloads
from diloco.engine.lanes import Handle, Lane
from diloco.exchange.transport import Tag, Transport
from diloco.reduction import Reduction
from diloco.reduction.cohort import Cohort
from diloco.wire.payload import Key


def exchange(
    transport: Transport,
    lane: Lane,
    reduction: Reduction,
    payloads: Sequence[Tensor],
    num_elements: int,
    key: Key,
    cohort: Cohort,
    tag: Tag,
) -> Handle[dict[int, Tensor]]:
    """Start the first phase; a second phase follows in a thread as soon as the first is over."""
    check = partial(refuse_equal_payloads, reduction=reduction, num_elements=num_elements, key=key, cohort=cohort)
    first = _Phase(transport, reduction.addressed(payloads, cohort), tag, check if tag.round == 1 else None)
    if reduction.num_phases == 1:
        return first

    def relay() -> dict[int, Tensor]:
        average = reduction.relay(first.wait(), num_elements, key, cohort)
        return _Phase(transport, dict.fromkeys(cohort.members, average), tag._replace(phase=1)).wait()

    return lane.run(relay)


class _Phase:
    """One phase of an exchange, with this replica's own payload beside the others'."""

    def __init__(
        self,
        transport: Transport,
        payloads: Mapping[int, Tensor],
        tag: Tag,
        check: Callable[[Mapping[int, Tensor]], None] | None = None,
    ) -> None:
        others = {member: payload for member, payload in payloads.items() if member != transport.replica}
        self._own = {transport.replica: payloads[transport.replica]}
        self._pending = transport.start(others, tag)
        self._check = check

    def wait(self) -> dict[int, Tensor]:
        received = {**self._pending.wait(), **self._own}
        if self._check is not None:
            self._check(received)
        return received
