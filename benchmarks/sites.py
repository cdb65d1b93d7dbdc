"""Bytes between two sites of several processes with DDP inside, by the counters of their network interfaces.

    sudo python benchmarks/sites.py

Each site is a network namespace with a job of its own, which runs examples/two_sites.py: once with a link for each
process, and once with a leader that exchanges for all.
"""

import argparse
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

from network.laboratory import Laboratory

EXAMPLE = Path(__file__).parents[1] / "examples" / "two_sites.py"
OVER = "over\n"
"""The line by which a site ends its output of a run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="in each site")
    parser.add_argument("--gbit-s", type=float, default=1.0, help="of each site's link")
    parser.add_argument("--width", type=int, default=256, help="of the model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--site", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.site:
        run_site(arguments.processes)
        return
    print("links               payload bytes  bytes on the wire  outer hash")
    with Laboratory(2) as laboratory:
        laboratory.set_links(gbit_s=arguments.gbit_s)
        sites = [
            laboratory.start(
                replica,
                [sys.executable, __file__, "--processes", str(arguments.processes), "--site"],
                environment={"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for replica in range(2)
        ]
        for name, port, flags in (("one a process", 29500, []), ("the leader's", 29600, ["--leader"])):
            sizes = ["--width", str(arguments.width), "--steps", str(arguments.steps)]
            example = [*sizes, "--address", f"{laboratory.address(0)}:{port}", *flags]
            payload_bytes, wire_bytes, digest = train(laboratory, sites, example, arguments.processes)
            print(f"{name:16}  {payload_bytes:15,}  {wire_bytes:17,}  {digest}", flush=True)


def train(
    laboratory: Laboratory, sites: "list[subprocess.Popen[str]]", flags: list[str], num_processes: int
) -> tuple[int, int, str]:
    """Payload bytes that a process of replica 0 sent, bytes that left its site, and the hash of all processes."""
    bytes_before = laboratory.bytes_sent(0)
    for replica, site in enumerate(sites):
        assert site.stdin is not None
        site.stdin.write(json.dumps([*flags, "--replica", str(replica)]) + "\n")
        site.stdin.flush()
    outputs = [_output(site) for site in sites]
    wire_bytes = laboratory.bytes_sent(0) - bytes_before
    hashes = re.findall(r"outer hash ([0-9a-f]{16})", "".join(outputs))
    if len(hashes) != 2 * num_processes or len(set(hashes)) > 1:
        raise SystemExit(f"the processes disagree: {hashes}")
    (sent,) = re.findall(r"([\d,]+) payload bytes", outputs[0])
    return int(sent.replace(",", "")), wire_bytes, hashes[0]


def _output(site: "subprocess.Popen[str]") -> str:
    """The output of a site in one run of the example."""
    assert site.stdout is not None
    lines = []
    while (line := site.stdout.readline()) != OVER:
        if not line:
            raise SystemExit(f"a site ended with exit code {site.wait()}")
        lines.append(line)
    return "".join(lines)


def run_site(num_processes: int) -> None:
    """Run the example for each line of flags, in processes that find in their environment what torchrun writes."""
    importlib.import_module("torch._dynamo")  # once for all: every optimizer imports it
    for port, line in enumerate(sys.stdin, 29501):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_processes)}
        flags = json.loads(line)
        processes = [
            get_context("fork").Process(target=run_example, args=(i, flags)) for i in range(num_processes)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        sys.stdout.write(OVER)
        sys.stdout.flush()


def run_example(rank: int, flags: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.argv = [str(EXAMPLE), *flags]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
