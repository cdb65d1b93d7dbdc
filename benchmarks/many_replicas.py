"""Many replicas: real trainers of a tiny model on one SeaweedFS, with gather, with shares, and in regions.

    python benchmarks/many_replicas.py --output DIR [--replicas 32] [--steps 90] [--ways gather shares regions]

Each replica is a `diloco train tiny` of its own, forked from one process that has imported torch. With `regions`
four runs have a quarter of the replicas each, and a text of their own; four of `diloco bridge` join them to an
outer run. At the end `diloco store verify` takes every outer step of every log again. A row per way and level:
contributors of an outer step, requests and bytes of all replicas, seconds. DIR/many.jsonl is written as rows come;
a later call measures what is missing.
"""

import argparse
import io
import json
import os
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from elastic_study.replica import Server, running_seaweedfs
from tests.processes import Program, program

from diloco.cli.main import main as diloco
from diloco.errors import UserError
from diloco.rendezvous.status import Look

WAYS = {
    "gather": ["--diloco.combine", "gather"],
    "shares": ["--diloco.combine", "reduce_scatter", "--elastic.num-shares", "8"],
    "regions": ["--diloco.combine", "gather"],
}
REGIONS = {"aa": "[_a-c]*.py", "bb": "[d-k]*.py", "cc": "[l-r]*.py", "dd": "[s-z]*.py"}
"""The names of the regions, and the files of Python's library that each reads."""
BATCH, LENGTH = 8, 64
_MOST_SECONDS = 1500
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--steps", type=int, default=90, help="inner steps of each, on average")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no replica is left
    arguments.output.mkdir(parents=True, exist_ok=True)
    file = arguments.output / "many.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    with tempfile.TemporaryDirectory() as folder, running_seaweedfs(Path(folder)) as server:
        for way in [way for way in arguments.ways if way not in {row["way"] for row in rows}]:
            new = train(way, server, Path(folder, way), arguments.replicas, arguments.steps)
            rows += new
            with file.open("a") as lines:
                lines.writelines(json.dumps(row) + "\n" for row in new)
    for row in sorted(rows, key=lambda row: (row["way"], row["level"])):
        print(json.dumps(row))


def train(way: str, server: Server, folder: Path, num_replicas: int, num_steps: int) -> list[Row]:
    """Train, verify, and count."""
    folder.mkdir()
    for name, files in REGIONS.items():
        library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob(files))
        (folder / f"{name}.txt").write_text("\n".join(file.read_text(errors="replace") for file in library))
    os.environ.update({**server.environment, "OMP_NUM_THREADS": "1"})
    names = [*REGIONS] if way == "regions" else [""]
    size, started = num_replicas // len(names), time.monotonic()
    urls = {name: server.new_url() for name in (names if way != "regions" else [*names, "outer"])}
    running: list[Program] = []
    with ExitStack() as stack:

        def start(words: Sequence[str]) -> None:
            running.append(stack.enter_context(program(diloco, words, folder=folder)))

        for name, m in product(names, range(size)):
            start(_command(way, urls[name], name, m, size, num_steps))
        if way == "regions":  # a bridge joins a run that is there, and later ones an outer run
            flags = ["--num-replicas", str(len(names)), "--diloco.sync-every", "6"]
            for name in names:
                _wait_for_run(urls[name], running)
                start(["bridge", urls[name], urls["outer"], *flags])
                _wait_for_run(urls["outer"], running)
        while any(one.process.exitcode is None for one in running):
            _check(running)
            assert time.monotonic() < started + _MOST_SECONDS, "it takes too long"
            time.sleep(0.2)
        _check(running)
    seconds = time.monotonic() - started
    statuses = {name: _verified(url, name, folder) for name, url in urls.items()}
    inside = [status for name, status in statuses.items() if name != "outer"]
    if way != "regions":
        return [_row(way, "all", inside, num_replicas, seconds)]
    between = _row(way, "between", [statuses["outer"]], len(names), seconds)
    return [_row(way, "inside", inside, num_replicas, seconds), between]


def _command(way: str, url: str, region: str, m: int, size: int, num_steps: int) -> list[str]:
    """The command line of one replica."""
    settings = {
        "--rendezvous": url,
        "--num-replicas": size,
        "--global-batch": size * BATCH,
        "--num-tokens": num_steps * size * BATCH * LENGTH,
        "--evaluation.num-tokens": 2048,
        "--checkpoint.every-steps": 0,
        "--name": f"{region}r{m}",
    }
    if region:
        settings |= {"--elastic.bridge": region, "--data.train": f"{region}.txt"}
    words = [str(word) for setting in settings.items() for word in setting]
    return ["train", "tiny", *words, *WAYS[way]]


def _wait_for_run(url: str, running: Sequence[Program]) -> None:
    """Wait until a store holds a run."""
    deadline = time.monotonic() + _MOST_SECONDS
    while True:
        try:
            Look(url).again()
        except UserError:
            _check(running)
            assert time.monotonic() < deadline, f"{url} holds no run"
            time.sleep(0.5)
        else:
            return


def _check(running: Sequence[Program]) -> None:
    """Refuse to wait for the others of a process that has failed."""
    failed = next((one for one in running if one.process.exitcode), None)
    assert failed is None, failed.wait(1)


def _verified(url: str, name: str, folder: Path) -> Row:
    """The status of a run whose log was replayed; every replica has ended with that Θ."""
    verified, status = _diloco("verify", url), _diloco("status", url, "--json")
    paths = folder.glob(f"runs/{name}r*/summary.json")
    hashes = {json.loads(path.read_text())["outer_hash"] for path in paths if name != "outer"}
    assert hashes <= {verified.split()[-1]}, "every replica ends with the Θ of the replay"
    return json.loads(status)


def _diloco(*words: str) -> str:
    """The output of a command, in this process: beside 32 replicas an interpreter takes half a minute to start."""
    output = io.StringIO()
    with redirect_stdout(output):
        diloco(["store", *words])
    return output.getvalue()


def _row(way: str, level: str, runs: Sequence[Row], num_replicas: int, seconds: float) -> Row:
    """The figures of the runs of one level together."""
    staleness = [replica["staleness"] for run in runs for replica in run["replicas"]]
    losses = [run["training_loss"] for run in runs if run["training_loss"] is not None]
    return {
        "way": way,
        "level": level,
        "replicas": num_replicas,
        "seconds": round(seconds, 1),
        "outer_steps": sum(run["outer_steps"] for run in runs),
        "contributors": mean(run["contributors"] for run in runs),
        "staleness": mean(value for value in staleness if value is not None),
        "training_loss": mean(losses) if losses else None,
        **{name: sum(run["traffic"][name] for run in runs) for name in runs[0]["traffic"]},
    }


if __name__ == "__main__":
    main()
