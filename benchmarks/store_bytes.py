"""Bytes, requests and dollars of replicas that meet in a store, by gather and by shares: arithmetic alone.

    python benchmarks/store_bytes.py [--parameters 1e9] [--fragments 20] [--wire e3m0] [--second e3m0] …

Bytes and requests are those of one replica and one round of the whole model, on average; `most down` is what one
replica downloads for one fragment of which it averages shares, in payloads. Dollars are those of all replicas and
a day, by list prices. Looks for something new are left out.
"""

import argparse
import math

from diloco.rendezvous.prices import R2, S3, Traffic, exchange
from diloco.wire.formats import Format, parse

DAY_SECONDS = 86_400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--fragments", type=int, default=20)
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 8, 16, 64, 128])
    parser.add_argument("--shares", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--wire", default="e3m0")
    parser.add_argument("--second", default="e3m0", help="codec of the averages")
    parser.add_argument("--round-seconds", type=float, default=100.0, help="H inner steps")
    arguments = parser.parse_args()
    size, rounds = math.ceil(arguments.parameters / arguments.fragments), DAY_SECONDS / arguments.round_seconds
    print(
        "| M | way | GB up | GB down | most down | creates | reads | dollars a day, S3 | R2 |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    for num_replicas in arguments.replicas:
        for num_shares in (1, *arguments.shares):
            step = a_step(size, num_replicas, num_shares, parse(arguments.wire), parse(arguments.second))
            times = arguments.fragments / num_replicas
            a_day = scaled(step, arguments.fragments * rounds)
            cells = [
                num_replicas,
                "gather" if num_shares == 1 else f"{num_shares} shares",
                *(f"{1e-9 * times * value:.2f}" for value in (step.bytes_up, step.bytes_down)),
                f"{most_down(num_replicas, num_shares):.1f}",
                *(f"{times * value:,.0f}" for value in (step.creates, step.gets)),
                *(f"{a_day.dollars(prices):,.0f}" for prices in (S3, R2)),
            ]
            print("| " + " | ".join(map(str, cells)) + " |")


def a_step(size: int, num_replicas: int, num_shares: int, wire: Format, second: Format) -> Traffic:
    """The traffic of one outer step of a fragment of N elements, in which all replicas are."""
    share = math.ceil(size / num_shares)
    return exchange(
        num_replicas=num_replicas,
        num_payloads=num_replicas,
        num_steps=1,
        payload_bytes=num_shares * wire.payload_bytes(share),
        average_bytes=num_shares * second.payload_bytes(share),
        num_shares=num_shares,
    )


def most_down(num_replicas: int, num_shares: int) -> float:
    """Payloads that the replica downloads for one fragment which downloads the most."""
    if num_shares == 1:
        return num_replicas - 1
    own = math.ceil(num_shares / num_replicas)  # shares that it averages
    return (own * (num_replicas - 1) + num_shares - own) / num_shares


def scaled(traffic: Traffic, times: float) -> Traffic:
    """The traffic, so many times."""
    return Traffic(**{name: times * value for name, value in vars(traffic).items()})


if __name__ == "__main__":
    main()
