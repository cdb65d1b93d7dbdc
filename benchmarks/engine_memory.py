"""The memory of the engine beside a plain training loop: peaks of a replica's process, on CPUs.

    python benchmarks/engine_memory.py

Two replicas train on this machine: without the engine, and with the engine attached to the optimizer, so that it
runs while the gradients are in memory. Prints the difference of the peaks in FP32 copies of the parameters.
"""

import argparse
import os
import socket
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist

import diloco
from diloco.models.decoder_config import DecoderConfig

NUM_REPLICAS = 2
NUM_STEPS, SYNC_EVERY, OVERLAP_STEPS = 24, 8, 2  # four fragments: τ = H/P


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--wire", default="e3m0")
    parser.add_argument("--combine", default="gather")
    arguments = parser.parse_args()
    peaks = {name: _mean_peak(arguments, with_engine=name == "engine") for name in ("plain", "engine")}
    model = _size(arguments).build(seed=0)
    copy = 4 * sum(parameter.numel() for parameter in model.parameters())
    fragments = diloco.strided(model, layers_per_fragment=2)
    parameters = dict(model.named_parameters())
    largest = 4 * max(sum(parameters[name].numel() for name in fragment.parameters) for fragment in fragments)
    extra = peaks["engine"] - peaks["plain"]
    mb = {name: f"{size / 1e6:.0f} MB" for name, size in {**peaks, "extra": extra, "copy": copy}.items()}
    schedule = f"H = {SYNC_EVERY}, P = {len(fragments)}, τ = {OVERLAP_STEPS}"
    print(f"{copy // 4:,} parameters, {mb['copy']} in FP32; {arguments.wire}, {arguments.combine}; {schedule}")
    print(f"peak of a replica: plain {mb['plain']}, with the engine {mb['engine']}, {mb['extra']} more")
    print(f"which is 2 copies and {(extra - 2 * copy) / largest:.2f} of the largest fragment")


def _mean_peak(arguments: argparse.Namespace, *, with_engine: bool) -> int:
    """The mean peak of two replicas, in bytes: of processes that this one forks before it has built a model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    with get_context("fork").Pool(NUM_REPLICAS) as pool:
        peaks = pool.starmap(peak_bytes, [(arguments, rank, with_engine) for rank in range(NUM_REPLICAS)], 1)
    return sum(peaks) // NUM_REPLICAS


def peak_bytes(arguments: argparse.Namespace, rank: int, with_engine: bool) -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_REPLICAS)
    model = _size(arguments).build(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = None
    if with_engine:
        fragments = diloco.strided(model, layers_per_fragment=2)
        schedule = diloco.Schedule(
            sync_every=SYNC_EVERY, num_fragments=len(fragments), overlap_steps=OVERLAP_STEPS, first_sync="early"
        )
        engine = diloco.StreamingDiLoCo(
            model,
            fragments=fragments,
            schedule=schedule,
            wire=arguments.wire,
            combine=arguments.combine,
            exchange=diloco.ProcessGroupExchange(),
        )
        engine.attach(optimizer)
    window = torch.randint(0, 2048, (1, 9), generator=torch.Generator().manual_seed(rank))
    for _ in range(NUM_STEPS):
        model.loss(model(window[:, :-1]), window[:, 1:])[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    if engine is not None:
        engine.finish()
    dist.barrier()
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    dist.destroy_process_group()
    return 1024 * int(peak.split()[1])


def _size(arguments: argparse.Namespace) -> DecoderConfig:
    return DecoderConfig(num_layers=6, num_heads=8, width=arguments.width, vocab_size=2048)


if __name__ == "__main__":
    main()
