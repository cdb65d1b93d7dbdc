"""`diloco simulate`: compute utilization, timelines and wall-clock of a described run, without torch."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from numpy.typing import ArrayLike, NDArray

from diloco.cli._command import choose
from diloco.errors import UserError
from diloco.report.terminal.tables import (
    bandwidth_json,
    bandwidth_table,
    fleet_json,
    fleet_table,
    hours_table,
    published,
    show,
    utilization_json,
    wall_clock_json,
)
from diloco.simulator.churn import Glance, in_regions, in_store
from diloco.simulator.description import GBIT_S, MethodSettings, ModelSize, Stragglers, needed_gbit_s, replicas_of
from diloco.simulator.fixed_members import WITH_MEMBERS, with_members
from diloco.simulator.fleet import read_fleet
from diloco.simulator.paper import PaperModel
from diloco.simulator.physical import PhysicalModel
from diloco.simulator.timeline import Interval, paper_timeline, physical_timeline
from diloco.simulator.wall_clock import IdealizedRun, step_seconds
from diloco.units import Amount, Rate, Rates

HELP = "links and runs: diloco simulate bandwidth|utilization|step-seconds|timeline|pictures|wall-clock|fleet|…"
ORDER = 3


def run(arguments: list[str]) -> None:
    """Simulate as a command line asks."""
    choose(_COMMANDS, arguments, prog="diloco simulate")


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """The run to simulate."""

    size: Annotated[ModelSize, tyro.conf.arg(name="")]
    """The model; of its sizes preset=paper takes N and L alone."""
    settings: Annotated[MethodSettings, tyro.conf.arg(name="")]
    """The method with its numbers."""
    step_seconds: tuple[float, ...]
    """Compute time of an inner step; one number, or one per replica."""
    num_steps: int | None = None
    """Steps of a run, which ends when everything has arrived; left out, the steady state."""
    preset: Literal["physical", "paper"] = "physical"
    """physical: replicas on links, as the engine works; paper: the simulator of the paper's table."""
    num_replicas: int | None = None
    """M; left out, 2, or as many as the longest list of numbers (physical)."""
    latency_seconds: tuple[float, ...] = (0.0,)
    """Latency of a replica's link, one way; one number, or one per replica (physical)."""
    wire: str | None = None
    """Codec of the outer gradients; left out, the method's own (physical)."""
    combine: str = "gather"
    """gather, reduce_scatter, or reduce_scatter:CODEC (physical)."""
    stragglers: Annotated[Stragglers, tyro.conf.arg(name="")] = field(default_factory=Stragglers)
    """The distribution of step times (physical)."""
    seed: int | None = None
    """Seed of the step times and stalls; left out, 0 (physical)."""

    def flags(self) -> dict[str, Any]:
        """The values of all fields and of the fields within them, which are flags alike."""
        parts = asdict(self)
        nested = [parts.pop(name) for name, value in tuple(parts.items()) if isinstance(value, dict)]
        return parts | {name: value for part in nested for name, value in part.items()}

    def compute_utilization(
        self, gbit_s: ArrayLike, links: tuple[float | None, ...] = (None,)
    ) -> NDArray[np.float64]:
        """The compute utilization at each of several bandwidths, those of the links that are None.

        Raises:
            UserError: if the fields contradict each other, or nothing would be sent.
        """
        self._check()
        if self.preset == "paper":
            return self.paper_model().compute_utilization(gbit_s, num_steps=self.num_steps)
        return self.physical_model(links).compute_utilization(
            gbit_s, num_steps=self.num_steps, seed=self.seed or 0
        )

    def paper_model(self) -> PaperModel:
        """The model of the preset paper.

        Raises:
            UserError: if a field is set that the preset does not have, or more than one number of seconds.
        """
        plain = SimulatedRun(
            size=ModelSize(num_params=self.size.num_params, num_layers=self.size.num_layers),
            settings=replace(self.settings, first_sync=MethodSettings.first_sync, offsets=None),
            step_seconds=self.step_seconds,
            num_steps=self.num_steps,
            preset=self.preset,
        )
        known = plain.flags()
        for name, value in self.flags().items():
            if value != known[name]:
                raise UserError(f"{name}={value} means nothing to preset=paper: leave it out", name, "preset")
        if len(self.step_seconds) != 1:
            raise UserError(
                f"step_seconds={self.step_seconds} with preset=paper, which has one replica: give one number",
                *("step_seconds", "preset"),
            )
        return PaperModel(
            settings=self.settings,
            num_params=self.size.num_params,
            num_layers=self.size.num_layers,
            step_seconds=self.step_seconds[0],
        )

    def physical_model(self, links: tuple[float | None, ...] = (None,)) -> PhysicalModel:
        """The model of the preset physical; links that are None have the bandwidth that is simulated."""
        is_random = self.stragglers != Stragglers()
        if self.seed is not None and not is_random:
            raise UserError(
                f"seed={self.seed}, but nothing is random: leave it out, or set step_variation or "
                "stall_probability",
                *("seed", "step_variation", "stall_probability"),
            )
        least = self.settings.least_replicas
        return PhysicalModel(
            settings=self.settings,
            size=self.size,
            replicas=replicas_of(self.num_replicas, self.step_seconds, self.latency_seconds, links, least=least),
            wire=self.wire,
            combine=self.combine,
            stragglers=self.stragglers if is_random else None,
        )

    def _check(self) -> None:
        """Refuse lengths out of range, and a run in which nothing would be sent."""
        lengths = (
            ("sync_every", self.settings.sync_every, 100_000),
            ("num_layers", self.size.num_layers, 10_000),
            ("num_steps", self.num_steps or 0, 1_000_000),
        )
        for name, value, most in lengths:
            if value > most:
                raise UserError(f"{name}={value:,} must be at most {most:,} in a simulation", name)
        if (self.seed or 0) < 0:
            raise UserError(f"seed={self.seed} must be at least 0", "seed")
        num_fragments = len(self.settings.layers(self.size.num_layers)) + self.settings.streams
        first = min(map(self.settings.schedule(num_fragments).send_step, range(num_fragments)))
        if self.num_steps is not None and 1 <= self.num_steps < first:
            raise UserError(
                f"num_steps={self.num_steps} with sync_every={self.settings.sync_every}: nothing would be sent; "
                "set a smaller sync_every, or more num_steps",
                *("num_steps", "sync_every"),
            )


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
        show([bandwidth_table(needed)])
    _print_rounded_period(run)


