"""`diloco simulate`: flags in, one answer out, without torch."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from numpy.typing import ArrayLike, NDArray

from diloco.errors import UserError
from diloco.report.terminal.simulation import (
    bandwidth_json,
    print_bandwidth,
    print_published,
    print_wall_clock,
    utilization_json,
    wall_clock_json,
    wide_console,
)
from diloco.simulator.bandwidth import GBIT_S, needed_gbit_s
from diloco.simulator.methods import Method, MethodSettings
from diloco.simulator.model_size import ModelSize
from diloco.simulator.paper import PaperModel
from diloco.simulator.physical import PhysicalModel
from diloco.simulator.replicas import Stragglers, replicas_of
from diloco.simulator.timeline import Interval, paper_timeline, physical_timeline
from diloco.simulator.wall_clock import NETWORKS, IdealizedRun

Preset = Literal["physical", "paper"]


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """What is simulated."""

    num_params: float
    """N, all parameters."""
    num_layers: int
    """L, transformer blocks."""
    step_seconds: tuple[float, ...]
    """Compute of an inner step; one number, or one a replica."""
    method: str
    """data_parallel, diloco, streaming, streaming_overlapped or streaming_overlapped_fp4."""
    sync_every: int = 100
    """H; nothing to data_parallel."""
    layers_per_fragment: int = 3
    """Of the streaming methods."""
    overlap_steps: int | tuple[int, ...] | None = None
    """τ of the overlapped methods, one number or one a replica; left out, 1."""
    num_steps: int | None = None
    """Of a run that ends when everything has arrived; left out, the steady state."""
    preset: Preset = "physical"
    """physical: replicas on links, as the engine works; paper: the simulator of the paper's table."""
    width: int | None = None
    """D; left out, what 12·L·D² and the embeddings make N of (physical)."""
    vocab_size: int | None = None
    """V; left out, 32,000 (physical)."""
    num_replicas: int | None = None
    """M; left out, 2, or as many as there are numbers (physical)."""
    latency_seconds: tuple[float, ...] | None = None
    """One way; one number, or one a replica; left out, 0 (physical)."""
    wire: str | None = None
    """Codec; left out, FP32 or, for fp4, E3M0 (physical)."""
    combine: str | None = None
    """gather, reduce_scatter, or reduce_scatter:CODEC; left out, gather (physical)."""
    untied_embeddings: bool = False
    """The head has a matrix of its own (physical)."""
    step_variation: float = 0.0
    """Standard deviation of a step's compute time, as a part of it (physical)."""
    stall_probability: float = 0.0
    """How often a step takes longer by --stall-seconds (physical)."""
    stall_seconds: float = 0.0
    """By how much (physical)."""
    seed: int | None = None
    """What these are drawn from; left out, 0 (physical)."""

    def compute_utilization(
        self, gbit_s: ArrayLike, links: tuple[float | None, ...] = (None,)
    ) -> NDArray[np.float64]:
        """At each of several bandwidths, which those links have that have none of their own.

        Raises:
            UserError: if the fields contradict each other, or nothing would be sent.
        """
        self._check()
        if self.preset == "paper":
            return self.paper_model().compute_utilization(gbit_s, num_steps=self.num_steps)
        return self._physical_model(links).compute_utilization(
            gbit_s, num_steps=self.num_steps, seed=self.seed or 0
        )

    @property
    def settings(self) -> MethodSettings:
        """What the method's name and numbers stand for."""
        return _settings(self.method, self.sync_every, self.layers_per_fragment, self.overlap_steps)

    def paper_model(self) -> PaperModel:
        """Of the preset paper."""
        defaults = {field.name: field.default for field in fields(self)}
        given = {name: getattr(self, name) for name in _OF_MACHINES if getattr(self, name) != defaults[name]}
        return _paper_model(self.settings, self.num_params, self.num_layers, self.step_seconds, given)

    def _physical_model(self, links: tuple[float | None, ...]) -> PhysicalModel:
        size = ModelSize(
            num_params=self.num_params,
            num_layers=self.num_layers,
            width=self.width,
            vocab_size=32_000 if self.vocab_size is None else self.vocab_size,
            tied_embeddings=not self.untied_embeddings,
        )
        latencies = (0.0,) if self.latency_seconds is None else self.latency_seconds
        stragglers = Stragglers(
            variation=self.step_variation,
            stall_probability=self.stall_probability,
            stall_seconds=self.stall_seconds,
        )
        if stragglers == Stragglers() and self.seed is not None:
            raise UserError(
                f"seed={self.seed}, but nothing is drawn: leave it out, or pass --step-variation or "
                "--stall-probability"
            )
        return PhysicalModel(
            settings=self.settings,
            size=size,
            replicas=replicas_of(self.num_replicas, self.step_seconds, latencies, links, self.overlap_steps),
            wire=self.wire,
            combine="gather" if self.combine is None else self.combine,
            stragglers=None if stragglers == Stragglers() else stragglers,
        )

    def _check(self) -> None:
        for name, most in (("sync_every", 100_000), ("num_layers", 10_000), ("num_steps", 1_000_000)):
            if (getattr(self, name) or 0) > most:
                raise UserError(f"{name} must be at most {most:,} in a simulation, not {getattr(self, name):,}")
        if (self.seed or 0) < 0:
            raise UserError(f"seed must be at least 0, not {self.seed}")
        syncs = self.settings.method != "data_parallel"
        if self.num_steps is not None and syncs and 1 <= self.num_steps < self.sync_every:
            raise UserError(
                f"num_steps={self.num_steps}, but replicas sync every {self.sync_every} steps: nothing would be "
                "sent; pass a smaller --sync-every, or more steps"
            )


