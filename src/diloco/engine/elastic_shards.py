"""A sharded replica among others that come and go: its first process is the replica, and the others follow it."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from diloco.engine.elastic import ElasticMembership, accepted_of, refusal_to_reset, refuse_if_sent, vectors_of
from diloco.engine.outer_state import ERROR, OUTER, OuterState
from diloco.engine.parameters import FragmentParameters, Masters, is_sharded, joined, local, place_of
from diloco.engine.replica import Membership, Replica, outer_state
from diloco.engine.settings import Settings
from diloco.errors import ExchangeError
from diloco.exchange.notices import first_sentence
from diloco.exchange.process_group import TorchGroup, Work, group_like, wait_for
from diloco.fragments import Fragment
from diloco.outer.step import OuterStep
from diloco.rendezvous.contract import Rendezvous
from diloco.schedule import Sync
from diloco.wire.kernels.memory import empty


class Call(IntEnum):
    """The messages of the first process, and the answers of the others."""

    FAILED = 0
    """The sender can't go on; the value says why."""
    IDLE = 1
    """An inner step after which nothing happens."""
    STEP = 2
    """An inner step after which calls follow until DONE."""
    FINISH = 3
    """The end of the run: calls follow until DONE."""
    DONE = 4
    """This step is over; the value is a `Report`."""
    THETA = 5
    """Send your shards of θ_p."""
    MERGE = 6
    """Receive your shards of θ_p after a merge."""
    GATHER = 7
    """Send your shards of the vectors that all processes pass."""
    SCATTER = 8
    """Receive your shards of the vectors that the first process passes."""
    STATE = 9
    """The message holds the plain values of a state, for all processes."""
    ANSWER = 10
    """A vector follows."""


class Message(NamedTuple):
    """A call, and what it is about."""

    call: Call
    fragment: int = 0
    value: Any = None
    """A JSON value."""


