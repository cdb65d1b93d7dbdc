"""Compute utilization of gather and reduce_scatter from 2 to 64 replicas, by the physical model.

    python benchmarks/weak_scaling.py [--link-gbit-s 1.0] [--overlap-steps 5] …

Each replica brings a machine and a link of its own, and a step takes as long for any number of replicas. `speed`
is the run's tokens per second over those of one replica without exchange: M · compute utilization.
"""

import argparse

import numpy as np

from diloco.simulator.description import GBIT_S, MethodSettings, ModelSize, Replica
from diloco.simulator.physical import PhysicalModel

NUM_REPLICAS = (2, 4, 8, 16, 32, 64)
WAYS = ("gather", "reduce_scatter", "reduce_scatter:bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-params", type=float, default=7e9)
    parser.add_argument("--num-layers", type=int, default=32)
    parser.add_argument("--step-seconds", type=float, default=2.3)
    parser.add_argument("--link-gbit-s", type=float, default=1.0)
    parser.add_argument("--latency-seconds", type=float, default=0.05)
    parser.add_argument("--sync-every", type=int, default=100)
    parser.add_argument("--overlap-steps", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{'M':>3}  " + "  ".join(f"{way:^36}" for way in WAYS))
    print(f"{'':>3}  " + "  ".join(f"{'utilization':>11} {'speed':>6} {'Gbit/s for 95 %':>17}" for _ in WAYS))
    for num_replicas in NUM_REPLICAS:
        cells = []
        for way in WAYS:
            model = physical_model(arguments, num_replicas, way)
            utilization = model.compute_utilization([arguments.link_gbit_s])[0]
            enough = GBIT_S[model.compute_utilization(GBIT_S) >= 0.95]
            needed = f"{enough[0]:.2f}" if np.any(enough) else "1000+"
            cells.append(f"{utilization:11.1%} {num_replicas * utilization:6.1f} {needed:>17}")
        print(f"{num_replicas:3d}  " + "  ".join(cells), flush=True)


def physical_model(arguments: argparse.Namespace, num_replicas: int, combine: str) -> PhysicalModel:
    settings = MethodSettings(
        method="streaming_overlapped_fp4",
        sync_every=arguments.sync_every,
        overlap_steps=arguments.overlap_steps,
    )
    replica = Replica(step_seconds=arguments.step_seconds, latency_seconds=arguments.latency_seconds)
    size = ModelSize(num_params=arguments.num_params, num_layers=arguments.num_layers)
    return PhysicalModel(settings=settings, size=size, replicas=[replica] * num_replicas, combine=combine)


if __name__ == "__main__":
    main()
