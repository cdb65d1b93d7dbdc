"""What `diloco bench wire` shows."""

import json
from collections.abc import Iterable
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from diloco.measure.wire import WireMeasurement


def wire_json(measurements: Iterable[WireMeasurement]) -> str:
    """A list of the measurements."""
    return json.dumps([asdict(found) for found in measurements], indent=1)


def print_wire(measurements: Iterable[WireMeasurement], console: Console) -> None:
    """A row a codec; beside each speed, how many times a copy's it is."""
    table = Table(box=None, header_style="bold")
    table.add_column("codec")
    for name in ("bits a value", "relative error"):
        table.add_column(name, justify="right")
    for found in measurements:
        if not table.row_count:
            for speed in found.speeds:
                threads = "1 thread" if speed.num_threads == 1 else f"{speed.num_threads} threads"
                for name in ("encode", "decode and add"):
                    table.add_column(f"{name}, GB/s\n{threads}", justify="right")
        cells = [found.wire, f"{found.bits_per_value:.3f}", f"{found.relative_error:.4f}"]
        for speed in found.speeds:
            for gbyte_s in (speed.encode_gbyte_s, speed.decode_add_gbyte_s):
                cells.append(f"{gbyte_s:.2f} ({gbyte_s / speed.copy_gbyte_s:.2f}×)")
        table.add_row(*cells)
    console.print(table)
    console.print("GB/s of FP32 input; in brackets, to a copy that was measured just before.", highlight=False)