class LedGroup(TorchGroup):
    """The processes of one replica, of which the first leads: the others do what it calls for.

    Every wait is bounded. A process that has sent a vector goes on to what the first one says next, so that it
    hears of a failure.

    Args:
        group: the processes, on gloo.
        timeout_seconds: how long a wait may take: longer than what the first process does between two calls.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        super().__init__(group, torch.device("cpu"))
        self.failure: str | None = None
        """The process of this replica that has failed, and its reason."""
        self._timeout_seconds = timeout_seconds
        self._sent: list[_Posted] = []
        self._has_reported = False
        self._failed_process: int | None = None

    @property
    def is_first(self) -> bool:
        """True for the process that calls."""
        return self.index == 0

    def lead(self, call: Call, fragment: int = 0, value: object = None) -> None:
        """Call the other processes; only the first may."""
        assert self.is_first, "the others follow"
        posted = [(k, self._post(Message(call, fragment, value), k)) for k in range(1, self.size)]
        for other, works in posted:
            self._wait(works, other, self._timeout_seconds)

    def follow(self, *expected: Call) -> Message:
        """The next call of the first process.

        Raises:
            ExchangeError: if that one failed, does not answer, or does something else than is expected here.
        """
        message = self._heard(0)
        if message.call not in expected:
            raise ExchangeError(
                f"the first process of this replica is at {message.call.name}, and process {self.index} at "
                f"{' or '.join(call.name for call in expected)}: let all of them call the engine's methods in the "
                "same order, and take the same number of steps"
            )
        return message

    def meet(self, call: Call, fragment: int = 0) -> None:
        """Start a call that all processes make; the first one sends it, the others check that it is this one."""
        if self.is_first:
            self.lead(call, fragment)
        else:
            message = self.follow(call)
            assert message.fragment == fragment, "all go through the fragments in order"

    def send(self, vector_n: Tensor, to: int) -> None:
        """Send a vector on the CPU, which must not change any more, to the first process or from it to another."""
        works = [] if self.is_first else self._post(Message(Call.ANSWER), to)
        if vector_n.numel():
            works.append(self._posted(vector_n, to, _VECTOR))
        if self.is_first:
            self._wait(works, to, self._timeout_seconds)
        else:
            self._sent += works

    def receive(self, source: int, num_elements: int) -> Tensor:
        """The FP32 vector (n) that a process sends.

        Raises:
            ExchangeError: if it failed, or does not answer.
        """
        if self.is_first:
            self._heard(source)
        vector_n = torch.empty(num_elements, dtype=torch.float32, device="cpu")
        if num_elements:
            self._receive_into(vector_n, source, _VECTOR)
        return vector_n

    @contextmanager
    def fail_together(self, another: str = "") -> Iterator[None]:
        """A context that fails in all processes if the work in it fails in one, as soon as they next meet.

        Args:
            another: not used: messages name the process.
        """
        try:
            yield
        except Exception as error:
            self.fail(str(error) or type(error).__name__)
            raise

    def fail(self, reason: str) -> None:
        """Tell the others that this process can't go on; waits until they know, 3 s at the most."""
        if self._has_reported or self._failed_process == 0:
            return
        self._has_reported = True
        self.failure = self.failure or f"process {self.index} of this replica failed: {reason}"
        posted: list[tuple[int, list[_Posted]]] = []
        for other in range(1, self.size) if self.is_first else range(1):
            if other != self._failed_process:
                with suppress(ExchangeError):  # it may be gone, too
                    posted.append((other, self._post(Message(Call.FAILED, value=self.failure), other)))
        deadline = time.monotonic() + _SECONDS_TO_BE_READ
        for other, works in posted:
            with suppress(ExchangeError):
                self._wait(works, other, max(deadline - time.monotonic(), 0.01))

    def _post(self, message: Message, to: int) -> "list[_Posted]":
        """Start to send a message."""
        text = b"" if message.value is None else msgspec.json.encode(message.value)
        head = torch.tensor([message.call, message.fragment, len(text)], dtype=torch.int64, device="cpu")
        works = [self._posted(head, to, _HEAD)]
        if text:
            works.append(self._posted(torch.frombuffer(bytearray(text), dtype=torch.uint8), to, _TEXT))
        return works

    def _posted(self, tensor: Tensor, to: int, tag: int) -> "_Posted":
        with self._naming(to):
            return self.group.send([tensor], to, tag), tensor

    def _heard(self, source: int) -> Message:
        """The next message of a process."""
        head = torch.empty(3, dtype=torch.int64, device="cpu")
        self._receive_into(head, source, _HEAD)
        call, fragment, num_bytes = head.tolist()
        value = None
        if num_bytes:
            text = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            self._receive_into(text, source, _TEXT)
            value = msgspec.json.decode(text.numpy().data)
        message = Message(Call(call), fragment, value)
        if message.call is Call.FAILED:
            self.failure, self._failed_process = message.value, source
            raise ExchangeError(message.value)
        sent, self._sent = self._sent, []
        self._wait(sent, source, self._timeout_seconds)
        return message

    def _receive_into(self, tensor: Tensor, source: int, tag: int) -> None:
        with self._naming(source):
            wait_for(self.group.recv([tensor], source, tag), self._timeout_seconds)

    def _wait(self, works: "list[_Posted]", other: int, seconds: float) -> None:
        with self._naming(other):
            for work, _ in works:
                wait_for(work, seconds)

    @contextmanager
    def _naming(self, other: int) -> Iterator[None]:
        """Name the process that does not answer."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            raise ExchangeError(
                f"process {other} of this replica does not answer: {first_sentence(error)}"
            ) from error


_Posted: TypeAlias = tuple[Work, Tensor]
"""A message on its way, and its memory, which must live as long."""


_HEAD, _TEXT, _VECTOR = range(3)
"""The tags of a message's parts: none is received in the place of another."""


_SECONDS_TO_BE_READ = 3.0