_OF_MACHINES = (
    "width",
    "vocab_size",
    "num_replicas",
    "latency_seconds",
    "wire",
    "combine",
    "untied_embeddings",
    "step_variation",
    "stall_probability",
    "stall_seconds",
    "seed",
)
"""What a run has on machines and links alone."""


def bandwidth(
    run: Annotated[SimulatedRun, tyro.conf.arg(name="")],
    targets: str = "0.5,0.8,0.9,0.95,0.99",
    json: bool = False,
) -> None:
    """The bandwidth that a compute utilization needs, of 50 from 0.1, which may be too much, to 1000 Gbit/s.

    Args:
        run: What is simulated.
        targets: Compute utilizations, separated by commas.
        json: Print JSON.
    """
    wanted = [target.strip() for target in targets.split(",")]
    found = run.compute_utilization(GBIT_S)
    needed = {target: needed_gbit_s(found, _number(target)) for target in wanted}
    if json:
        print(bandwidth_json(needed))
    else:
        print_bandwidth(needed, wide_console())
    _tell_period(run)


def utilization(
    run: Annotated[SimulatedRun, tyro.conf.arg(name="")], link_gbit_s: tuple[float, ...], json: bool = False
) -> None:
    """The compute utilization that links give.

    Args:
        run: What is simulated.
        link_gbit_s: Bandwidth of a replica's link, each way; one number, or one a replica (physical).
        json: Print JSON.
    """
    if run.preset == "paper" and len(link_gbit_s) != 1:
        raise UserError(f"link_gbit_s={link_gbit_s}: the preset paper has one network, and takes one number")
    (found,) = run.compute_utilization(link_gbit_s[:1], links=link_gbit_s)
    print(utilization_json(float(found)) if json else f"compute utilization {found:.2%}")
    _tell_period(run)


def _tell_period(run: SimulatedRun) -> None:
    """What the preset paper made of H."""
    if run.preset == "paper" and run.settings.streams:
        schedule = run.paper_model().schedule
        if schedule.sync_every != run.sync_every:
            print(
                f"diloco: the preset paper took H = {schedule.sync_every}, a multiple of its "
                f"{schedule.num_fragments} fragments",
                file=sys.stderr,
            )


def _settings(
    method: str, sync_every: int, layers_per_fragment: int, overlap_steps: int | tuple[int, ...] | None
) -> MethodSettings:
    known: Method = method  # pyright: ignore[reportAssignmentType] - refused in there, with the names of all
    return MethodSettings(
        method=known,
        sync_every=sync_every,
        layers_per_fragment=layers_per_fragment,
        overlap_steps=overlap_steps,
    )


