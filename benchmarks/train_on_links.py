"""A run of `diloco train`, each replica in a network namespace of its own behind a slow link; needs root.

    python benchmarks/train_on_links.py --mbit-s 18 -- laptop --name slow --global-batch 8 …

The words after `--` are the arguments of `diloco train`. Prints the bytes that left each replica's interface,
headers included.
"""

import argparse
import subprocess
import sys

from network.laboratory import Laboratory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit-s", type=float, required=True)
    parser.add_argument("--num-replicas", type=int, default=2)
    parser.add_argument("train", nargs="+")
    arguments = parser.parse_args()
    with Laboratory(arguments.num_replicas) as laboratory:
        laboratory.set_links(gbit_s=arguments.mbit_s / 1000)
        replicas = [start(laboratory, replica, arguments.train) for replica in range(arguments.num_replicas)]
        codes = [process.wait() for process in replicas]
        for replica in range(arguments.num_replicas):
            print(f"replica {replica}: {laboratory.bytes_sent(replica):,} bytes sent on its interface")
    sys.exit(int(any(codes)))


def start(laboratory: Laboratory, replica: int, train: list[str]) -> "subprocess.Popen[str]":
    """Start a replica as torchrun would on a machine of its own."""
    flags = [*train, "--num-replicas", str(laboratory.num_replicas)]
    return laboratory.start(
        replica,
        [sys.executable, "-m", "diloco", "train", *flags],
        environment={
            "RANK": str(replica),
            "WORLD_SIZE": str(laboratory.num_replicas),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": laboratory.address(0),
            "MASTER_PORT": "29513",
            "GLOO_SOCKET_IFNAME": laboratory.interface,
            "OMP_NUM_THREADS": "1",
        },
    )


if __name__ == "__main__":
    main()
