"""Fleets of consumer machines that fail once a day: methods, ways to combine, and cost, by number of machines.

    python benchmarks/fleets.py --output DIR

A model of 10⁹ parameters in E3M0, 8 fragments, H = 400, τ = 60; steps of 2 s of 4,096 tokens; links of 20 Mbit/s
up and 100 down, 40 ms one way; a failure per day and machine, repaired in 10 minutes. Everything is simulated, by
the functions of `diloco simulate fleet`. DIR/fleets.csv has a row per method and number of replicas; dollars are
those of requests and traffic in R2, without machines.
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diloco.rendezvous.prices import R2
from diloco.simulator.churn import in_store
from diloco.simulator.fixed_members import WITH_MEMBERS, with_members
from diloco.simulator.fleet import FleetRun, Machines, Outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 8, 16, 32, 64, 256, 1000])
    parser.add_argument("--outer-steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows = list(_rows(arguments))
    with (arguments.output / "fleets.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(
            f"{row['replicas']:>6,} {row['method']:<22} {row['goodput']:7.1%} counted {row['contributors']:7.1f} "
            f"late {row['staleness']:5.2f} decided {row['decided_p50']:8.1f} s ${row['dollars_an_hour']:,.2f}/h"
        )


def _rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for num_replicas in arguments.replicas:
        for seed in arguments.seeds:
            gather, shares = _run(num_replicas, 1), _run(num_replicas, min(num_replicas, 1024))
            outcomes = {
                "store gather": in_store(gather, num_outer_steps=arguments.outer_steps, seed=seed),
                "store shares": in_store(shares, num_outer_steps=arguments.outer_steps, seed=seed),
            }
            seconds = outcomes["store shares"].seconds
            # A fixed group shares, too.
            outcomes |= {
                method: with_members(shares, method, seconds=seconds, seed=seed) for method in WITH_MEMBERS
            }
            yield from (_row(name, num_replicas, seed, outcome) for name, outcome in outcomes.items())


def _run(num_replicas: int, shares: int) -> FleetRun:
    home = Machines(
        name="home",
        count=num_replicas,
        step_seconds=2.0,
        up_mbit_s=20,
        down_mbit_s=100,
        latency_seconds=0.04,
        hours_between_failures=24,
        repair_seconds=600,
    )
    return FleetRun(
        machines=(home,),
        num_params=1e9,
        step_tokens=4096,
        sync_every=400,
        num_fragments=8,
        overlap_steps=60,
        shares=shares,
    )


def _row(method: str, num_replicas: int, seed: int, outcome: Outcome) -> dict[str, Any]:
    return {
        "replicas": num_replicas,
        "method": method,
        "seed": seed,
        "hours": outcome.seconds / 3600,
        "goodput": outcome.goodput,
        "tokens_per_hour": outcome.tokens_per_hour,
        "contributors": outcome.contributors,
        "staleness": outcome.staleness,
        "decided_p50": outcome.decided_seconds[0],
        "decided_p99": outcome.decided_seconds[1],
        "dollars_an_hour": outcome.dollars(R2) * 3600 / outcome.seconds,
    }


if __name__ == "__main__":
    main()