class GatheredParameters(FragmentParameters):
    """A sharded model's parameters by fragment; every process calls the same methods in the same order.

    Where the first process alone knows what comes next, it calls `flat`, `outer_gradient` and `merging`, and the
    others answer with `send_theta` and `receive_theta`.

    Args:
        model: sharded over the replica's processes.
        fragments: a partition of its trainable parameters.
        masters: as of `FragmentParameters`.
        timeout_seconds: how long a wait for another process of the replica may take.

    Raises:
        UserError: as `FragmentParameters`.
    """

    def __init__(
        self,
        model: nn.Module,
        fragments: Sequence[Fragment],
        masters: Masters | Mapping[str, Tensor] | None = None,
        *,
        timeout_seconds: float,
    ) -> None:
        super().__init__(model, fragments, masters)
        assert isinstance(self.group, TorchGroup), "the model is sharded"
        group = group_like(self.group.group, timeout_seconds)
        self.led = LedGroup(group, timeout_seconds)
        """`group`, in which the first process leads."""
        self.group = self.led
        self._ranks = dist.get_process_group_ranks(group)
        self.part, self.device = (0, 1), torch.device("cpu")

    @staticmethod
    def shape_in_flat(parameter: Tensor) -> torch.Size:
        """The shape of a parameter's part of a flat vector: the whole parameter."""
        return parameter.shape

    def sum_over_parts(self, values: Tensor) -> Tensor:
        """The values: the first process, which takes the outer steps, has the whole."""
        return values

    def flat(self, fragment: int) -> Tensor:
        """A copy of θ_p, FP32 (N)."""
        self.led.meet(Call.THETA, fragment)
        return self.send_theta(fragment)

    def outer_gradient(self, fragment: int, outer_N: Tensor, to_N: Tensor) -> Tensor:
        """Write Δ_{m,p} = Θ_p − θ_{m,p} to `to_N`, and return it."""
        return torch.sub(outer_N, self.flat(fragment), out=to_N)

    @contextmanager
    def merging(self, fragment: int, step: int) -> Iterator[list[Tensor]]:
        """θ_p, whole, to be changed in place by a merge; all shards have the new values at the end."""
        theta_N = self.flat(fragment)
        yield self._parts(fragment, theta_N) if self.led.is_first else []
        self.led.meet(Call.MERGE, fragment)
        self.receive_theta(fragment, step, theta_N)

    def send_theta(self, fragment: int) -> Tensor:
        """Gather θ_p, FP32 (N): what every process does in `flat`."""
        self.check_copies((fragment,))
        return self._gathered(fragment, self.theta(fragment))

    def receive_theta(self, fragment: int, step: int, theta_N: Tensor | None = None) -> None:
        """Take this process's shards of θ_p after a merge, which the first process has whole."""
        with super().merging(fragment, step) as theta:
            for own, part in zip(theta, self._scattered(fragment, theta_N), strict=True):
                own.copy_(part)

    def named(self, fragment: int, flat_N: Tensor) -> dict[str, Tensor]:
        """A fragment's flat vector (N) by parameter name: copies in host memory, sharded as the parameters are."""
        self.led.meet(Call.SCATTER, fragment)
        return self._sharded(fragment, self._scattered(fragment, flat_N))

    def flat_of(self, fragment: int, by_name: Mapping[str, Tensor]) -> Tensor:
        """A fragment's flat FP32 vector (N), from tensors by parameter name, sharded as the parameters are."""
        self.led.meet(Call.GATHER, fragment)
        shards = [local(by_name[name]) for name in self._by_fragment[fragment]]
        return self._gathered(fragment, self._parts_of(fragment, shards))

    def _gathered(self, fragment: int, parts: Iterable[Tensor]) -> Tensor:
        """A whole flat vector, gathered from the parts that every process has, FP32 (N)."""
        own_n = joined(part.cpu() for part in parts)
        if not self.led.is_first:
            self.led.send(own_n, 0)
            return own_n.new_empty(0)
        shapes = [self.shape_in_flat(parameter) for parameter in self._by_fragment[fragment].values()]
        whole_N = empty(sum(shape.numel() for shape in shapes), torch.float32, self.device)
        for index, views in enumerate(self._cut(fragment, whole_N)):
            sizes = [view.numel() for view in views]
            part_n = self.led.receive(index, sum(sizes)) if index else own_n
            for view, values in zip(views, part_n.split(sizes), strict=True):
                view.copy_(values.view(view.shape))
        return whole_N

    def _scattered(self, fragment: int, whole_N: Tensor | None) -> list[Tensor]:
        """This process's parts of a flat vector that the first process has whole."""
        shapes = [part.shape for part in self._parts_of(fragment, self.shards(fragment))]
        if self.led.is_first:
            assert whole_N is not None, "the first process has the whole"
            parts = self._cut(fragment, whole_N)
            for index in range(1, len(parts)):
                self.led.send(joined(parts[index]), index)
            own_n = joined(parts[0])
        else:
            own_n = self.led.receive(0, sum(shape.numel() for shape in shapes))
        split = own_n.split([shape.numel() for shape in shapes])
        return [values.view(shape) for values, shape in zip(split, shapes, strict=True)]

    def _cut(self, fragment: int, whole_N: Tensor) -> list[list[Tensor]]:
        """Views of every process's parts of a whole flat vector, parameter by parameter."""
        views: list[list[Tensor]] = [[] for _ in self._ranks]
        for like, whole in zip(self._by_fragment[fragment].values(), self._parts(fragment, whole_N), strict=True):
            assert is_sharded(like), "the model is sharded"
            for of_process, rank in zip(views, self._ranks, strict=True):
                coordinate = (like.device_mesh.mesh == rank).nonzero()[0].tolist()
                of_process.append(whole[place_of(like, coordinate, part=True)])
        return views


