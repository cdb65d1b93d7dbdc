"""`diloco bench`: how long parts of a run take on this machine."""

from pathlib import Path
from typing import Literal

import torch

from diloco.cli._command import choose
from diloco.errors import UserError, setting
from diloco.report.terminal.tables import show, wire_json, wire_parts
from diloco.training.measure import demo_gradient, load_gradient, measure_wire
from diloco.wire import CODECS, codec

HELP = "how long parts of a run take on this machine: diloco bench wire [--json]"
ORDER = 10


def run(arguments: list[str]) -> None:
    """Measure the part that a command line names."""
    choose({"wire": _wire}, arguments, prog="diloco bench")


def _wire(
    wires: tuple[str, ...] = (),
    gradient: Path | None = None,
    values: int = 1 << 26,
    device: Literal["cpu", "cuda"] = "cpu",
    json: bool = False,
) -> None:
    """Bits, error and speed of the wire formats, beside the speed of a copy.

    Args:
        wires: Codecs with options, such as e3m0:block=128; left out, all codecs.
        gradient: A safetensors file with a real outer gradient; left out, the laptop recipe's first, computed now.
        values: Number of FP32 values in the vector on which speed is measured.
        device: Device of that vector.
        json: Print JSON.
    """
    for wire in wires:
        with setting("wires", wire):
            codec(wire)
    if values < 1:
        raise UserError(f"values={values} must be at least 1", "values")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda, but torch finds no GPU here: set device=cpu", "device")
    gradient_N = load_gradient(gradient) if gradient is not None else demo_gradient()
    measured = [*measure_wire(wires or tuple(CODECS), gradient_N=gradient_N, num_values=values, device=device)]
    if json:
        print(wire_json(measured))
    else:
        show(wire_parts(measured))
