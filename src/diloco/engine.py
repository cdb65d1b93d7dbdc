"""StreamingDiLoCo: Algorithm 1 of arXiv 2501.18512 around a torch model and an inner optimizer.

Shapes: N elements of one fragment.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor, nn

from diloco.exchange import Exchange, ExchangeError, Pending, agree
from diloco.fragments import Fragment, check_partition
from diloco.outer import Nesterov, average, merge
from diloco.schedule import Schedule, Sync
from diloco.wire import Codec, codec


class NonFiniteError(ValueError):
    """An outer gradient holds NaN or an infinity; nothing of it was sent."""


@dataclass(frozen=True)
class OuterStep:
    """One outer step of one fragment, as this replica took it."""

    sync: Sync
    """Fragment, round, and the step after which it was sent."""
    blocked_seconds: float
    """How long this replica waited for the others' payloads."""
    average_N: Tensor
    """Δ_p, the average of the decoded outer gradients; flat FP32."""
    deltas: tuple[Tensor, ...]
    """The decoded outer gradient of each replica, in replica order; flat FP32 of N elements."""
    spans: Mapping[str, tuple[int, int]]
    """Where each block of the fragment lies in these vectors: its first element, and the one after its last."""

    def norm(self) -> float:
        """‖Δ_p‖₂."""
        return self.average_N.norm().item()

    def mean_cosine(self, block: str | None = None) -> float | None:
        """Mean cosine over pairs of replicas, of the whole fragment or of one block; None for M = 1."""
        start, end = self.spans[block] if block is not None else (0, None)
        parts = [delta_N[start:end] for delta_N in self.deltas]
        cosines = [torch.cosine_similarity(a_N, b_N, dim=0).item() for a_N, b_N in combinations(parts, 2)]
        return sum(cosines) / len(cosines) if cosines else None


