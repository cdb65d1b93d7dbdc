"""One replica's side of its rounds, whoever the others are: θ, Θ, the counters, encoding, and the outer step.

Shapes: N elements of one fragment that this process holds.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from diloco.engine import observe
from diloco.engine.encoded import Encoded, together
from diloco.engine.lanes import DeviceLane, SameLane
from diloco.engine.parameters import FragmentParameters
from diloco.engine.settings import Settings
from diloco.engine.sharded import shard_index
from diloco.engine.state import ERROR, OUTER, OuterState
from diloco.errors import NonFiniteError, UserError
from diloco.exchange.messages import Answers
from diloco.kernels.memory import empty
from diloco.outer.digest import outer_digest_there
from diloco.outer.mixing import MergeRule
from diloco.outer.rule import FragmentState
from diloco.outer.take import take_outer_step
from diloco.reduction import Reduction
from diloco.reduction.cohort import Cohort
from diloco.reduction.feedback import encode_with_feedback
from diloco.reduction.reduction import Average
from diloco.schedule import Sync
from diloco.wire.payload import Key
from diloco.wire.unsealed import MOST_NOTES, Unsealed


@dataclass(eq=False)
class ReplicaRounds:
    """The state that rounds change on this replica, and the counters; a subclass knows the other replicas."""

    settings: Settings
    parameters: FragmentParameters
    """θ."""
    state: OuterState
    """Θ, the slots of the outer rule, and the error."""
    num_steps: int = 0
    """Inner steps taken."""
    tokens: int = 0
    """Tokens read, as far as the training loop tells."""
    bytes_sent: int = 0
    """Payload bytes of all shards, each destination counted."""
    bytes_received: int = 0
    """Payload bytes of all shards from the other replicas that were merged."""
    blocked_seconds: float = 0.0
    """Time in which training has waited for payloads."""
    last_sent: list[int] = field(default_factory=list)
    """For each fragment the step after which it was sent last; 0 if never."""
    record: observe.Record = field(default_factory=observe.Record)
    """Measurements of the syncs, for logs."""
    lane: DeviceLane = field(default_factory=SameLane)
    """The place where outer gradients are encoded, decoded and merged."""

    def __post_init__(self) -> None:
        """Make the memory in which sums are made."""
        sizes = [self.state.num_elements(p) for p in range(self.state.num_fragments)]
        self.last_sent = [0] * len(sizes)
        self._reduction = self.settings.reduction
        self._shard_group = self.parameters.shard_group
        self._shard = shard_index(self._shard_group)
        self._scratch = empty(max(sizes), torch.float32, self.parameters.device)

    @property
    def replica(self) -> int:
        """This replica's number."""
        raise NotImplementedError

    @property
    def uncounted_tokens(self) -> float:
        """Tokens that this replica has read and the run has not counted yet; 0 in a fixed group."""
        return 0.0

    @property
    def answers(self) -> Answers | None:
        """The other replicas' answers; None where they are not known."""
        return None

    def is_initial(self, p: int) -> bool:
        """Whether Θ_p is the initial one, as far as this replica's sends say."""
        return not self.last_sent[p]

    def has_uncounted(self, p: int) -> bool:
        """Whether a fragment has work that no payload on the way tells; a fixed group counts all payloads."""
        return False

    def expect_next(self) -> None:
        """Announce the fragment that is used next, if that is known."""

    def all_shards_or_none(self) -> AbstractContextManager[None]:
        """A context that fails in all shards of this replica if it fails in one."""
        return self.parameters.all_or_none(f"step {self.num_steps}: another shard of replica {self.replica}")

    def check_parameters(self, fragments: Iterable[int]) -> None:
        """Refuse parameters that are no longer those of the model, or did not keep a merge.

        Raises:
            UserError: naming step and parameter.
        """
        try:
            self.parameters.check_still_the_models(fragments)
        except UserError as error:
            raise UserError(f"step {self.num_steps}: {error}") from None

    def encode(self, p: int, key: Key, cohort: Cohort, *, base: int) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The payloads of a fragment's outer gradient, and the error that they leave.

        Raises:
            NonFiniteError: naming the parameter.
        """
        encoded = self.begin_encoding(p, key, cohort, base=base)
        with self.naming_non_finite(p, self.num_steps):
            return encoded.sealed(), encoded.error_N

    def begin_encoding(self, p: int, key: Key, cohort: Cohort, *, base: int | None) -> Encoded:
        """Encode a fragment's outer gradient on the lane.

        Args:
            p: the fragment.
            key: whose outer gradient it is.
            cohort: the members that share the fragment.
            base: the digest of Θ_p, 0 where nobody compares it; None to compute it.
        """
        beta, state = self.settings.error_feedback, self.state
        self.lane.join()  # it has ended with the working memory
        outer_N = state.use(OUTER, p)
        delta_N = self.parameters.outer_gradient(p, outer_N, self._scratch[: outer_N.numel()])
        self.record.sample(delta_N, key)
        verdicts = self.parameters.watch.take(MOST_NOTES)
        notes = tuple(verdict.is_undone for verdict in verdicts)
        if base is None and not self.lane.is_apart:
            base = self.state.digest(p)

        def work() -> Encoded:
            there = outer_digest_there(state.use(OUTER, p)) if base is None else None
            unsealed = Unsealed(self.settings.wire, notes, there)
            reduction: Reduction = replace(cast(Any, self._reduction), wire=unsealed)
            if beta is None:
                payloads, error_N = reduction.encode(delta_N, key, cohort), None
            else:
                payloads, error_N = encode_with_feedback(
                    reduction, delta_N, state.use(ERROR, p), beta, key, cohort
                )
            return Encoded(
                step=self.num_steps,
                unsealed=unsealed,
                reduction=reduction,
                payloads=payloads,
                error_N=error_N,
                host_payloads=together(payloads, self.lane.to_host),
                base=base,
                verdicts=verdicts,
                wait=self.lane.mark(),
            )

        return self.lane.queue(work)

    @contextmanager
    def naming_non_finite(self, p: int, step: int) -> Iterator[None]:
        """Name the parameter if an outer gradient, taken after a step, was not finite: θ is as bad since then."""
        try:
            yield
        except NonFiniteError:
            self.lane.join()
            outer_N = self.state.use(OUTER, p)
            delta_N = self.parameters.outer_gradient(p, outer_N, self._scratch[: outer_N.numel()])
            name = self.parameters.first_not_finite(p, delta_N)
            raise observe.non_finite(step, self.replica, p, name) from None

    def on_send(self, sync: Sync, own: Callable[[], Tensor]) -> None:
        """Let the outer rule act on a fragment that is sent; `own` decodes its outer gradient."""
        with self._fragment(sync.fragment) as fragment:
            self.settings.outer.on_send(fragment, own, sync)

    def keep_error(self, p: int, error_N: Tensor) -> None:
        """Take the error that a payload leaves."""
        self.state.use(ERROR, p).copy_(error_N)
        self.keep(ERROR, p)

    def keep(self, kind: str, p: int) -> None:
        """Take home a vector that was changed."""
        self.state.keep(kind, p)

    def take(self, sync: Sync, average: Average, cohort: Cohort, mixing: MergeRule) -> None:
        """Take an outer step of a fragment, and merge it."""
        p = sync.fragment
        with (
            self.record.merging(),
            self.parameters.merging(p, self.num_steps) as theta,
            self._fragment(p) as fragment,
        ):
            rule = self.settings.outer
            self.lane.queue(lambda: take_outer_step(rule, mixing, fragment, theta, average, sync, cohort))
            self.lane.join()

    @contextmanager
    def _fragment(self, p: int) -> Iterator[FragmentState]:
        """A fragment's state for the outer rule; the vectors that the rule used are kept."""
        used: dict[str, None] = {}

        def use(kind: str) -> Tensor:
            used[kind] = None
            return self.state.use(kind, p)

        yield FragmentState(use)
        for kind in used:
            self.keep(kind, p)


def outer_state(settings: Settings, parameters: FragmentParameters, *, offload: bool) -> OuterState:
    """The state before the first round: Θ is the parameters as they are."""
    return OuterState(
        map(parameters.flat, range(len(settings.fragments))),
        slots=settings.outer.slots,
        with_error=settings.error_feedback is not None,
        offload=offload,
    )