def _target(text: str) -> float:
    try:
        target = float(text)
    except ValueError:
        raise UserError(f"targets: {text!r} is no number; give some like 0.5,0.9", "targets") from None
    if not 0 < target <= 1:
        raise UserError(f"targets must be above 0 and at most 1, not {text}", "targets")
    return target


def _utilization(run: Annotated[SimulatedRun, tyro.conf.arg(name="")], link: Rates, json: bool = False) -> None:
    """The compute utilization on given links.

    Args:
        run: The run to simulate.
        link: Bandwidth of a replica's link, each way, such as 20Mbit; one, or one per replica (physical).
        json: Print JSON.
    """
    if run.preset == "paper" and len(link) != 1:
        raise UserError(
            "link with preset=paper, which has one network: give one rate",
            *("link", "preset"),
        )
    (utilization,) = run.compute_utilization(link[:1], links=link)
    print(utilization_json(float(utilization)) if json else f"compute utilization {utilization:.2%}")
    _print_rounded_period(run)


def _print_rounded_period(run: SimulatedRun) -> None:
    """Print the H that the preset paper took in the place of the one that was given."""
    if run.preset == "paper" and run.settings.streams:
        schedule = run.paper_model().schedule
        if schedule.sync_every != run.settings.sync_every:
            print(
                f"diloco: the preset paper took H = {schedule.sync_every}, a multiple of its "
                f"{schedule.num_fragments} fragments",
                file=sys.stderr,
            )