def sharded_membership(
    settings: Settings,
    rendezvous: Rendezvous,
    model: nn.Module,
    masters: Masters | Mapping[str, Tensor] | None,
) -> Membership:
    """This process's part in a replica of several: the first one joins the run."""
    # The first process may wait for other replicas before it is done with a step.
    seconds = 3 * rendezvous.timeout_seconds
    parameters = GatheredParameters(model, settings.fragments, masters, timeout_seconds=seconds)
    if not parameters.led.is_first:
        return FollowingMembership(settings, parameters)
    with parameters.led.fail_together():
        # Θ lies in host memory anyway.
        replica = Replica(settings, parameters, outer_state(settings, parameters, offload=False))
        return LeadingMembership(replica, rendezvous, parameters.led)


class LeadingMembership(ElasticMembership):
    """The first process of a replica: it joins, offers and decides as a replica of one process does.

    Raises:
        DisagreementError: if the run has other settings or initial parameters.
    """

    def __init__(self, replica: Replica, rendezvous: Rendezvous, group: LedGroup) -> None:
        self._group = group
        super().__init__(replica, rendezvous)
        self._report(())

    @property
    def failure(self) -> str | None:
        """The reason why this replica can't go on, as its other processes read it."""
        if (failure := super().failure) is not None:
            self._group.fail(failure)
        return failure

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """A context whose errors end this replica's part in the run, and its other processes."""
        with super().fail_together(), self._group.fail_together():
            yield

    def look(self) -> bool:
        """True if something is sent, decided, waited for, or to be looked at."""
        is_due = super().look()
        self._group.lead(Call.STEP if is_due else Call.IDLE)
        return is_due

    def advance(self) -> tuple[OuterStep, ...]:
        """Offer the fragments that are due, and take the outer steps that were decided."""
        return self._report(super().advance())

    def finish(self, *, flush: bool, close: bool) -> tuple[OuterStep, ...]:
        """Wait for the decisions of own payloads, bounded in time, and take them."""
        self._group.lead(Call.FINISH)
        return self._report(super().finish(flush=flush, close=close))

    def state_dict(self) -> dict[str, Any]:
        """Everything of this replica that resumes; Θ and the slots lie in the store."""
        state = super().state_dict()
        values = {name: value for name, value in state.items() if name not in (OUTER, ERROR)}
        self._group.lead(Call.STATE, value=values)
        return state

    def _report(self, outer_steps: tuple[OuterStep, ...]) -> tuple[OuterStep, ...]:
        """Tell the other processes that nothing follows in this step, and what has happened."""
        replica = self.replica
        sees_deltas = self.form.second is None  # with averages nobody has all payloads
        report = Report(
            run=self.joined.run,
            replica=replica.number,
            rounds=self.rounds,
            counted_tokens=replica.tokens - self.uncounted_tokens,
            counters=replica.counters(),
            num_sent=self.next_seq,
            outer_steps=[
                _Taken(*o.sync, len(o.cohort.members) if o.cohort and sees_deltas else 0) for o in outer_steps
            ],
        )
        self._group.lead(Call.DONE, value=report)
        return outer_steps


