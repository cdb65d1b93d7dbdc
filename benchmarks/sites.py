"""Bytes between two sites of several processes with DDP inside, by the counters of their network interfaces.

    sudo python benchmarks/sites.py

Each site is a network namespace with a job of its own, which runs examples/two_sites.py: once with a link for each
process, and once with a leader that exchanges for all.
"""

import argparse
import importlib
import os
import re
import runpy
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

from network.laboratory import Laboratory

EXAMPLE = Path(__file__).parents[1] / "examples" / "two_sites.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="in each site")
    parser.add_argument("--gbit-s", type=float, default=1.0, help="of each site's link")
    parser.add_argument("--width", type=int, default=256, help="of the model")
    parser.add_argument("--example", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.example is not None:
        run_site(arguments.processes, arguments.example)
        return
    print("links               payload bytes  bytes on the wire  outer hash")
    for name, flags in (("one a process", []), ("the leader's", ["--leader"])):
        payload_bytes, wire_bytes, digest = train(arguments, flags)
        print(f"{name:16}  {payload_bytes:15,}  {wire_bytes:17,}  {digest}", flush=True)


def train(arguments: argparse.Namespace, flags: list[str]) -> tuple[int, int, str]:
    """Payload bytes that a process of replica 0 sent, bytes that left its site, and the hash of all processes."""
    with Laboratory(2) as laboratory:
        laboratory.set_links(gbit_s=arguments.gbit_s)
        example = ["--width", str(arguments.width), "--address", f"{laboratory.address(0)}:29500", *flags]
        sites = [
            laboratory.start(
                replica,
                [
                    sys.executable,
                    __file__,
                    "--processes",
                    str(arguments.processes),
                    "--example",
                    *example,
                    "--replica",
                    str(replica),
                ],
                environment={"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for replica in range(2)
        ]
        outputs = [site.communicate(timeout=600)[0] for site in sites]
        wire_bytes = laboratory.bytes_sent(0)
    hashes = re.findall(r"outer hash ([0-9a-f]{16})", "".join(outputs))
    if len(hashes) != 2 * arguments.processes or len(set(hashes)) > 1:
        raise SystemExit(f"the processes disagree: {hashes}")
    (sent,) = re.findall(r"([\d,]+) payload bytes", outputs[0])
    return int(sent.replace(",", "")), wire_bytes, hashes[0]


def run_site(num_processes: int, flags: list[str]) -> None:
    """Run the example in processes that find in their environment what torchrun would write there."""
    importlib.import_module("torch._dynamo")  # once for all: every optimizer imports it
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501", "WORLD_SIZE": str(num_processes)}
    processes = [get_context("fork").Process(target=run_example, args=(i, flags)) for i in range(num_processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def run_example(rank: int, flags: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.argv = [str(EXAMPLE), *flags]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
