"""Every method on real sockets through real bandwidth limits, beside the simulator's prediction; needs root.

    python benchmarks/links.py --train TRAIN.jsonl --held-out HELD_OUT.jsonl --output DIR

Two replicas, each in a network namespace of its own, train the laptop recipe's model on the same tokens with the
same inner optimizer. Data-Parallel is DistributedDataParallel in FP32, with three bucket sizes, and with its bf16
hook. torchft_diloco needs `pip install '.[peers]'`; it is also measured without a bandwidth limit, because its
prediction adds the time that it loses there.

Compute utilization is, for every method, the time of as many steps without exchange (`alone`, right before and
after it) over the time of its steps, from the second period of H steps on. The methods take turns, `--repeats`
times; medians are printed. Every measurement is written at once, to DIR/links.csv, and the steps alone to
DIR/alone.jsonl: a later call measures only what is missing there, and makes all predictions anew. DIR/links.svg is
the figure.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from link_study.measuring import Measuring, replica_processes
from link_study.methods import DEFAULT_METHODS, NUM_REPLICAS, PEER, UNLIMITED_MBIT_S, variants
from link_study.points import points
from link_study.report import draw, report, report_payloads
from link_study.rows import Row, append_alone, key, read, read_alone, write
from network.laboratory import Laboratory

from diloco.training.config.config import TrainConfig
from diloco.training.config.recipes import recipe
from diloco.training.config.resolve import resolved
from diloco.training.prepare import prepare_run


def main() -> None:
    arguments = _arguments()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    config = _config(arguments)
    rows, alone = read(output / "links.csv"), read_alone(output / "alone.jsonl")
    if missing := _missing(arguments, rows):
        laboratory = Laboratory(
            NUM_REPLICAS, emulator=arguments.emulator, congestion_control=arguments.congestion_control
        )
        with laboratory, replica_processes(laboratory, config) as replicas:
            measuring = Measuring(
                laboratory=laboratory,
                replicas=replicas,
                config=config,
                latency_seconds=arguments.latency_ms / 1000,
                loss=arguments.loss,
                seconds=arguments.seconds,
                evaluated_mbit_s=max(arguments.bandwidths),
            )
            for _, group in groupby(missing, lambda row: (row["repeat"], row["mbit_s"])):
                for row, alone_SxM in measuring.rows(list(group)):
                    rows.append(row)
                    if alone_SxM is not None:
                        alone[key(row)] = alone_SxM
                        append_alone(output / "alone.jsonl", row, alone_SxM)
                    write(rows, output / "links.csv")
    report_payloads(rows)
    if medians := points(rows, alone, config):
        report(medians)
        draw(medians, output / "links.svg")


def _missing(arguments: argparse.Namespace, rows: list[Row]) -> list[Row]:
    """The measurements to take, in their order: repeat, Mbit/s and method of each."""
    methods = [(mbit_s, arguments.methods) for mbit_s in arguments.bandwidths]
    methods += [(UNLIMITED_MBIT_S, [PEER])] if PEER in arguments.methods else []
    known = {key(row) for row in rows}
    wanted = [
        {"repeat": float(repeat), "mbit_s": mbit_s, "method": method}
        for repeat in range(arguments.repeats)
        for mbit_s, names in methods
        for method in variants(names)
    ]
    return [row for row in wanted if key(row) not in known]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--bandwidths", type=_list_of(float), default=[10.0, 30.0, 100.0, 300.0, 1000.0], help="Mbit/s"
    )
    parser.add_argument("--methods", type=_list_of(str), default=list(DEFAULT_METHODS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--connections", type=int, default=1, help="between two replicas")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="about how long a run of Data-Parallel may take"
    )
    parser.add_argument("--recipe", default="laptop", help="the model, batch and H")
    parser.add_argument("--sync-every", type=int, help="H, instead of the recipe's")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--emulator", type=Path, help="C source of a link emulator, for latency and loss")
    parser.add_argument("--congestion-control", default="cubic", help="of TCP, such as bbr")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="one way, with an emulator")
    parser.add_argument("--loss", type=float, default=0.0, help="fraction of packets, with an emulator")
    return parser.parse_args()


def _list_of(kind: type) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]


def _config(arguments: argparse.Namespace) -> TrainConfig:
    base = recipe(arguments.recipe)
    sync_every = arguments.sync_every or base.diloco.sync_every
    config = replace(
        base,
        name="links",
        num_replicas=NUM_REPLICAS,
        global_batch=arguments.global_batch,
        num_tokens=3 * sync_every * arguments.global_batch * base.sequence_length,
        optimizer=replace(base.optimizer, learning_rate=arguments.learning_rate),
        diloco=replace(base.diloco, sync_every=sync_every, first_sync="early"),
        num_connections=arguments.connections,
        evaluation=replace(base.evaluation, num_tokens=1_000_000),
        runs=arguments.output / "runs",
        timeout_seconds=3600.0,
        data=replace(
            base.data,
            train=(str(arguments.train),),
            held_out=(str(arguments.held_out),),
            cache=arguments.output / "data",
        ),
    )
    return resolved(prepare_run(config))


if __name__ == "__main__":
    main()
