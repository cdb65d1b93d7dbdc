"""StreamingDiLoCo: Algorithm 1 of arXiv 2501.18512 around a torch model and an inner optimizer.

Shapes: N elements of one fragment.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from diloco.exchange import Exchange, ExchangeError, Pending, agree
from diloco.fragments import Fragment, block_spans, check_partition
from diloco.outer import Nesterov, OuterStep, average, merge, parameters_hash
from diloco.schedule import Schedule, Sync
from diloco.wire import Codec, codec


class NonFiniteError(ValueError):
    """An outer gradient holds NaN or an infinity; nothing of it was sent."""


@dataclass
class _InFlight:
    sync: Sync
    payload: Tensor
    pending: Pending
    received: bool = False


class StreamingDiLoCo:
    """Keeps the replicas of a model together, a fragment at a time, while each trains on its own.

    Call `step()` after each step of the inner optimizer, or `attach(optimizer)` once, and `finish()` after the
    last. The model is changed in nothing but the values of its parameters. Θ and the outer momentum are FP32
    beside parameters of any dtype.

        Δ_{m,p} = Θ_p − θ_{m,p};   Δ_p = (1/M) Σ_m decode(encode(Δ_{m,p}))
        Θ_p ← OuterOpt(Θ_p, Δ_p);  θ_{m,p} ← α θ_{m,p} + (1 − α) Θ_p

    Args:
        model: the replica's copy, with the same initial parameters on all replicas.
        fragments: what `strided`, `sequential` or `whole` returns, or your own partition of the parameters.
        schedule: when each fragment is sent and merged.
        outer: the outer optimizer.
        mixing: α, how much of its own parameters a replica keeps at a merge; 0 keeps nothing.
        wire: the codec of the outer gradients, or its name.
        combine: `gather`: each replica receives every other's payload.
        exchange: how the payloads travel.

    Raises:
        ValueError: if the settings contradict each other or the model.
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
        combine: Literal["gather"] = "gather",
    ) -> None:
        self.fragments, self.schedule, self.exchange = tuple(fragments), schedule, exchange
        self.outer, self.mixing = outer or Nesterov(), mixing
        self.wire = codec(wire) if isinstance(wire, str) else wire
        check_settings(
            model,
            fragments=self.fragments,
            schedule=schedule,
            mixing=mixing,
            combine=combine,
            num_replicas=exchange.num_replicas,
        )
        named = dict(model.named_parameters())
        self._parameters = [{name: named[name] for name in fragment.parameters} for fragment in self.fragments]
        sizes = {name: parameter.numel() for name, parameter in named.items()}
        self._spans = [block_spans(fragment, sizes) for fragment in self.fragments]
        self._outer = [self._flat(fragment) for fragment in range(len(self.fragments))]
        self._velocity = [torch.zeros_like(outer_N) for outer_N in self._outer]
        self._in_flight: list[_InFlight] = []
        self._sound = True
        self._drained_step = 0  # what was sent up to this step was merged by finish()
        self.num_steps = 0
        """Inner steps taken."""
        self.bytes_sent = 0
        """Payload bytes, each destination counted."""
        self.bytes_received = 0
        """Payload bytes from the other replicas that were merged."""
        self.blocked_seconds = 0.0
        """How long training has waited for payloads."""
        agree(exchange, self._facts(combine))

    def step(self) -> tuple[OuterStep, ...]:
        """Count an inner step, send the fragments that are due, merge those whose overlap has passed.

        Returns:
            The outer steps that were taken; none on most steps.

        Raises:
            NonFiniteError: if an outer gradient is not finite, before anything of this step is sent.
            ExchangeError: if payloads don't arrive in time, before anything of this step is merged.
            ValueError: after either of these: go on from the last state that was saved, in a new engine.
        """
        self._check_sound()
        self._sound = False
        self.num_steps += 1
        due = self.schedule.due(self.num_steps, self.exchange.replica)
        if due.send:
            self._send(due.send)
        merged = self._merge([sync for sync in due.merge if sync.step > self._drained_step])
        self._forget_before(self.num_steps - self.schedule.max_overlap)
        self._sound = True
        return merged

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.utils.hooks.RemovableHandle:
        """Call `step()` after every `optimizer.step()` from now on; `remove()` the handle to end that."""
        return optimizer.register_step_post_hook(lambda *_: (self.step(), None)[1])

    def finish(self) -> tuple[OuterStep, ...]:
        """Receive what is in flight and merge it, in order; every replica calls it after the same step.

        Raises:
            ExchangeError: if payloads don't arrive in time.
        """
        self._check_sound()
        self._sound = False
        first_step = self.num_steps - self.schedule.overlap(self.exchange.replica) + 1
        merged = self._merge([flight.sync for flight in self._in_flight if flight.sync.step >= first_step])
        self._forget_before(self.num_steps)
        self._drained_step = self.num_steps
        self._sound = True
        return merged

    def outer_parameters(self) -> dict[str, Tensor]:
        """Θ by parameter name, FP32, shaped as in the model: what to evaluate, e.g. with `functional_call`."""
        return self._by_name(self._outer)

    def outer_hash(self) -> str:
        """SHA-256 over Θ in the order of the parameters' names: equal on all replicas after `finish()`."""
        return parameters_hash(self.outer_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Everything of this replica that resumes, payloads in flight included; model and optimizer apart."""
        self._check_sound()
        return {
            "num_steps": self.num_steps,
            "drained_step": self._drained_step,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "blocked_seconds": self.blocked_seconds,
            "outer": self._by_name(self._outer),
            "velocity": self._by_name(self._velocity),
            "in_flight": [{"sync": tuple(f.sync), "payload": f.payload} for f in self._in_flight],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state, and send again what was in flight; every replica must load the same step.

        Build the engine on the initial parameters, which all replicas share, and load the model's own after that.

        Raises:
            DisagreementError: if the replicas load different steps.
        """
        agree(self.exchange, {"step of the loaded state": state["num_steps"]})
        self.num_steps, self._drained_step = state["num_steps"], state["drained_step"]
        self.bytes_sent, self.bytes_received = state["bytes_sent"], state["bytes_received"]
        self.blocked_seconds = state["blocked_seconds"]
        for fragment in range(len(self.fragments)):
            for flats, values in ((self._outer, state["outer"]), (self._velocity, state["velocity"])):
                parts = [values[name].reshape(-1) for name in self._parameters[fragment]]
                flats[fragment] = torch.cat(parts).to(flats[fragment])
        self._in_flight = []
        for flight in state["in_flight"]:
            self._start(Sync(*flight["sync"]), flight["payload"])

    def _check_sound(self) -> None:
        if not self._sound:
            raise ValueError(
                f"step {self.num_steps} failed: build a new engine and load the last state that was saved"
            )

    def _send(self, syncs: Sequence[Sync]) -> None:
        deltas = [self._outer[sync.fragment] - self._flat(sync.fragment) for sync in syncs]
        for sync, delta_N in zip(syncs, deltas, strict=True):
            self._check_finite(delta_N, sync)
        for sync, delta_N in zip(syncs, deltas, strict=True):
            payload = self.wire.encode(delta_N)
            self._start(sync, payload)
            self.bytes_sent += payload.numel() * (self.exchange.num_replicas - 1)

    def _start(self, sync: Sync, payload: Tensor) -> None:
        others = (m for m in range(self.exchange.num_replicas) if m != self.exchange.replica)
        pending = self.exchange.start(dict.fromkeys(others, payload), sync.fragment, sync.round)
        self._in_flight.append(_InFlight(sync, payload, pending))

    def _merge(self, syncs: Sequence[Sync]) -> tuple[OuterStep, ...]:
        """Wait for everything first, so that a failure leaves all parameters as they were."""
        flights = [flight for sync in syncs for flight in self._in_flight if flight.sync == sync]
        assert len(flights) == len(syncs), "what is due was sent"
        received = [self._receive(flight) for flight in flights]
        return tuple(self._outer_step(sync, *found) for sync, found in zip(syncs, received, strict=True))

    def _receive(self, flight: _InFlight) -> tuple[dict[int, Tensor], float]:
        """Every replica's payload, this one's included, and the seconds that training waited for them."""
        start = time.perf_counter()
        try:
            payloads = dict(flight.pending.wait())
        except ExchangeError as error:
            raise ExchangeError(f"step {self.num_steps}: {error}", error.missing) from error
        blocked_seconds = time.perf_counter() - start
        flight.received = True
        self.blocked_seconds += blocked_seconds
        payloads[self.exchange.replica] = flight.payload
        return payloads, blocked_seconds

    def _outer_step(self, sync: Sync, payloads: Mapping[int, Tensor], blocked_seconds: float) -> OuterStep:
        p = sync.fragment
        self.bytes_received += sum(
            n.numel() for replica, n in payloads.items() if replica != self.exchange.replica
        )
        num_elements, device = self._outer[p].numel(), self._outer[p].device
        deltas = tuple(
            self.wire.decode(payloads[replica].to(device), num_elements) for replica in sorted(payloads)
        )
        delta_N = average(deltas)
        self._outer[p], self._velocity[p] = self.outer.step(self._outer[p], self._velocity[p], delta_N)
        self._write(p, merge(self._flat(p), self._outer[p], self.mixing))
        return OuterStep(sync, blocked_seconds, delta_N, deltas, self._spans[p])

    def _forget_before(self, step: int) -> None:
        """Drop the payloads that no replica needs any more, not even after a resume."""
        for flight in self._in_flight:
            if flight.sync.step <= step and not flight.received:
                self._receive(flight)  # merged here before a resume, sent again for the sake of a slower replica
        self._in_flight = [flight for flight in self._in_flight if flight.sync.step > step]

    def _flat(self, fragment: int) -> Tensor:
        """The replica's own parameters of a fragment, as one FP32 vector."""
        return torch.cat([p.detach().reshape(-1).float() for p in self._parameters[fragment].values()])

    def _write(self, fragment: int, theta_N: Tensor) -> None:
        parameters = self._parameters[fragment].values()
        with torch.no_grad():
            for p, part_N in zip(parameters, theta_N.split([p.numel() for p in parameters]), strict=True):
                p.copy_(part_N.view_as(p))

    def _by_name(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Views of the fragments' flat vectors, by parameter name."""
        named: dict[str, Tensor] = {}
        for parameters, flat_N in zip(self._parameters, flats, strict=True):
            parts = flat_N.split([p.numel() for p in parameters.values()])
            named |= {name: part.view(p.shape) for (name, p), part in zip(parameters.items(), parts, strict=True)}
        return named

    def _check_finite(self, delta_N: Tensor, sync: Sync) -> None:
        if torch.isfinite(delta_N).all():
            return
        sizes = [p.numel() for p in self._parameters[sync.fragment].values()]
        for name, part_N in zip(self._parameters[sync.fragment], delta_N.split(sizes), strict=True):
            if not torch.isfinite(part_N).all():
                raise NonFiniteError(
                    f"step {self.num_steps}: the outer gradient of {name} (replica {self.exchange.replica}, "
                    f"fragment {sync.fragment}) is not finite; nothing was sent: lower the learning rate"
                )

    def _facts(self, combine: str) -> dict[str, object]:
        """What all replicas must agree on, in the order in which a difference explains the most."""
        num_replicas, schedule = self.exchange.num_replicas, self.schedule
        facts: dict[str, object] = {
            "num_replicas": num_replicas,
            "sync_every": schedule.sync_every,
            "num_fragments": schedule.num_fragments,
            "overlap_steps": [schedule.overlap(replica) for replica in range(num_replicas)],
            "offsets": [schedule.offset(fragment) for fragment in range(schedule.num_fragments)],
            "first_sync": schedule.first_sync,
            "outer learning rate": float(self.outer.lr),
            "outer momentum": float(self.outer.momentum),
            "mixing": float(self.mixing),
            "wire": repr(self.wire),
            "combine": combine,
        }
        for index, parameters in enumerate(self._parameters):
            start = 0
            for name, parameter in parameters.items():
                facts[f"shape, fragment and place of parameter {name}"] = [list(parameter.shape), index, start]
                start += parameter.numel()
        return facts | {"initial parameters (SHA-256)": self.outer_hash()}


def check_settings(
    model: nn.Module,
    *,
    fragments: Sequence[Fragment],
    schedule: Schedule,
    mixing: float,
    combine: str,
    num_replicas: int,
) -> None:
    """Refuse, without any other replica, what `StreamingDiLoCo` would refuse; the model may be on `meta`.

    Raises:
        ValueError: if the settings contradict each other or the model; the message names both values.
    """
    check_partition(model, fragments)
    if schedule.num_fragments != len(fragments):
        raise ValueError(
            f"schedule.num_fragments={schedule.num_fragments}, but there are {len(fragments)} fragments: "
            "count all of them, the one outside the blocks included"
        )
    overlaps = schedule.overlap_steps
    if isinstance(overlaps, tuple) and len(overlaps) != num_replicas:
        raise ValueError(f"overlap_steps={overlaps} must hold one number for each of {num_replicas} replicas")
    if not 0 <= mixing <= 1:
        raise ValueError(f"mixing must lie between 0 and 1, not {mixing}")
    if combine != "gather":
        raise ValueError(f"combine must be 'gather', not {combine!r}")
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local"):
            raise ValueError(f"parameter {name} is sharded: a replica must hold its parameters whole")
        if not parameter.is_floating_point():
            raise ValueError(f"parameter {name} is {parameter.dtype}: only real floats can be exchanged")
