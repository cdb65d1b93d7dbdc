"""The output of `diloco bench wire`: bits, errors and speeds of the codecs."""

import json
from collections.abc import Iterable
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from diloco.training.measure import WireMeasurement


def wire_json(measurements: Iterable[WireMeasurement]) -> str:
    """The measurements as a JSON list."""
    return json.dumps([asdict(measurement) for measurement in measurements], indent=1)


def print_wire(measurements: Iterable[WireMeasurement], console: Console) -> None:
    """Print a row for each codec; each speed stands beside its ratio to a copy's."""
    table = Table(box=None, header_style="bold")
    table.add_column("codec")
    for name in ("bits a value", "relative error"):
        table.add_column(name, justify="right")
    for measurement in measurements:
        if not table.row_count:
            for speed in measurement.speeds:
                threads = "1 thread" if speed.num_threads == 1 else f"{speed.num_threads} threads"
                for name in ("encode", "decode and add"):
                    table.add_column(f"{name}, GB/s\n{threads}", justify="right")
        cells = [measurement.wire, f"{measurement.bits_per_value:.3f}", f"{measurement.relative_error:.4f}"]
        for speed in measurement.speeds:
            for gbyte_s in (speed.encode_gbyte_s, speed.decode_add_gbyte_s):
                cells.append(f"{gbyte_s:.2f} ({gbyte_s / speed.copy_gbyte_s:.2f}×)")
        table.add_row(*cells)
    console.print(table)
    console.print("GB/s of FP32 input; in brackets, the ratio to a copy measured just before.", highlight=False)
