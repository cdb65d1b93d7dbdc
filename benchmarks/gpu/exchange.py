"""Two replicas as two processes: payloads over gloo from pinned memory and from pageable, and over nccl."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

import diloco
from diloco.exchange.transport import Channel, Tag
from gpu.place import Measurements, Place, Row, engine_of

_SECONDS = 120.0


def measurements(place: Place) -> Measurements:
    anywhere = {
        "gloo, pageable": partial(_run, place, _bandwidth, "gloo", False),
        "engine over gloo": partial(_run, place, _engine, "gloo", False),
    }
    with_gpu = {"gloo, pinned": partial(_run, place, _bandwidth, "gloo", True)}
    with_gpus = {  # nccl refuses two processes on one
        "nccl": partial(_run, place, _bandwidth, "nccl", False),
        "engine over nccl": partial(_run, place, _engine, "nccl", False),
    }
    return anywhere | (with_gpu if not place.dry else {}) | (with_gpus if torch.cuda.device_count() > 1 else {})


Work = Callable[[Place, diloco.ProcessGroupExchange, bool], Row]


def _run(place: Place, work: Work, backend: str, is_pinned: bool) -> Row:
    """The row of replica 0; on one GPU both use it."""
    store = place.folder / f"store-{time.time_ns()}"
    context: Any = multiprocessing.get_context(place.size("spawn", "fork"))  # CUDA does not survive a fork
    answers = context.SimpleQueue()
    arguments = [(replica, str(store), backend, place, work, is_pinned, answers) for replica in (0, 1)]
    processes = [context.Process(target=_replica, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(1.0, min(_SECONDS, place.deadline - time.monotonic())))
        if process.exitcode is None:
            process.kill()
            return {"error": "it did not end"}
    rows = [answers.get() for _ in processes if not answers.empty()]
    return next((row for row in rows if "error" in row), rows[0] if rows else {"error": "both processes died"})


def _replica(
    replica: int, store: str, backend: str, place: Place, work: Work, is_pinned: bool, answers: Any
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if not place.dry:
            torch.cuda.set_device(replica % torch.cuda.device_count())
        timeout = timedelta(seconds=_SECONDS / 2)
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=replica, world_size=2, timeout=timeout
        )
        exchange = diloco.ProcessGroupExchange(timeout_seconds=60)
        row = work(place, exchange, is_pinned)
        dist.barrier()
        if replica == 0:
            answers.put(row)
    except Exception as error:
        answers.put({"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"})


def _bandwidth(place: Place, exchange: diloco.ProcessGroupExchange, is_pinned: bool) -> Row:
    """Payload bytes per second in each direction, of 64 MiB from where the transport sends."""
    num, rounds = place.size(1 << 26, 1 << 16), count(1)
    payload = torch.zeros(num, dtype=torch.uint8, device=exchange.device, pin_memory=is_pinned)
    seconds = []
    for _ in range(6):
        dist.barrier()
        start = time.perf_counter()
        exchange.start({1 - exchange.replica: payload}, Tag(Channel.PROBE, round=next(rounds))).wait()
        place.wait()
        seconds.append(time.perf_counter() - start)
    return {"gbyte_s": round(1e-9 * num / min(seconds), 3), "is_pinned": payload.is_pinned()}


def _engine(place: Place, exchange: diloco.ProcessGroupExchange, is_pinned: bool) -> Row:
    """Twenty steps of two replicas: the hash of Θ, which all ways must share."""
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
    model.to(place.device)
    engine = engine_of(model, sync_every=4, layers_per_fragment=2, exchange=exchange)
    for step in range(1, 21):
        generator = torch.Generator().manual_seed(2 * step + exchange.replica)
        with torch.no_grad():
            for parameter in model.parameters():
                move = torch.randn(parameter.shape, generator=generator) * 2.0**-6
                parameter.add_(move.to(parameter))
        engine.step()
    engine.finish()
    return {"outer_hash": engine.outer_hash(), "blocked_seconds": round(engine.blocked_seconds, 4)}
