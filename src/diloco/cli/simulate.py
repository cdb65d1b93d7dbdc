"""`diloco simulate`: compute utilization, timelines and wall-clock of a described run, without torch."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from diloco.cli._command import choose
from diloco.cli._simulated_run import SimulatedRun, SimulatorKind, paper_model
from diloco.errors import UserError
from diloco.presets import Method
from diloco.report.terminal.tables import (
    bandwidth_json,
    print_bandwidth,
    print_published,
    print_wall_clock,
    utilization_json,
    wall_clock_json,
    wide_console,
)
from diloco.simulator.bandwidth import GBIT_S, needed_gbit_s
from diloco.simulator.methods import MethodSettings
from diloco.simulator.model_size import ModelSize
from diloco.simulator.physical import PhysicalModel
from diloco.simulator.replicas import replicas_of
from diloco.simulator.step_time import step_seconds
from diloco.simulator.timeline import Interval, paper_timeline, physical_timeline
from diloco.simulator.wall_clock import NETWORKS, IdealizedRun, NetworkName

HELP = "links and runs: diloco simulate bandwidth|utilization|step-seconds|timeline|pictures|wall-clock|published"
ORDER = 3


def run(arguments: list[str]) -> None:
    """Simulate as a command line asks."""
    choose(_COMMANDS, arguments, prog="diloco simulate")


def _bandwidth(
    run: Annotated[SimulatedRun, tyro.conf.arg(name="")],
    targets: str = "0.5,0.8,0.9,0.95,0.99",
    json: bool = False,
) -> None:
    """The least bandwidth that reaches a compute utilization, among 50 from 0.1 to 1000 Gbit/s.

    Args:
        run: The run to simulate.
        targets: Compute utilizations between 0 and 1, separated by commas.
        json: Print JSON.
    """
    numbers = {text.strip(): _target(text.strip()) for text in targets.split(",")}
    utilizations = run.compute_utilization(GBIT_S)
    needed = {text: needed_gbit_s(utilizations, target) for text, target in numbers.items()}
    if json:
        print(bandwidth_json(needed))
    else:
        print_bandwidth(needed, wide_console())
    _print_rounded_period(run)


def _target(text: str) -> float:
    try:
        target = float(text)
    except ValueError:
        raise UserError(f"targets: {text!r} is no number; give some like 0.5,0.9", "targets") from None
    if not 0 < target <= 1:
        raise UserError(f"targets must be above 0 and at most 1, not {text}", "targets")
    return target


def _utilization(
    run: Annotated[SimulatedRun, tyro.conf.arg(name="")], link_gbit_s: tuple[float, ...], json: bool = False
) -> None:
    """The compute utilization on given links.

    Args:
        run: The run to simulate.
        link_gbit_s: Bandwidth of a replica's link, each way, in Gbit/s; one number, or one a replica (physical).
        json: Print JSON.
    """
    if run.preset == "paper" and len(link_gbit_s) != 1:
        raise UserError(
            f"link_gbit_s={link_gbit_s} with preset=paper, which has one network: give one number",
            *("link_gbit_s", "preset"),
        )
    (utilization,) = run.compute_utilization(link_gbit_s[:1], links=link_gbit_s)
    print(utilization_json(float(utilization)) if json else f"compute utilization {utilization:.2%}")
    _print_rounded_period(run)


def _print_rounded_period(run: SimulatedRun) -> None:
    """Print the H that the preset paper took in the place of the one that was given."""
    if run.preset == "paper" and run.settings.streams:
        schedule = run.paper_model().schedule
        if schedule.sync_every != run.sync_every:
            print(
                f"diloco: the preset paper took H = {schedule.sync_every}, a multiple of its "
                f"{schedule.num_fragments} fragments",
                file=sys.stderr,
            )


def _step_seconds(
    num_params: float, batch_tokens: float, num_chips: float, flops_per_chip: float, mfu: float
) -> None:
    """The compute time of a step, 6·N·B/(R·Q·MFU), in seconds.

    Args:
        num_params: N, number of parameters that a token activates; all of them but in a mixture of experts.
        batch_tokens: B, tokens of a step on these chips.
        num_chips: R, number of chips.
        flops_per_chip: Q, floating-point operations that a chip can do in a second.
        mfu: Part of Q that training reaches, between 0 and 1.
    """
    seconds = step_seconds(
        num_params=num_params,
        batch_tokens=batch_tokens,
        num_chips=num_chips,
        flops_per_chip=flops_per_chip,
        mfu=mfu,
    )
    print(f"{seconds:.4g}")


def _published() -> None:
    """The papers' tables of bandwidth and wall-clock, each cell beside that of the preset paper."""
    print_published(wide_console())


