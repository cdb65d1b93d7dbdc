"""A replica of the trainer among others that come and go: how it joins and leaves, and who has contributed."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from diloco.data.shards import read_index
from diloco.errors import DilocoError, setting
from diloco.rendezvous.machine import RunState
from diloco.rendezvous.store_rendezvous import StoreRendezvous
from diloco.schema import Count
from diloco.training.ancestor import SIGNALS, on_signal
from diloco.training.config import TrainConfig
from diloco.training.resolve import facts_with_rendezvous

_SECONDS_TO_LEAVE = 25.0
"""Time to leave a run: less than the launcher, torchrun, and providers of spot instances wait before they kill."""


@contextmanager
def meeting(config: TrainConfig) -> Iterator[StoreRendezvous]:
    """The rendezvous of a run; the engine joins it, and at the end of the context this replica leaves.

    After an error and on a signal, too: payloads on their way are uploaded before, and still counted.

    Raises:
        UserError: for a URL or a name that can't be right.
    """
    assert config.rendezvous is not None and config.data.prepared is not None, "the config is resolved"
    index, elastic = read_index(config.data.prepared), config.elastic
    text = {
        "digest of the data": index.digest,
        "tokens of training text": sum(shard.num_tokens for shard in index.splits["train"]),
    }
    with setting("rendezvous", config.rendezvous):
        rendezvous = StoreRendezvous(
            config.rendezvous,
            name=config.name,
            num_replicas=config.num_replicas,
            quorum=elastic.quorum,
            patience=elastic.patience,
            weights=elastic.weights,
            max_stale=elastic.max_stale,
            num_shares=elastic.num_shares,
            num_slots=elastic.num_slots,
            max_local_steps=elastic.max_local_steps,
            timeout_seconds=config.timeout_seconds,
            facts=facts_with_rendezvous(config) | text,
        )
    with on_signal(_stop):
        try:
            yield rendezvous
        except BaseException:
            with suppress(DilocoError):  # the first error is the one to report
                rendezvous.leave(seconds=_SECONDS_TO_LEAVE)
            raise
        rendezvous.leave()


def _stop(number: int, _: object) -> None:
    """End the run by an exception, which lets this replica leave."""
    for each in SIGNALS:  # one is enough: the launcher passes on what the terminal has sent already
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


@dataclass(frozen=True, kw_only=True)
class Contributor:
    """The part of one name's replicas in a run, whole rounds of all fragments."""

    tokens: Count
    """Tokens whose work the outer steps have counted."""
    steps: Count
    """Inner steps that they took."""


def contributors(state: RunState) -> dict[str, Contributor]:
    """The replicas whose work was counted, by name."""
    num_fragments = state.rules.num_fragments
    sums: dict[str, tuple[int, int]] = {}
    for member in state.members:
        if member.tokens:
            tokens, steps = sums.get(member.name, (0, 0))
            sums[member.name] = tokens + member.tokens, steps + member.steps
    return {
        name: Contributor(tokens=tokens // num_fragments, steps=steps // num_fragments)
        for name, (tokens, steps) in sums.items()
    }