class FollowingMembership(Membership):
    """Another process of a replica: it hands over its shards of θ, and takes them back."""

    def __init__(self, settings: Settings, parameters: GatheredParameters) -> None:
        self._parameters, self._group = parameters, parameters.led
        fragments = range(len(settings.fragments))
        with_error = settings.error_feedback is not None
        nothing = [torch.empty(0, dtype=torch.float32, device="cpu") for _ in fragments]
        state = OuterState(nothing, slots=settings.outer.slots, with_error=with_error, offload=False)
        self.replica = Replica(settings, parameters, state)
        self._report = Report()
        with self._group.fail_together():
            self._follow()
        self._call = Call.IDLE

    @property
    def failure(self) -> str | None:
        """The reason why this replica can't go on; None as far as is known."""
        return self._group.failure

    @property
    def uncounted_tokens(self) -> float:
        """Tokens that this replica has read and the run has not counted yet, on average over the fragments."""
        return self.replica.tokens - self._report.counted_tokens

    def initial_fragments(self) -> Sequence[int]:
        """The fragments of which no outer step was taken."""
        return [p for p, num_taken in enumerate(self._report.rounds) if not num_taken]

    def fail_together(self) -> AbstractContextManager[None]:
        """A context whose errors the first process hears of."""
        return self._group.fail_together()

    def look(self) -> bool:
        """True if the first process says so, or a merge is to be looked at."""
        self._call = self._group.follow(Call.STEP, Call.IDLE).call
        return self._call is Call.STEP or bool(self._parameters.watch.merges)

    def advance(self) -> tuple[OuterStep, ...]:
        """Serve what the first process does after this inner step."""
        self._parameters.look_at_merges(self.replica.num_steps)
        return self._follow() if self._call is Call.STEP else ()

    def finish(self, *, flush: bool, close: bool) -> tuple[OuterStep, ...]:
        """Serve the first process until the end; the arguments that it was given decide what is done."""
        self._group.follow(Call.FINISH)
        return self._follow()

    def reset_outer(self) -> None:
        """Refuse to reset Θ: the log decides it."""
        raise refusal_to_reset()

    def state_dict(self) -> dict[str, Any]:
        """The first process's plain values, and this one's shards."""
        state = self.replica.state
        tensors = {kind: self._parameters.all_named(state.at_home(kind)) for kind in (OUTER, ERROR)}
        return self._group.follow(Call.STATE).value | tensors

    def accepted(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """A state of this run's model.

        Raises:
            UserError: if it is another's, or this engine has trained.
        """
        refuse_if_sent(self._report.num_sent)
        return accepted_of(self.replica, self._report.run, state), ()

    def load(self, accepted: Mapping[str, Any]) -> None:
        """Hand over the shards of a state; the first process moves θ before the next inner step ends."""
        vectors_of(accepted, self._parameters)
        self.replica.resume(accepted)

    def _follow(self) -> tuple[OuterStep, ...]:
        """Serve the first process until it is done with this step; returns the outer steps that it took."""
        while (message := self._group.follow(Call.THETA, Call.MERGE, Call.DONE)).call is not Call.DONE:
            self._serve(message)
        self._report = msgspec.convert(message.value, Report)
        self.replica.number = self._report.replica
        self.replica.resume(self._report.counters)
        return tuple(self._outer_step(taken) for taken in self._report.outer_steps)

    def _serve(self, message: Message) -> None:
        """Do this process's part of a call."""
        if message.call is Call.THETA:
            self._parameters.watch.check_of_merges(self.replica.num_steps)()
            self.replica.check_parameters((message.fragment,))
            self._parameters.send_theta(message.fragment)
        else:
            self._parameters.receive_theta(message.fragment, self.replica.num_steps)

    def _outer_step(self, taken: "_Taken") -> OuterStep:
        """An outer step whose vectors, which are whole in the first process, are empty here."""
        nothing = partial(torch.empty, 0, dtype=torch.float32, device="cpu")

        def deltas() -> Iterator[Tensor]:
            return (nothing() for _ in range(taken.num_deltas))

        sync = Sync(taken.fragment, taken.round, taken.step)
        return self.replica.describe(sync, nothing, deltas)


class _Taken(msgspec.Struct):
    """An outer step that the first process has taken."""

    fragment: int
    round: int
    step: int
    num_deltas: int
    """Outer gradients that it has whole; 0 for a snapshot, and with reduce_scatter."""


class Report(msgspec.Struct):
    """The first process's report to the others after a step that changed something."""

    run: str = ""
    replica: int = 0
    rounds: list[int] = []
    counted_tokens: float = 0.0
    """Tokens that the run has counted, on average over the fragments."""
    counters: dict[str, Any] = {}
    num_sent: int = 0
    outer_steps: list[_Taken] = []