@dataclass
class _InFlight:
    sync: Sync
    payload: Tensor
    pending: Pending
    arrived: bool = False


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
        self._spans = [_spans(fragment, named) for fragment in self.fragments]
        self._outer = [self._flat(fragment) for fragment in range(len(self.fragments))]
        self._velocity = [torch.zeros_like(outer_N) for outer_N in self._outer]
        self._in_flight: list[_InFlight] = []
        self._finished = False
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
            NonFiniteError: if an outer gradient is not finite, before anything of it is sent.
            ExchangeError: if payloads don't arrive in time; parameters and outer parameters are as they were.
        """
        if self._finished:
            raise RuntimeError("finish() has ended this run: build a new engine to train on")
        self.num_steps += 1
        due = self.schedule.due(self.num_steps, self.exchange.replica)
        for sync in due.send:
            self._send(sync)
        merged = tuple(self._merge(sync) for sync in due.merge)
        self._forget_before(self.num_steps - self.schedule.max_overlap)
        return merged

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.utils.hooks.RemovableHandle:
        """Call `step()` after every `optimizer.step()` from now on; `remove()` the handle to end that."""
        return optimizer.register_step_post_hook(lambda *_: (self.step(), None)[1])

    def finish(self) -> tuple[OuterStep, ...]:
        """Receive what is in flight and merge it, in order; call it on every replica after its last step."""
        overlap = self.schedule.overlap(self.exchange.replica)
        syncs = [flight.sync for flight in self._in_flight if flight.sync.step + overlap > self.num_steps]
        merged = tuple(self._merge(sync) for sync in syncs)
        self._forget_before(self.num_steps)
        self._finished = True
        return merged

    def outer_parameters(self) -> dict[str, Tensor]:
        """Θ by parameter name, FP32, shaped as in the model: what to evaluate, e.g. with `functional_call`."""
        return self._by_name(self._outer)

    def outer_hash(self) -> str:
        """SHA-256 over Θ in the order of the parameters' names: equal on all replicas after `finish()`."""
        return parameters_hash(self.outer_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Everything of this replica that resumes, payloads in flight included; model and optimizer apart."""
        return {
            "num_steps": self.num_steps,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "blocked_seconds": self.blocked_seconds,
            "outer": self._by_name(self._outer),
            "velocity": self._by_name(self._velocity),
            "in_flight": [{"sync": tuple(f.sync), "payload": f.payload} for f in self._in_flight],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state, and send again what was in flight; every replica must load the same step.

        Raises:
            DisagreementError: if the replicas load different steps.
        """
        agree(self.exchange, {"step of the loaded state": state["num_steps"]}, round=2)
        self.num_steps = state["num_steps"]
        self.bytes_sent, self.bytes_received = state["bytes_sent"], state["bytes_received"]
        self.blocked_seconds = state["blocked_seconds"]
        for fragment in range(len(self.fragments)):
            for flats, values in ((self._outer, state["outer"]), (self._velocity, state["velocity"])):
                parts = [values[name].reshape(-1) for name in self._parameters[fragment]]
                flats[fragment] = torch.cat(parts).to(flats[fragment])
        self._in_flight = []
        for flight in state["in_flight"]:
            self._start(Sync(*flight["sync"]), flight["payload"])

    def _send(self, sync: Sync) -> None:
        delta_N = self._outer[sync.fragment] - self._flat(sync.fragment)
        self._check_finite(delta_N, sync)
        payload = self.wire.encode(delta_N)
        self._start(sync, payload)
        self.bytes_sent += payload.numel() * (self.exchange.num_replicas - 1)

    def _start(self, sync: Sync, payload: Tensor) -> None:
        others = (m for m in range(self.exchange.num_replicas) if m != self.exchange.replica)
        pending = self.exchange.start(dict.fromkeys(others, payload), sync.fragment, sync.round)
        self._in_flight.append(_InFlight(sync, payload, pending))

    def _merge(self, sync: Sync) -> OuterStep:
        p = sync.fragment
        flight = next(flight for flight in self._in_flight if flight.sync == sync)
        payloads, blocked_seconds = self._receive(flight)
        num_elements, device = self._outer[p].numel(), self._outer[p].device
        deltas = tuple(
            self.wire.decode(payloads[replica].to(device), num_elements) for replica in sorted(payloads)
        )
        delta_N = average(deltas)
        self._outer[p], self._velocity[p] = self.outer.step(self._outer[p], self._velocity[p], delta_N)
        self._write(p, merge(self._flat(p), self._outer[p], self.mixing))
        return OuterStep(sync, blocked_seconds, delta_N, deltas, self._spans[p])

    def _receive(self, flight: _InFlight) -> tuple[dict[int, Tensor], float]:
        """Every replica's payload, this one's included, and the seconds that training waited for them."""
        start = time.perf_counter()
        try:
            payloads = dict(flight.pending.wait())
        except ExchangeError as error:
            raise ExchangeError(f"step {self.num_steps}: {error}", missing=error.missing) from error
        blocked_seconds = time.perf_counter() - start
        flight.arrived = True
        self.blocked_seconds += blocked_seconds
        self.bytes_received += sum(payload.numel() for payload in payloads.values())
        payloads[self.exchange.replica] = flight.payload
        return payloads, blocked_seconds

    def _forget_before(self, step: int) -> None:
        """Drop the payloads that no replica needs any more, not even after a resume."""
        for flight in self._in_flight:
            if flight.sync.step <= step and not flight.arrived:
                flight.pending.wait()  # sent again after a resume for a slower replica, merged here long ago
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
        """What all replicas must agree on."""
        facts: dict[str, object] = {
            "num_replicas": self.exchange.num_replicas,
            "initial parameters (SHA-256)": self.outer_hash(),
            "sync_every": self.schedule.sync_every,
            "num_fragments": self.schedule.num_fragments,
            "overlap_steps": self.schedule.overlap_steps,
            "offsets": self.schedule.offsets,
            "first_sync": self.schedule.first_sync,
            "outer": repr(self.outer),
            "mixing": self.mixing,
            "wire": repr(self.wire),
            "combine": combine,
        }
        for index, parameters in enumerate(self._parameters):
            for name, parameter in parameters.items():
                facts[f"shape and fragment of parameter {name}"] = [list(parameter.shape), index]
        return facts


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


def parameters_hash(parameters: Mapping[str, Tensor]) -> str:
    """SHA-256 of the parameters' FP32 bits, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(parameters):
        digest.update(parameters[name].detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _spans(fragment: Fragment, named: Mapping[str, nn.Parameter]) -> dict[str, tuple[int, int]]:
    """Where each block lies in the fragment's flat vector; a block's parameters follow one another."""
    spans: dict[str, tuple[int, int]] = {}
    start = 0
    for name in fragment.parameters:
        end = start + named[name].numel()
        for block in fragment.blocks:
            if name.startswith(block + "."):
                spans[block] = (spans.get(block, (start, end))[0], end)
        start = end
    return spans