def _timeline(
    output: Path = Path("pictures"),
    method: Method = "streaming_overlapped",
    num_layers: int = 6,
    num_params: float = 1e9,
    step_seconds: tuple[float, ...] = (0.1,),
    num_replicas: int | None = None,
    link_gbit_s: float = 80.0,
    sync_every: int = 6,
    layers_per_fragment: int = 3,
    overlap_steps: int | tuple[int, ...] | None = None,
    num_steps: int = 14,
    preset: SimulatorKind = "physical",
) -> None:
    """Draw what replicas and links do in the first steps, with strided and with sequential fragments.

    Args:
        output: Directory to write timeline.svg and timeline.png to.
        method: Method of the papers.
        num_layers: L, number of transformer blocks.
        num_params: N, number of all parameters.
        step_seconds: Compute time of a step; one number, or one a replica.
        num_replicas: M; left out, 2 (physical).
        link_gbit_s: Bandwidth of every link, in Gbit/s.
        sync_every: H, inner steps between two syncs of the same fragment.
        layers_per_fragment: Blocks in a fragment of the streaming methods.
        overlap_steps: τ, inner steps between sending a fragment and merging it; left out, the method's own.
        num_steps: Number of steps to draw.
        preset: physical: replicas on links, as the engine works; paper: the simulator of the paper's table.
    """
    from diloco.report.figures.drawing import save
    from diloco.report.figures.schedules import draw_timelines

    settings = MethodSettings(
        method=method,
        sync_every=sync_every,
        layers_per_fragment=layers_per_fragment,
        overlap_steps=overlap_steps,
    )

    def intervals(settings: MethodSettings) -> list[Interval]:
        if preset == "paper":
            physical: dict[str, Any] = {} if num_replicas is None else {"num_replicas": num_replicas}
            model = paper_model(settings, num_params, num_layers, step_seconds, physical=physical)
            return paper_timeline(model, gbit_s=link_gbit_s, num_steps=num_steps)
        size = ModelSize(num_params=num_params, num_layers=num_layers)
        replicas = replicas_of(num_replicas, step_seconds, (0.0,), (None,), overlap_steps)
        machines = PhysicalModel(settings=settings, size=size, replicas=replicas)
        return physical_timeline(machines, gbit_s=link_gbit_s, num_steps=num_steps)

    if settings.streams:
        both = (settings, replace(settings, fragments="sequential"))
        panels = {f"{method}, {one.fragments} fragments": intervals(one) for one in both}
    else:
        panels = {method: intervals(settings)}
    _print_paths(save(draw_timelines(panels), output, "timeline"))


def _pictures(figures: tuple[str, ...] = (), output: Path = Path("pictures")) -> None:
    """Draw the papers' figures of schedules, of compute utilization over bandwidth, and of loss over wall-clock.

    Args:
        figures: Names among fragment_patterns, schedules, methods, large_models, step_seconds, sync_every,
            overlap_steps, fragments, layers_per_fragment, fragment_bandwidth, diloco_sync_every, wall_clock; left
            out, all.
        output: Directory to write NAME.svg and NAME.png to.
    """
    from diloco.report.figures.simulator import FIGURES, draw_figures

    _print_paths(draw_figures(figures or FIGURES, output))


def _print_paths(paths: Sequence[Path]) -> None:
    for path in paths:
        print(path)


def _wall_clock(
    num_params: float,
    num_tokens: float,
    batch_tokens: float,
    num_chips: int,
    num_replicas: int = 0,
    sync_every: int = 30,
    overlap_steps: int = 0,
    inside: NetworkName = "high",
    between: NetworkName = "low",
    flops_per_chip: float = 300e12,
    inner_bits_per_param: float = 16,
    outer_bits_per_param: float = 16,
    json: bool = False,
) -> None:
    """Idealized time of a whole run on two levels of network (arXiv 2503.09799, appendix A).

    Args:
        num_params: N, number of all parameters.
        num_tokens: D, tokens of the whole run.
        batch_tokens: Tokens of a step over all chips.
        num_chips: R, number of all chips.
        num_replicas: M; 0 is Data-Parallel.
        sync_every: H, inner steps between two syncs.
        overlap_steps: τ, inner steps that hide the exchange of outer gradients.
        inside: Network within a replica (400, 100 or 10 Gbit/s).
        between: Network between replicas, and of Data-Parallel.
        flops_per_chip: Q, floating-point operations that a chip does in a second.
        inner_bits_per_param: Bits of a gradient on the network.
        outer_bits_per_param: Bits of an outer gradient on the network.
        json: Print JSON.
    """
    run = IdealizedRun(
        num_params=num_params,
        num_tokens=num_tokens,
        batch_tokens=batch_tokens,
        num_chips=num_chips,
        num_replicas=num_replicas,
        sync_every=sync_every,
        overlap_steps=overlap_steps,
        inside=NETWORKS[inside],
        between=NETWORKS[between],
        flops_per_chip=flops_per_chip,
        inner_bits_per_param=inner_bits_per_param,
        outer_bits_per_param=outer_bits_per_param,
    )
    if json:
        print(wall_clock_json(run))
    else:
        print_wall_clock(run, wide_console())


_COMMANDS = {
    "bandwidth": _bandwidth,
    "utilization": _utilization,
    "step-seconds": _step_seconds,
    "published": _published,
    "timeline": _timeline,
    "pictures": _pictures,
    "wall-clock": _wall_clock,
}
