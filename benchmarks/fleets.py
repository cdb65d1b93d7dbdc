"""Fleets of machines that fail, simulated: methods and cost by number of machines, and beside what others report.

    python benchmarks/fleets.py --output DIR

DIR/fleets.csv has a row per simulated fleet, in tables:

- `consumer`: a model of 10⁹ parameters in E3M0, 8 fragments, H = 400, τ = 60; steps of 2 s of 4,096 tokens; links
  of 20 Mbit/s up and 100 down, 40 ms one way; a failure per day and machine, repaired in 10 minutes. Shares are at
  most 128, and for `store shares of all` as many as there are machines. Regions exchange every round.
- `churn`: 64 of these machines that fail every 4 hours; with notice, stragglers, and slower ones among them.
- `closed form`: rows of the first two, by `simulator.churn.expected`; `reference` is the simulated number.
- `storm`: the storms of fault_storm.csv, fault_storm_equal_tokens.csv and fleet_storm.csv; `reference` is what was
  measured. Goodput is tokens counted over what the machines could have read; the mean of 4 or 12 runs per
  seed, which differ by 3 points.
- `rounds`: elastic_rounds.csv; `reference_p50` is what was measured.
- `decoupled`: goodput of Decoupled DiLoCo (arXiv 2604.21428, as others report it: its text was not at hand) by
  chips and learners M. Theirs: a chip fails once a year, H = 24, P = 24, τ = 2, quorum 1. Assumed: steps of 1 s,
  links without limit, and that a learner stops as a whole for 19 s at each failure, which is fitted to the 58 %
  of elastic Data-Parallel at 1.2 million chips, and loses nothing; Data-Parallel has 10 s between checkpoints.

Dollars are those of requests and traffic, without machines.
"""

import argparse
import csv
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleet_storm import simulate
from storm_study.described import described, suffered
from storm_study.faults import schedule

from diloco.rendezvous.prices import R2, S3
from diloco.simulator.churn import expected, in_regions, in_store
from diloco.simulator.description import Stragglers
from diloco.simulator.fixed_members import WITH_MEMBERS, with_members
from diloco.simulator.fleet import FleetRun, Machines, Outcome