def _step_seconds(
    num_params: Amount, batch_tokens: Amount, num_chips: float, flops_per_chip: Amount, mfu: float
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
    show(published())


_PICTURED = SimulatedRun(
    size=ModelSize(num_params=1e9, num_layers=6),
    settings=MethodSettings(method="streaming_overlapped", sync_every=6),
    step_seconds=(0.1,),
    num_steps=14,
)


def _timeline(
    output: Path = Path("pictures"),
    run: Annotated[SimulatedRun, tyro.conf.arg(name="")] = _PICTURED,
    link: Rate = 80.0,
) -> None:
    """Draw what replicas and links do in the first steps, with strided and with sequential fragments.

    Args:
        output: Directory to write timeline.svg and timeline.png to.
        run: The run to draw; the fragments that it has come first.
        link: Bandwidth of every link; left out, 80Gbit.
    """
    from diloco.report.figures.drawing import save
    from diloco.report.figures.simulator import draw_timelines

    if run.stragglers != Stragglers():
        raise UserError(
            f"step_variation={run.stragglers.step_variation} and stall_probability="
            f"{run.stragglers.stall_probability}: a timeline has steps of one duration; leave them out",
            *("step_variation", "stall_probability"),
        )
    num_steps = _PICTURED.num_steps if run.num_steps is None else run.num_steps
    assert num_steps is not None, "the picture's default has a number"

    def intervals(settings: MethodSettings) -> list[Interval]:
        drawn = replace(run, settings=settings)
        if run.preset == "paper":
            return paper_timeline(drawn.paper_model(), gbit_s=link, num_steps=num_steps)
        return physical_timeline(drawn.physical_model(), gbit_s=link, num_steps=num_steps)

    settings = run.settings
    if settings.streams:
        other = "strided" if settings.fragments == "sequential" else "sequential"
        both = (settings, replace(settings, fragments=other))
        panels = {f"{one.method}, {one.fragments} fragments": intervals(one) for one in both}
    else:
        panels = {str(settings.method): intervals(settings)}
    _print_paths(save(draw_timelines(panels), output, "timeline"))


def _pictures(figures: tuple[str, ...] = (), output: Path = Path("pictures")) -> None:
    """Draw the papers' figures of schedules, of compute utilization over bandwidth, and of loss over wall-clock.

    Args:
        figures: Names of figures, such as methods or schedules, which any other word lists; left out, all.
        output: Directory to write NAME.svg and NAME.png to.
    """
    from diloco.report.figures.simulator import FIGURES, draw_figures

    _print_paths(draw_figures(figures or FIGURES, output))


def _print_paths(paths: Sequence[Path]) -> None:
    for path in paths:
        print(path)


def _wall_clock(run: Annotated[IdealizedRun, tyro.conf.arg(name="")], json: bool = False) -> None:
    """Idealized time of a whole run on two levels of network (arXiv 2503.09799, appendix A).

    Args:
        run: The run.
        json: Print JSON.
    """
    if json:
        print(wall_clock_json(run))
    else:
        show([hours_table(run)])


def _fleet(
    fleet: tyro.conf.Positional[Path],
    outer_steps: int = 1000,
    regions: int | None = None,
    seed: int = 0,
    json: bool = False,
    picture: Path | None = None,
) -> None:
    """Goodput, contributors and price, in a store of R2, of a run on machines that fail and come back.

    Args:
        fleet: TOML file with num_params, step_tokens, sync_every, …, and for each kind of machine a [[machines]]
            with name, count, step_seconds, up_mbit_s, down_mbit_s, hours_between_failures, …
        outer_steps: Outer steps to simulate, of all fragments; the other methods run for as long.
        regions: Regions into which the machines are dealt for two levels: a store per region, one between them.
        seed: Seed of failures and step times.
        json: Print JSON.
        picture: Directory to write fleet.svg and fleet.png to: goodput, contributors and who is up over time.
    """
    run = read_fleet(fleet)
    if outer_steps < 1:
        raise UserError(f"outer_steps={outer_steps} must be at least 1", "outer_steps")
    glances = list[Glance]()
    store = in_store(run, num_outer_steps=outer_steps, seed=seed, watch=glances.append if picture else None)
    outcomes = [store]
    if regions is not None:
        outcomes.append(in_regions(run, num_regions=regions, num_outer_steps=outer_steps, seed=seed))
    outcomes += (with_members(run, method, seconds=store.seconds, seed=seed) for method in WITH_MEMBERS)
    paths = []
    if picture is not None:
        from diloco.report.figures.drawing import save
        from diloco.report.figures.simulator import draw_fleet

        paths = save(draw_fleet(run, glances), picture, "fleet")
    if json:
        print(fleet_json(outcomes))
    else:
        show([fleet_table(outcomes)])
        _print_paths(paths)


_COMMANDS = {
    "bandwidth": _bandwidth,
    "utilization": _utilization,
    "step-seconds": _step_seconds,
    "published": _published,
    "timeline": _timeline,
    "pictures": _pictures,
    "wall-clock": _wall_clock,
    "fleet": _fleet,
}
