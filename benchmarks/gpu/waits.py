"""The host's waits for the GPU in a step, and the gaps in which the GPU has nothing to do."""

import re
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diloco.training.config.config import TrainConfig
from diloco.training.config.recipes import recipe
from diloco.training.config.resolve import resolve
from diloco.training.loop import begin_step, end_step
from diloco.training.records.metrics import MetricsLog
from diloco.training.state import initial_state
from diloco.training.world import alone
from gpu.place import Measurements, Place, Row, engine_of

_SYNC_EVERY = 6


def measurements(place: Place) -> Measurements:
    return {
        "engine.step()": partial(_engine, place),
        "engine.step(), offload": partial(_engine, place, offload=True),
        "a step of the trainer": partial(_trainer, place),
        "gaps": partial(_gaps, place, compiled=False),
        "gaps, compiled": partial(_gaps, place, compiled=True),
        "Data-Parallel of one process beside a plain loop": partial(_beside_a_plain_loop, place),
    }


@contextmanager
def _waits(place: Place) -> Iterator[Counter[str]]:
    """Counts what torch calls a synchronizing operation, by the line that asks for it; on a CPU none is."""
    waits: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if not place.dry:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            if not place.dry:
                torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchroniz" in str(warning.message):
            waits[re.sub(r".*/", "", f"{warning.filename}:{warning.lineno}")] += 1


def _engine(place: Place, **settings: Any) -> Row:
    """Over two periods; the first, in which kernels are compiled and memory is pinned, is not counted."""
    model = place.model("90M")
    engine = engine_of(model, sync_every=_SYNC_EVERY, **settings)
    kinds: dict[str, Counter[str]] = {}
    for step in range(1, 3 * _SYNC_EVERY + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e-3)
        due = engine.settings.schedule.due(step, 0)
        kind = " and ".join(name for name, some in (("send", due.send), ("merge", due.merge)) if some) or "neither"
        place.wait()
        with _waits(place) as waits:
            engine.step()
        if step > _SYNC_EVERY:
            kinds.setdefault(kind, Counter()).update(waits)
    return {"waits": {kind: dict(waits) for kind, waits in kinds.items()}, "ok": not any(kinds.values())}


def _config(place: Place, *, compiled: bool, **changes: Any) -> TrainConfig:
    asked = replace(recipe(place.size("35m", "tiny")), **changes)
    diloco = replace(asked.diloco, sync_every=_SYNC_EVERY)
    batch = place.size(16, 4)
    steps = 6 * _SYNC_EVERY
    return resolve(
        replace(
            asked,
            num_replicas=1,
            global_batch=batch,
            num_tokens=steps * batch * asked.sequence_length,
            diloco=diloco,
            compile=compiled and not place.dry,
        ),
        vocab_size=place.size(32_000, 257),
        prepared=Path(),
    )


def _steps(config: TrainConfig, place: Place) -> Iterator[Callable[[], None]]:
    """Steps of the trainer's loop, metrics included: each is begun before the one before it ends."""
    world = alone(config.precision, place.device)
    state = initial_state(config, world)
    log = MetricsLog(place.folder, 0, after_step=0)
    batch = _batch(config)
    begun = [begin_step(state, batch, world, rate=config.optimizer.learning_rate)]

    def step() -> None:
        begun.append(begin_step(state, batch, world, rate=config.optimizer.learning_rate))
        log.write(end_step(begun.pop(0), state, world, since=0.0))

    while not state.is_over:
        yield step
    log.close()


def _batch(config: TrainConfig) -> np.ndarray:
    """Random windows of a step of one process, int64 (B, T+1)."""
    shape = config.process_batch, config.sequence_length + 1
    return np.random.default_rng(0).integers(0, config.model.vocab_size, shape)


def _trainer(place: Place) -> Row:
    """Waits in a step of the loop, which waits for events alone: torch does not report these."""
    totals: list[Counter[str]] = []
    for index, step in enumerate(_steps(_config(place, compiled=False), place)):
        with _waits(place) as waits:
            step()
        if index >= 2 * _SYNC_EVERY:
            totals.append(waits)
    together = sum(totals, Counter())
    return {"steps": len(totals), "waits_by_line": dict(together), "ok": not together}


def _gaps(place: Place, *, compiled: bool) -> Row:
    """Idle time of the GPU between kernels, over two periods, by a profile, and what takes most of its time.

    Dry, over one: to read a profile of a CPU takes long.
    """
    num_steps = place.size(2, 1) * _SYNC_EVERY
    activity = torch.profiler.ProfilerActivity.CPU if place.dry else torch.profiler.ProfilerActivity.CUDA
    steps = _steps(_config(place, compiled=compiled), place)
    for _ in range(2 * _SYNC_EVERY):
        next(steps)()
    place.wait()
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(num_steps):
            next(steps)()
        place.wait()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events() or ()
        if place.dry or event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, end, before, gaps = 0.0, spans[0][0], "", [(0.0, "", "")]
    for start, stop, name in spans:
        if start > end:
            gaps.append((start - end, before, name))
        busy += max(0.0, stop - max(start, end))
        end, before = max(end, stop), name
    whole, longest = end - spans[0][0], max(gaps)
    by_kernel: Counter[str] = Counter()
    for start, stop, name in spans:
        by_kernel[name[:120]] += (stop - start) / 1e3 / num_steps
    return {
        "step_ms": round(whole / 1e3 / num_steps, 3),
        "idle_share": round(1 - busy / whole, 4),
        "longest_gap_ms": round(longest[0] / 1e3, 3),
        "between": [name[:80] for name in longest[1:]],
        "kernels_ms": {name: round(ms, 3) for name, ms in by_kernel.most_common(12)},
    }


def _beside_a_plain_loop(place: Place) -> Row:
    """Milliseconds a step of the trainer's loop and of one as in a tutorial, in turns; the goal is 3 % at most."""
    config = _config(place, compiled=True, method="data_parallel")
    steps = _steps(config, place)
    loops = {"trainer_ms": lambda: next(steps)(), "plain_ms": _plain_step(config, place)}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(4):
        for name, step in loops.items():
            step()  # the first compiles
            place.wait()
            start = time.perf_counter()
            for _ in range(_SYNC_EVERY):
                step()
            place.wait()
            times[name].append(1e3 * (time.perf_counter() - start) / _SYNC_EVERY)
    ours, plain = (statistics.median(each[1:]) for each in times.values())
    return {"trainer_ms": round(ours, 3), "plain_ms": round(plain, 3), "ok": place.goal(ours <= 1.03 * plain)}


def _plain_step(config: TrainConfig, place: Place) -> Callable[[], None]:
    """A step of the same model and batch: compiled, in autocast, with clipping and torch's fused AdamW."""
    model = config.model.initial(seed=0).to(place.device)
    forward = torch.compile(model) if config.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    window_BxT1 = torch.from_numpy(_batch(config)).to(place.device)

    def step() -> None:
        with torch.autocast(place.device.type, torch.bfloat16):
            logits = forward(window_BxT1[:, :-1])
        model.loss(logits, window_BxT1[:, 1:], config.optimizer.z_loss)[1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step
