"""Many replicas in one store: real trainers of a tiny model on one SeaweedFS, with gather and with shares.

    python benchmarks/many_replicas.py --output DIR [--replicas 32] [--steps 240] [--ways gather shares]

Each replica is a `diloco train tiny` of its own. At the end `diloco store verify` takes every outer step again. A
row per way: contributors of an outer step, requests and bytes of all replicas, seconds. DIR/many.jsonl is written
as rows come; a later call measures what is missing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from elastic_study.replica import Server, running_seaweedfs

WAYS = {
    "gather": ["--diloco.combine", "gather"],
    "shares": ["--diloco.combine", "reduce_scatter", "--elastic.num-shares", "8"],
}
BATCH, LENGTH = 1, 64
_MOST_SECONDS = 1500
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--steps", type=int, default=240, help="inner steps of each, on average")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    file = arguments.output / "many.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    with tempfile.TemporaryDirectory() as folder, running_seaweedfs(Path(folder)) as server:
        for way in set(arguments.ways) - {row["way"] for row in rows}:
            rows.append(train(way, server, Path(folder, way), arguments.replicas, arguments.steps))
            with file.open("a") as lines:
                lines.write(json.dumps(rows[-1]) + "\n")
    for row in sorted(rows, key=lambda row: row["way"]):
        print(json.dumps(row))


def train(way: str, server: Server, folder: Path, num_replicas: int, num_steps: int) -> Row:
    """Train, verify, and count."""
    folder.mkdir()
    environment = os.environ | server.environment | {"OMP_NUM_THREADS": "1"}
    url, started = server.new_url(), time.monotonic()
    settings = {
        "--rendezvous": url,
        "--num-replicas": num_replicas,
        "--global-batch": num_replicas * BATCH,
        "--num-tokens": num_steps * num_replicas * BATCH * LENGTH,
        "--evaluation.num-tokens": 2048,
        "--checkpoint.every-steps": 0,
    }
    words = [word for name, value in settings.items() for word in (name, str(value))]
    processes = [
        subprocess.Popen(
            [*_DILOCO, "train", "tiny", *words, *WAYS[way], "--name", f"r{m}"],
            cwd=folder,
            env=environment,
            stdout=(folder / f"r{m}.log").open("w"),
            stderr=subprocess.STDOUT,
        )
        for m in range(num_replicas)
    ]
    try:
        codes = [process.wait(max(1.0, started + _MOST_SECONDS - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(codes), [(folder / f"r{m}.log").read_text()[-500:] for m, code in enumerate(codes) if code][:1]
    seconds = time.monotonic() - started
    verified, status = (
        subprocess.run([*_DILOCO, "store", *asked], env=environment, capture_output=True, text=True, check=True)
        for asked in (["verify", url], ["status", url, "--json"])
    )
    hashes = {json.loads(path.read_text())["outer_hash"] for path in folder.glob("runs/*/summary.json")}
    assert hashes == {verified.stdout.split()[-1]}, "every replica ends with the Θ of the replay"
    facts = json.loads(status.stdout)
    return {
        "way": way,
        "replicas": num_replicas,
        "seconds": round(seconds, 1),
        "outer_steps": facts["outer_steps"],
        "contributors": facts["contributors"],
        "staleness": mean(replica["staleness"] for replica in facts["replicas"]),
        "training_loss": facts["training_loss"],
        **facts["traffic"],
    }


_DILOCO = [sys.executable, "-m", "diloco"]

if __name__ == "__main__":
    main()
