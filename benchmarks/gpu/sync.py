"""`engine.step()` beside a training step: without a sync, with one, on a stream of its own and on training's."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from diloco.engine.fixed import run_now
from diloco.engine.replica import DeviceLane
from gpu.place import Measurements, Place, Row, engine_of

_WITHOUT_SYNC, _STALL = 0.002, 0.01  # goals, as shares of a step


def measurements(place: Place) -> Measurements:
    return {
        "without a sync": partial(_without_sync, place),
        "beside training": partial(_with_syncs, place),
        "beside training, bf16": partial(_with_syncs, place, dtype=torch.bfloat16),
        "beside training, offload": partial(_with_syncs, place, offload=True),
        "in training's stream": partial(_with_syncs, place, apart=False),
    }


def _training(place: Place, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, Callable[[], None]]:
    """A model of 150M parameters or so, and a step of it."""
    model = place.model("180M").to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    length = place.size(2048, 16)
    window = place.window(place.size(8, 2), length, model.embedding.num_embeddings)

    def step() -> None:
        with torch.autocast(place.device.type, torch.bfloat16, enabled=dtype == torch.float32):
            logits = model(window[:, :-1])
        model.loss(logits, window[:, 1:], 1e-4)[1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def _without_sync(place: Place) -> Row:
    """The host's time in `step()`, beside the device's in a step of training."""
    model, train = _training(place)
    step_ms = place.milliseconds(train)
    engine = engine_of(model, sync_every=10**6)
    engine.step()
    seconds = []
    for _ in range(place.size(1000, 10)):
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    share = 1e3 * statistics.median(seconds) / step_ms
    num_params = sum(parameter.numel() for parameter in model.parameters())
    row = {"parameters": num_params, "step_ms": round(step_ms, 3), "share": round(share, 6)}
    return row | {"ok": place.goal(share < _WITHOUT_SYNC)}


def _with_syncs(place: Place, *, dtype: torch.dtype = torch.float32, apart: bool = True, **settings: Any) -> Row:
    """The time that sends and merges add to the steps of a period, by the device's clock and the host's.

    `stream_ms` is the time from before `step()` to after it on the stream of training, with all that it waits for
    there; `host_ms` is that of the host, which may wait for the payload.
    """
    model, train = _training(place, dtype)
    sync_every = place.size(30, 6)
    plain_ms = _mean_ms(place, train, 2 * sync_every)
    engine = engine_of(model, sync_every=sync_every, **settings)
    if not apart:
        engine._replica.lane, engine._membership.start_send = DeviceLane(), run_now  # pyrefly: ignore[missing-attribute]
    clocks: dict[str, list[_Clock]] = {"send": [], "merge": [], "neither": []}

    def step() -> None:
        train()
        due = engine.settings.schedule.due(engine.num_steps + 1, 0)
        with _Clock(place) as clock:
            engine.step()
        clocks["send" if due.send else "merge" if due.merge else "neither"].append(clock)

    with_ms = _mean_ms(place, step, 2 * sync_every)
    added = (with_ms - plain_ms) / plain_ms
    row: Row = {"step_ms": round(plain_ms, 3), "with_engine_ms": round(with_ms, 3), "added_share": round(added, 5)}
    for kind, some in clocks.items():
        late = some[len(some) // 2 :]
        row[f"{kind}_host_ms"] = round(statistics.median(clock.host_ms for clock in late), 4)
        row[f"{kind}_stream_ms"] = round(statistics.median(clock.stream_ms for clock in late), 4)
    return row | {"ok": place.goal(added < _STALL) if apart else None}


class _Clock:
    """The time of work on the host and, read when the device has done it, on the stream of training."""

    def __init__(self, place: Place) -> None:
        self._events = [] if place.dry else [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.host_ms = 0.0

    def __enter__(self) -> "_Clock":
        self._start = time.perf_counter()
        if self._events:
            self._events[0].record()
        return self

    def __exit__(self, *error: object) -> None:
        if self._events:
            self._events[1].record()
        self.host_ms = 1e3 * (time.perf_counter() - self._start)

    @property
    def stream_ms(self) -> float:
        return self._events[0].elapsed_time(self._events[1]) if self._events else self.host_ms


def _mean_ms(place: Place, work: Callable[[], None], num: int) -> float:
    """The mean time of the last half of so many pieces of work, one after the other."""
    for _ in range(num // 2):
        work()
    place.wait()
    start = time.perf_counter()
    for _ in range(num - num // 2):
        work()
    place.wait()
    return 1e3 * (time.perf_counter() - start) / (num - num // 2)
