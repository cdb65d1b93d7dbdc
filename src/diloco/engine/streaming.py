"""StreamingDiLoCo: Algorithm 1 of arXiv 2501.18512 around a torch model and an inner optimizer.

Shapes: N elements of one fragment.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diloco.engine.parameters import FragmentParameters
from diloco.engine.settings import Settings
from diloco.engine.sharded import all_shards_or_none, gathered, local, num_shards, shard_index, sum_over_shards
from diloco.engine.state import KINDS, Kind, OuterState
from diloco.errors import DisagreementError, ExchangeError, NonFiniteError, PayloadError, UserError
from diloco.exchange.control import agree
from diloco.exchange.transport import Exchange, Pending
from diloco.fragments import Fragment
from diloco.kernels.memory import empty
from diloco.outer.digest import parameters_hash
from diloco.outer.nesterov import Nesterov, divide, take_outer_step
from diloco.outer.step import OuterStep
from diloco.reduction.combine import Combine, combine_by, encode_with_feedback
from diloco.schedule import Schedule, Sync
from diloco.wire import Codec, Key, codec


@dataclass
class _InFlight:
    sync: Sync
    combine: Combine
    payloads: tuple[Tensor, ...]
    pending: Pending
    received: bool = False


class StreamingDiLoCo:
    """Keeps the replicas of a model together, a fragment at a time, while each trains on its own.

    Call `step()` after each step of the inner optimizer, or `attach(optimizer)` once, and `finish()` after the
    last. The model is changed in nothing but the values of its parameters. Θ and the outer momentum are FP32
    beside parameters of any dtype.

    A replica may be several processes: shard the model over them (FSDP2's `fully_shard`, on a mesh of the
    replica's own), and give each process an exchange with those that hold the same shard in the other replicas.

        Δ_{m,p} = Θ_p − θ_{m,p};   Δ_p = (1/M) Σ_m decode(encode(Δ_{m,p}))
        Θ_p ← OuterOpt(Θ_p, Δ_p);  θ_{m,p} ← α θ_{m,p} + (1 − α) Θ_p

    With error feedback e, what the codec lost is sent later (arXiv 1901.09847; e starts at zero, and is the
    replica's own): e ← β e + Δ; send C(e); e ← e − C(e).

    Args:
        model: the replica's copy, with the same initial parameters on all replicas.
        fragments: what `strided`, `sequential` or `whole` returns, or your own partition of the parameters.
        schedule: when each fragment is sent and merged.
        outer: the outer optimizer.
        mixing: α, how much of its own parameters a replica keeps at a merge; 0 keeps nothing.
        wire: the codec of the outer gradients, or its name.
        combine: `gather`: each replica receives every other's payload; `reduce_scatter`: each averages a share,
            and sends it in the same codec, or in another: `reduce_scatter:bf16`.
        error_feedback: β, above 0 and at most 1; None is none.
        offload: keep Θ, the outer momentum and the error in pinned host memory, and fetch one fragment ahead.
        seed: what codecs that draw random numbers draw them from; the same on all replicas.
        exchange: how the payloads travel.

    Raises:
        UserError: if the settings contradict each other or the model.
        DisagreementError: if the replicas were given different settings or initial parameters.

    >>> import diloco, torch
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> engine = diloco.StreamingDiLoCo(
    ...     model,
    ...     fragments=diloco.whole(model),
    ...     schedule=diloco.Schedule(sync_every=2, num_fragments=1),
    ...     exchange=diloco.LoopbackExchange(),
    ... )
    >>> for _ in range(4):
    ...     model(torch.ones(1, 3)).sum().backward()
    ...     optimizer.step()
    ...     outer_steps = engine.step()
    >>> outer_steps[0].sync
    Sync(fragment=0, round=2, step=4)
    >>> engine.finish()
    ()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        fragments: Sequence[Fragment],
        schedule: Schedule,
        exchange: Exchange,
        outer: Nesterov | None = None,
        mixing: float = 0.5,
        wire: str | Codec = "e3m0",
        combine: str = "gather",
        error_feedback: float | None = None,
        seed: int = 0,
        offload: bool = False,
    ) -> None:
        self.settings = Settings(
            fragments=tuple(fragments),
            schedule=schedule,
            outer=outer or Nesterov(),
            mixing=mixing,
            wire=codec(wire) if isinstance(wire, str) else wire,
            combine=combine,
            error_feedback=error_feedback,
            seed=seed,
        )
        """What it was told."""
        self.settings.check(model, exchange.num_replicas)
        self.exchange = exchange
        self._combine = self.settings.way
        self._parameters = FragmentParameters(model, self.settings.fragments)
        self._shard_group = self._parameters.shard_group
        self._shard = shard_index(self._shard_group)
        self._state = OuterState(
            map(self._parameters.flat, range(len(self.settings.fragments))),
            with_error=error_feedback is not None,
            offload=offload,
        )
        longest = max(map(self._state.num_elements, range(len(self.settings.fragments))))
        self._fragment_bytes = self._count_bytes()
        self._scratch = empty(longest, torch.float32, self._parameters.device)
        self._in_flight: list[_InFlight] = []
        self._handle: torch.utils.hooks.RemovableHandle | None = None
        self._sound = True
        self._drained_step = 0  # what was sent up to this step was merged by finish()
        self.num_steps = 0
        """Inner steps taken."""
        self.bytes_sent = 0
        """Payload bytes of all shards, each destination counted."""
        self.bytes_received = 0
        """Payload bytes of all shards from the other replicas that were merged."""
        self.blocked_seconds = 0.0
        """How long training has waited for payloads."""
        agree(exchange, self._facts())

    def step(self) -> tuple[OuterStep, ...]:
        """Count an inner step, send the fragments that are due, merge those whose overlap has passed.

        Returns:
            The outer steps that were taken; none on most steps.

        Raises:
            NonFiniteError: if an outer gradient is not finite, before this process sends anything of this step.
            UserError: if a parameter was replaced since the engine was built, before that, too.
            ExchangeError: if payloads don't arrive in time, before anything of this step is merged.
            PayloadError: if one that arrived is damaged, before anything of this step is merged.
            UserError: after any of these, as well: go on from the last state that was saved, in a new engine.
        """
        self._check_sound()
        self._sound = False
        self.num_steps += 1
        due = self.settings.schedule.due(self.num_steps, self.exchange.replica)
        if due.send:
            self._send(due.send)
        merged = self._merge(
            [sync for sync in due.merge if sync.step > self._drained_step],
            forget=self.num_steps - self.settings.schedule.max_overlap,
        )
        if due.send or due.merge:
            self._fetch_ahead()
        self._sound = True
        return merged

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.utils.hooks.RemovableHandle:
        """Call `step()` after every `optimizer.step()` from now on; `remove()` the handle to end that.

        Raises:
            UserError: if it is attached already: of several optimizers, attach to the one that steps last.
        """
        if self._handle is not None and self._handle.id in (self._handle.hooks_dict_ref() or {}):
            raise UserError(
                "the engine is attached already, and would count every inner step twice: attach it alone to "
                "the optimizer that steps last"
            )
        self._handle = optimizer.register_step_post_hook(lambda *_: (self.step(), None)[1])
        return self._handle

    def finish(self) -> tuple[OuterStep, ...]:
        """Receive what is in flight and merge it, in order; every replica calls it after the same step.

        Raises:
            ExchangeError: if payloads don't arrive in time.
            PayloadError: if one that arrived is damaged.
            UserError: after any of these, and after one that `step()` raised.
        """
        self._check_sound()
        self._sound = False
        first_step = self.num_steps - self.settings.schedule.overlap(self.exchange.replica) + 1
        due = [flight.sync for flight in self._in_flight if flight.sync.step >= first_step]
        merged = self._merge(due, forget=self.num_steps)
        self._drained_step = self.num_steps
        self._sound = True
        return merged

    def outer_parameters(self) -> dict[str, Tensor]:
        """Θ by parameter name, FP32, shaped as in the model: what to ship, and to evaluate.

        They are views, which the next outer step changes; with `offload` of host memory. Of a sharded model they
        are sharded as its parameters are: to evaluate that, use `outer_in_place`, since `functional_call` would
        silently take the parameters that FSDP has gathered itself.
        """
        return self._parameters.all_named(self._state.at_home("outer"))

    @contextmanager
    def outer_in_place(self) -> Iterator[None]:
        """The model with Θ in the place of its own parameters, sharded or not; at the end it gets its own back.

        They are kept on the side meanwhile. Take no inner step in there.
        """
        with self._parameters.replaced_by(self.outer_parameters()):
            yield

    def outer_hash(self) -> str:
        """SHA-256 over Θ, whole, in the order of the parameters' names: equal on all replicas after `finish()`.

        Every process of a sharded replica must call it.
        """
        return parameters_hash(self.outer_parameters(), gathered)

    def state_dict(self) -> dict[str, Any]:
        """Everything of this replica that resumes, what is in flight included; model and optimizer apart.

        Plain values, and four dicts of FP32 tensors by parameter name, views of the engine's own where they can
        be: `outer`, `velocity`, `error`, and `sent`, the decoded outer gradients of the fragments in flight. Of a
        sharded model they are DTensors; examples/sharded_replicas.py saves them, and resumes on other shards.
        """
        self._check_sound()
        return {
            **self._facts_of_state(),
            "num_steps": self.num_steps,
            "drained_step": self._drained_step,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "blocked_seconds": self.blocked_seconds,
            **{kind: self._parameters.all_named(self._state.at_home(kind)) for kind in KINDS},
            "in_flight": [list(flight.sync) for flight in self._in_flight],
            "sent": self._sent(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state, and send again what was in flight; every replica must load the same step.

        Build the engine on the initial parameters, which all replicas share, and load the model's own after that.
        What was in flight is sent again in fp32, already rounded: so the state may be cut into other shards.

        Raises:
            DisagreementError: if the replicas load different steps, or one of them what `finish()` has drained.
            UserError: if the state is of another wire, combine, error_feedback, seed or number of replicas, or,
                with something in flight, of another schedule; with that, or error feedback, of another replica.
        """
        refusal = self._refusal(state)
        flying = {"in flight in the loaded state (fragment, round, step)": state["in_flight"]}
        loaded = {"why the state can't be loaded": refusal, "step of the loaded state": state["num_steps"]}
        try:
            agree(self.exchange, loaded | flying)
        except DisagreementError:
            if refusal is None:
                raise
        if refusal is not None:
            raise UserError(refusal)
        self.num_steps = state["num_steps"]
        # With nothing in flight nothing is left to merge, whatever another schedule would have sent.
        self._drained_step = state["drained_step"] if state["in_flight"] else self.num_steps
        self.bytes_sent, self.bytes_received = state["bytes_sent"], state["bytes_received"]
        self.blocked_seconds = state["blocked_seconds"]
        for kind in KINDS:
            for fragment, flat_N in enumerate(self._state.at_home(kind)):
                flat_N.copy_(self._parameters.flat_of(fragment, state[kind]))
        self._in_flight = []
        again = combine_by(self._combine.spec, codec("fp32"))
        for sync in (Sync(*values) for values in state["in_flight"]):
            sent_N = self._parameters.flat_of(sync.fragment, state["sent"])
            payloads = again.encode(sent_N, self._key(sync), self.exchange.num_replicas)
            self._start(sync, again, payloads)

    def _refusal(self, state: Mapping[str, Any]) -> str | None:
        """Why a state can't be loaded here, in a sentence."""
        mine = self._facts_of_state()
        if not state["in_flight"]:
            del mine["schedule"], mine["own_overlap_steps"]
            if self.settings.error_feedback is None:
                del mine["replica"]
        for name, value in mine.items():
            if state.get(name) != value and (name in state or name != "replica"):  # which older states don't tell
                return (
                    f"the state was saved with {name}={state.get(name)}, and this engine has {value}: "
                    "load it into an engine with the settings of the one that saved it"
                )
        return None

    def _facts_of_state(self) -> dict[str, object]:
        return self.settings.facts_of_state(self.exchange.replica, self.exchange.num_replicas)

    def state_like(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """A state with the same tensors as a saved one, sharded as the parameters are now.

        torch.distributed.checkpoint reads what was saved in place, on any number of shards: read `in_flight`
        first, and then the rest into `state_like({"in_flight": …})`.

        Args:
            saved: the plain values of the saved state, of which `in_flight` is used.
        """
        room: dict[str, Tensor] = {}
        for fragment in {fragment for fragment, *_ in saved["in_flight"]}:
            num_elements = self._state.num_elements(fragment)
            zeros_N = torch.zeros(num_elements, dtype=torch.float32, device=self._scratch.device)
            room |= self._parameters.named(fragment, zeros_N)
        return self.state_dict() | {"sent": room}

    def _sent(self) -> dict[str, Tensor]:
        """What the payloads in flight stand for, by parameter name."""
        named: dict[str, Tensor] = {}
        for flight in self._in_flight:
            p, key = flight.sync.fragment, self._key(flight.sync)
            sent_N = flight.combine.decode(flight.payloads, self._state.num_elements(p), key)
            named |= self._parameters.named(p, sent_N)
        return named

    def _check_sound(self) -> None:
        if not self._sound:
            raise UserError(
                f"step {self.num_steps} failed: build a new engine and load the last state that was saved"
            )

    def _send(self, syncs: Sequence[Sync]) -> None:
        """Encode everything first, so that nothing is sent if anything can't be, in any shard of the replica."""
        with self._all_shards_or_none():
            try:
                self._parameters.check_still_the_models(sync.fragment for sync in syncs)
            except ValueError as error:
                raise UserError(f"step {self.num_steps}: {error}") from None
            encoded = [self._encode(sync) for sync in syncs]
        for sync, (payloads, error_N) in zip(syncs, encoded, strict=True):
            if error_N is not None:
                self._state.use("error", sync.fragment).copy_(error_N)
                self._state.keep("error", sync.fragment)
            self._start(sync, self._combine, payloads)
            self.bytes_sent += self._fragment_bytes[sync.fragment]

    def _encode(self, sync: Sync) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What is sent of a fragment, and the error that this leaves."""
        p, key, num_replicas = sync.fragment, self._key(sync), self.exchange.num_replicas
        outer_N, beta = self._state.use("outer", p), self.settings.error_feedback
        delta_N = self._parameters.outer_gradient(p, outer_N, self._scratch[: outer_N.numel()])
        try:
            if beta is None:
                return self._combine.encode(delta_N, key, num_replicas), None
            error_N = self._state.use("error", p)
            return encode_with_feedback(self._combine, delta_N, error_N, beta, key, num_replicas)
        except NonFiniteError:
            raise self._explain_non_finite(delta_N, sync) from None

    def _start(self, sync: Sync, combine: Combine, payloads: tuple[Tensor, ...]) -> None:
        num_elements = self._state.num_elements(sync.fragment)
        pending = combine.start(self.exchange, payloads, num_elements, self._key(sync))
        self._in_flight.append(_InFlight(sync, combine, payloads, pending))

    def _merge(self, syncs: Sequence[Sync], *, forget: int) -> tuple[OuterStep, ...]:
        """Wait for everything first, so that a failure leaves all parameters as they were, in all shards.

        What was sent up to the step `forget` no replica needs any more, not even after a resume.
        """
        flights = [flight for sync in syncs for flight in self._in_flight if flight.sync == sync]
        assert len(flights) == len(syncs), "what is due was sent"
        # Merged here before a resume, and sent again for the sake of a slower replica.
        again = [
            flight
            for flight in self._in_flight
            if flight.sync.step <= forget and not flight.received and flight.sync not in syncs
        ]
        self._in_flight = [flight for flight in self._in_flight if flight.sync.step > forget]
        if not flights and not again:
            return ()  # most steps: the shards have nothing to tell each other
        with self._all_shards_or_none():
            for flight in again:
                self._receive(flight)
            received = [self._receive(flight) for flight in flights]
            totals = [
                self._total(flight, payloads, first=not i)
                for i, (flight, (payloads, _)) in enumerate(zip(flights, received, strict=True))
            ]
        return tuple(
            self._outer_step(flight, total_N, *found)
            for flight, total_N, found in zip(flights, totals, received, strict=True)
        )

    def _all_shards_or_none(self) -> AbstractContextManager[None]:
        another = f"step {self.num_steps}: another shard of replica {self.exchange.replica}"
        return all_shards_or_none(self._shard_group, self._parameters.device, another)

    def _receive(self, flight: _InFlight) -> tuple[dict[int, Tensor], float]:
        """What the combining brought, a payload of every replica, and the seconds that training waited for it."""
        sync, start = flight.sync, time.perf_counter()
        try:
            payloads = flight.pending.wait()
        except ExchangeError as error:
            raise ExchangeError(f"step {self.num_steps}: {error}", error.missing) from error
        except PayloadError as error:  # of a share, where it was averaged
            raise self._explain_damage(error, sync) from error
        blocked_seconds = time.perf_counter() - start
        flight.received = True
        self.blocked_seconds += blocked_seconds
        return payloads, blocked_seconds

    def _total(self, flight: _InFlight, payloads: dict[int, Tensor], *, first: bool) -> Tensor:
        """The sum of the outer gradients; of the first that is due, in the memory kept for that."""
        total_N = self._scratch[: self._state.num_elements(flight.sync.fragment)]
        if not first:
            total_N = torch.empty_like(total_N)
        try:
            flight.combine.total(payloads, total_N, self._key(flight.sync))
        except PayloadError as error:
            raise self._explain_damage(error, flight.sync) from error
        return total_N

    def _explain_damage(self, error: PayloadError, sync: Sync) -> PayloadError:
        return PayloadError(f"step {self.num_steps}: fragment {sync.fragment}, round {sync.round}: {error}")

    def _outer_step(
        self, flight: _InFlight, total_N: Tensor, payloads: dict[int, Tensor], blocked_seconds: float
    ) -> OuterStep:
        sync, combine = flight.sync, flight.combine
        p, divisor = sync.fragment, combine.divisor(self.exchange.num_replicas)
        self.bytes_received += self._fragment_bytes[p]
        outer_N, key = self._state.use("outer", p), self._key(sync)
        take_outer_step(
            outer_N,
            self._state.use("velocity", p),
            total_N,
            divisor=divisor,
            outer=self.settings.outer,
            parameters=self._parameters.shards(p),
            mixing=self.settings.mixing,
        )
        self._state.keep("outer", p)
        self._state.keep("velocity", p)
        # Not Θ itself, which an outer step that is kept would keep on the device.
        num_elements, device = outer_N.numel(), outer_N.device
        decode = partial(combine.each, payloads, num_elements, key, device)

        def average() -> Tensor:
            total_N = torch.empty(num_elements, dtype=torch.float32, device=device)
            combine.total(payloads, total_N, key)
            return divide(total_N, divisor)

        add_up = partial(sum_over_shards, group=self._shard_group)
        return OuterStep(sync, blocked_seconds, average, decode, self._parameters.spans[p], add_up)

    def _fetch_ahead(self) -> None:
        """Announce the fragment that is sent or merged next, and what of it will be used."""
        for step in range(self.num_steps + 1, self.num_steps + self.settings.schedule.sync_every + 1):
            due = self.settings.schedule.due(step, self.exchange.replica)
            if due.send or due.merge:
                kinds: tuple[Kind, ...] = ("outer", "error") if due.send else ("outer", "velocity")
                self._state.expect(kinds, (due.send or due.merge)[0].fragment)
                return

    def _key(self, sync: Sync) -> Key:
        return Key(self.settings.seed, sync.fragment, sync.round, self.exchange.replica, shard=self._shard)

    def _count_bytes(self) -> list[int]:
        """What a replica sends of each fragment, and receives, in all its shards."""
        bytes_of = [
            self._combine.bytes_sent(self._state.num_elements(p), self.exchange.num_replicas)
            for p in range(len(self.settings.fragments))
        ]
        return sum_over_shards(torch.tensor(bytes_of, device=self._parameters.device), self._shard_group).tolist()

    def _explain_non_finite(self, delta_N: Tensor, sync: Sync) -> NonFiniteError:
        name = self._parameters.first_not_finite(sync.fragment, delta_N)
        where = f"step {self.num_steps}: the outer gradient of {name or 'some parameter'}"
        what = "is not finite" if name else "is finite, but not with what error feedback adds"
        return NonFiniteError(
            f"{where} (replica {self.exchange.replica}, fragment {sync.fragment}) {what}; "
            "nothing was sent: lower the learning rate"
        )

    def _facts(self) -> dict[str, object]:
        """What all replicas must agree on, in the order in which a difference explains the most."""
        name_of_shard = (
            "which shard of how many this process holds (a replica's mesh has no process of another replica)"
        )
        shards = {name: local(parameter) for name, parameter in self.outer_parameters().items()}
        return {
            "num_replicas": self.exchange.num_replicas,
            name_of_shard: [self._shard, num_shards(self._shard_group)],
            **self.settings.facts(self.exchange.num_replicas),
            **{f"shape, fragment and place of parameter {n}": at for n, at in self._parameters.places().items()},
            "initial parameters (SHA-256)": parameters_hash(shards),
        }