def _paper_model(
    settings: MethodSettings,
    num_params: float,
    num_layers: int,
    step_seconds: tuple[float, ...],
    given: dict[str, object],
) -> PaperModel:
    for name, value in given.items():
        if value is not None:
            raise UserError(f"{name}={value} means nothing to the preset paper: leave it out, or take physical")
    if len(step_seconds) != 1:
        raise UserError(f"step_seconds={step_seconds}: the preset paper has one replica, and takes one number")
    return PaperModel(
        settings=settings, num_params=num_params, num_layers=num_layers, step_seconds=step_seconds[0]
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{text!r} is no number: --targets takes some like 0.5,0.9") from None


def published() -> None:
    """What the paper prints of bandwidth and wall-clock, cell by cell beside the preset paper."""
    print_published(wide_console())


def timeline(
    output: Path = Path("pictures"),
    method: str = "streaming_overlapped",
    num_layers: int = 6,
    num_params: float = 1e9,
    step_seconds: tuple[float, ...] = (0.1,),
    num_replicas: int | None = None,
    link_gbit_s: float = 80.0,
    sync_every: int = 6,
    layers_per_fragment: int = 3,
    overlap_steps: int | tuple[int, ...] | None = None,
    num_steps: int = 14,
    preset: Preset = "physical",
) -> None:
    """Draw what replicas and links do in the first steps: strided fragments, and sequential ones.

    Args:
        output: Directory for timeline.svg and timeline.png.
        method: As in `diloco simulate bandwidth`.
        num_layers: L.
        num_params: N.
        step_seconds: Compute of a step; one number, or one a replica.
        num_replicas: M; left out, 2 (physical).
        link_gbit_s: Bandwidth of every link.
        sync_every: H.
        layers_per_fragment: Of the streaming methods.
        overlap_steps: τ.
        num_steps: How many to draw.
        preset: As in `diloco simulate bandwidth`.
    """
    from diloco.report.figures.drawing import save
    from diloco.report.figures.simulator import draw_timelines

    settings = _settings(method, sync_every, layers_per_fragment, overlap_steps)
    panels: dict[str, list[Interval]] = {}
    for fragments in ("strided", "sequential") if settings.streams else ("strided",):
        chosen = replace(settings, fragments=fragments)
        title = f"{method}, {fragments} fragments" if settings.streams else method
        if preset == "paper":
            model = _paper_model(chosen, num_params, num_layers, step_seconds, {"num_replicas": num_replicas})
            panels[title] = paper_timeline(model, gbit_s=link_gbit_s, num_steps=num_steps)
        else:
            size = ModelSize(num_params=num_params, num_layers=num_layers)
            replicas = replicas_of(num_replicas, step_seconds, (0.0,), (None,), overlap_steps)
            machines = PhysicalModel(settings=chosen, size=size, replicas=replicas)
            panels[title] = physical_timeline(machines, gbit_s=link_gbit_s, num_steps=num_steps)
    _tell(save(draw_timelines(panels), output, "timeline"))


def curves(figures: tuple[str, ...] = (), output: Path = Path("pictures")) -> None:
    """Draw the papers' figures of compute utilization over bandwidth, and of loss over wall-clock.

    Args:
        figures: Of methods, large_models, sync_every, overlap_steps, layers_per_fragment, diloco_sync_every,
            wall_clock; left out, all.
        output: Directory for NAME.svg and NAME.png.
    """
    from diloco.report.figures.simulator import FIGURES, draw_curves

    _tell(draw_curves(figures or FIGURES, output))


def _tell(paths: Sequence[Path]) -> None:
    for path in paths:
        print(path)


def wall_clock(
    num_params: float,
    num_tokens: float,
    batch_tokens: float,
    num_chips: int,
    num_replicas: int = 0,
    sync_every: int = 30,
    overlap_steps: int = 0,
    inside: str = "high",
    between: str = "low",
    flops_per_chip: float = 300e12,
    bits_per_param: float = 16,
    json: bool = False,
) -> None:
    """Idealized time of a whole run on two levels of network (arXiv 2503.09799, appendix A).

    Args:
        num_params: N.
        num_tokens: D, of the whole run.
        batch_tokens: Tokens of a step over all chips.
        num_chips: R.
        num_replicas: M; 0 is Data-Parallel.
        sync_every: H.
        overlap_steps: τ, for which the exchange of outer gradients is hidden.
        inside: Network within a replica: high, medium or low (400, 100, 10 Gbit/s).
        between: Network between replicas, and of Data-Parallel.
        flops_per_chip: Q, a second.
        bits_per_param: What a parameter or its gradient takes on the network.
        json: Print JSON.
    """
    for name, network in (("inside", inside), ("between", between)):
        if network not in NETWORKS:
            raise UserError(f"{name}={network!r} is not a network: choose one of {', '.join(NETWORKS)}")
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
        bits_per_param=bits_per_param,
    )
    if json:
        print(wall_clock_json(run))
    else:
        print_wall_clock(run, wide_console())


COMMANDS = {
    "bandwidth": bandwidth,
    "utilization": utilization,
    "published": published,
    "timeline": timeline,
    "curves": curves,
    "wall-clock": wall_clock,
}