Row = dict[str, Any]
RESULTS = Path(__file__).parents[1] / "docs" / "results"
MOST_SHARES = 128
NUM_REGIONS = {16: 4, 32: 4, 64: 8, 128: 8, 256: 16, 512: 32, 1000: 32, 10_000: 250}
RESTART_SECONDS = 2.0
"""Time in which a killed trainer of the fault storm takes steps again, if the store is there: assumed."""
HOME = Machines(
    name="home",
    count=64,
    step_seconds=2.0,
    up_mbit_s=20,
    down_mbit_s=100,
    latency_seconds=0.04,
    hours_between_failures=24,
    repair_seconds=600,
)
DECOUPLED = {
    (1.2e6, 1, "data_parallel"): 0.27,
    (1.2e6, 1, "store"): 0.58,
    (1.2e6, 2, "store"): 0.70,
    (1.2e6, 8, "store"): 0.88,
    (1.2e6, 16, "store"): 0.93,
    (2.4e6, 1, "data_parallel"): 0.18,
    (2.4e6, 1, "store"): 0.40,
    (2.4e6, 8, "store"): 0.80,
    (2.4e6, 16, "store"): 0.86,
}
"""Goodput by chips, learners and method; with one learner `store` stands beside their elastic Data-Parallel."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128, 256, 512, 1000, 10_000])
    parser.add_argument("--outer-steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows = [
        *(
            row
            for each in arguments.replicas
            for seed in arguments.seeds
            for row in _consumer(arguments, each, seed)
        ),
        *(row for seed in arguments.seeds for row in _churn(arguments.outer_steps, seed)),
        *storms(num_seeds=4 * len(arguments.seeds)),
        *rounds(),
        *_decoupled(20 * arguments.outer_steps),
    ]
    with (arguments.output / "fleets.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(
            f"{row['table']:<11} {row['setting']:<24} {row['replicas']:>6,} {row['method']:<22} "
            f"{row['goodput']:7.1%} ({row['reference']:7.1%}) counted {row['contributors']:7.1f} "
            f"late {row['staleness']:5.2f} decided {row['decided_p50']:8.2f} s ({row['reference_p50']:5.2f} s) "
            f"${row['dollars_an_hour']:,.2f}/h"
        )


def _row(
    table: str,
    method: str,
    num_replicas: int,
    outcome: Outcome,
    *,
    setting: str = "",
    seed: int = 0,
    reference: float = math.nan,
    reference_p50: float = math.nan,
) -> Row:
    return {
        "table": table,
        "setting": setting,
        "replicas": num_replicas,
        "method": method,
        "seed": seed,
        "hours": outcome.seconds / 3600,
        "goodput": outcome.goodput,
        "reference": reference,
        "tokens_per_hour": outcome.tokens_per_hour,
        "contributors": outcome.contributors,
        "staleness": outcome.staleness,
        "decided_p50": outcome.decided_seconds[0],
        "decided_p99": outcome.decided_seconds[1],
        "reference_p50": reference_p50,
        "lost": outcome.lost,
        "dollars_an_hour": outcome.dollars(R2) * 3600 / outcome.seconds,
        "s3_dollars_an_hour": outcome.dollars(S3) * 3600 / outcome.seconds,
    }


def consumer_run(num_replicas: int, shares: int) -> FleetRun:
    """The fleet of consumer machines."""
    return FleetRun(
        machines=(replace(HOME, count=num_replicas),),
        num_params=1e9,
        step_tokens=4096,
        sync_every=400,
        num_fragments=8,
        overlap_steps=60,
        shares=shares,
    )


def _consumer(arguments: argparse.Namespace, num_replicas: int, seed: int) -> Iterator[Row]:
    steps, shares = arguments.outer_steps, consumer_run(num_replicas, min(num_replicas, MOST_SHARES))
    of_all = replace(shares, shares=min(num_replicas, 1024))
    outcomes = {
        "store gather": in_store(replace(shares, shares=1), num_outer_steps=steps, seed=seed),
        "store shares": in_store(shares, num_outer_steps=steps, seed=seed),
    }
    seconds = outcomes["store shares"].seconds
    if num_replicas > MOST_SHARES:
        outcomes["store shares of all"] = in_store(of_all, num_outer_steps=steps, seed=seed)
    if num_replicas in NUM_REGIONS:
        for name, run in {"regions": shares, "regions gather": replace(shares, shares=1)}.items():
            outcomes[name] = in_regions(
                run, num_regions=NUM_REGIONS[num_replicas], num_outer_steps=steps, seed=seed
            )
    # A fixed group shares, too.
    outcomes |= {method: with_members(of_all, method, seconds=seconds, seed=seed) for method in WITH_MEMBERS}
    yield from (_row("consumer", name, num_replicas, each, seed=seed) for name, each in outcomes.items())
    for name, shared in {"store gather": 1, "store shares": shares.shares}.items():
        yield _closed_form(name, "consumer", replace(shares, shares=shared), outcomes[name], seed)


def _closed_form(method: str, setting: str, run: FleetRun, outcome: Outcome, seed: int) -> Row:
    goodput, contributors = expected(run)
    closed = replace(
        outcome,
        goodput=goodput,
        contributors=contributors,
        staleness=math.nan,
        decided_seconds=(math.nan, math.nan),
        lost=math.nan,
    )
    names = {"setting": setting, "seed": seed, "reference": outcome.goodput}
    return _row("closed form", method, run.num_replicas, closed, **names)


def _churn(num_outer_steps: int, seed: int) -> Iterator[Row]:
    run = consumer_run(64, 64)
    spot = replace(HOME, hours_between_failures=4)
    fleets = {
        "a failure in 4 hours": (spot,),
        "with 5 minutes' notice": (replace(spot, notice_seconds=300),),
        "steps vary by 100 %": (replace(spot, stragglers=Stragglers(step_variation=1.0)),),
        "stalls of 2 min, 10 %": (
            replace(spot, stragglers=Stragglers(stall_probability=1 / 600, stall_seconds=120)),
        ),
        "half at half speed": (replace(spot, count=32), replace(spot, name="slow", count=32, step_seconds=4.0)),
        "half with 5 Mbit/s up": (replace(spot, count=32), replace(spot, name="far", count=32, up_mbit_s=5)),
    }
    for setting, machines in fleets.items():
        fleet = replace(run, machines=machines)
        store = in_store(fleet, num_outer_steps=num_outer_steps, seed=seed)
        yield _row("churn", "store shares", 64, store, setting=setting, seed=seed)
        fixed = with_members(fleet, "fixed", seconds=store.seconds, seed=seed)
        yield _row("churn", "fixed", 64, fixed, setting=setting, seed=seed)
        yield _closed_form("store shares", setting, fleet, store, seed)


def storms(*, num_seeds: int) -> Iterator[Row]:
    """The measured storms and the mean of what is simulated of each."""
    for name in ("fault_storm", "fault_storm_equal_tokens"):
        for row in _read(name):
            outcomes, measured = trainers_storm(row, num_seeds=num_seeds)
            setting = f"{float(row['faults_an_hour']):,.0f}/h, seed {float(row['seed']):.0f}, trainer"
            yield _row("storm", "store gather", 3, _mean(outcomes), setting=setting, reference=measured)
    for row in _read("fleet_storm"):
        setting = f"{float(row['faults_an_hour']):,.0f}/h, sleeping steps"
        measured, p50 = float(row["goodput"]), float(row["decided_p50"])
        outcome = _mean(simulate(row, num_seeds=3 * num_seeds))
        yield _row("storm", "store gather", 3, outcome, setting=setting, reference=measured, reference_p50=p50)


def _read(name: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def trainers_storm(row: dict[str, str], *, num_seeds: int) -> tuple[list[Outcome], float]:
    """Simulated outcomes of a row of fault_storm.csv, by seed, and the goodput that was measured.

    Three replicas of the recipe `laptop` with H = 15 and 2 sequences of 256 tokens per step: 1.2 million
    parameters in FP32, P = 3, τ = 1. Goodput is relative to the survivor's pace; `slow` has half of it.
    """
    rate, seconds, faults = (float(row[name]) for name in ("steps_a_second", "seconds", "faults_an_hour"))
    network: Row = {"count": 1, "up_mbit_s": 1000, "down_mbit_s": 1000, "latency_seconds": 0.02}
    slowness = {"survivor": 1, "slow": 2, "third": 1}
    quiet = FleetRun(
        machines=tuple(Machines(name=name, step_seconds=n / rate, **network) for name, n in slowness.items()),
        num_params=1_214_976,
        step_tokens=512,
        sync_every=15,
        num_fragments=3,
        overlap_steps=1,
        bits_per_value=32,
        checkpoint_seconds=20 * 1.5 / rate,
    )
    of_victims = suffered(
        schedule(faults, int(float(row["seed"])), 20.0), seconds=seconds, restart_seconds=RESTART_SECONDS
    )
    run = described(quiet, of_victims, seconds=seconds)
    possible = quiet.ideal_tokens_per_second
    outcomes = [in_store(run, num_outer_steps=int(float(row["rounds"])), seed=seed) for seed in range(num_seeds)]
    relative = [replace(each, goodput=each.tokens_per_hour / 3600 / possible) for each in outcomes]
    return relative, float(row["tokens"]) / seconds / possible


def rounds() -> Iterator[Row]:
    """The measured times from a send to its decision, on quiet machines, and what is simulated of each."""
    for row in _read("elastic_rounds"):
        latency_seconds, mbit_s = float(row["latency_ms"]) / 1000, float(row["mbit_s"])
        overlap = math.ceil(float(row["rule_seconds"]) / 0.02)
        home = Machines(
            name="home",
            count=3,
            step_seconds=0.02,
            up_mbit_s=mbit_s,
            down_mbit_s=mbit_s,
            latency_seconds=latency_seconds / 2,
        )
        run = FleetRun(
            machines=(home,),
            num_params=2e6,
            step_tokens=1,
            sync_every=3 * overlap,
            num_fragments=2,
            overlap_steps=overlap,
            bits_per_value=8e-6 * float(row["payload_bytes"]),
        )
        outcome = in_store(run, num_outer_steps=400)
        setting = f"{mbit_s:g} Mbit/s, {1000 * latency_seconds:g} ms"
        yield _row("rounds", "store gather", 3, outcome, setting=setting, reference_p50=float(row["p50"]))


def _decoupled(num_outer_steps: int) -> Iterator[Row]:
    for (num_chips, num_learners, method), published in DECOUPLED.items():
        learner = Machines(
            name="learner",
            count=num_learners,
            step_seconds=1.0,
            up_mbit_s=math.inf,
            down_mbit_s=math.inf,
            latency_seconds=0.0,
            hours_between_failures=8760 / (num_chips / num_learners),
            repair_seconds=19.0,
        )
        run = FleetRun(
            machines=(learner,),
            num_params=5e9,
            step_tokens=1,
            sync_every=24,
            num_fragments=24,
            overlap_steps=2,
            quorum=1,
            poll_seconds=0.1,
            checkpoint_seconds=10.0 if method == "data_parallel" else 1e-9,
        )
        if method == "data_parallel":
            outcome = with_members(run, method, seconds=20.0 * num_outer_steps)
        else:
            outcome = in_store(run, num_outer_steps=num_outer_steps)
        setting = f"{num_chips / 1e6:g} million chips"
        yield _row("decoupled", method, num_learners, outcome, setting=setting, reference=published)


def _mean(outcomes: list[Outcome]) -> Outcome:
    """The outcome of the first seed with the mean goodput, contributors and median of all."""
    num = len(outcomes)
    return replace(
        outcomes[0],
        goodput=sum(each.goodput for each in outcomes) / num,
        tokens_per_hour=sum(each.tokens_per_hour for each in outcomes) / num,
        contributors=sum(each.contributors for each in outcomes) / num,
        decided_seconds=(sum(each.decided_seconds[0] for each in outcomes) / num, math.nan),
    )


if __name__ == "__main__":
    sys.exit(main())
