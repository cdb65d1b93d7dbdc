"""`diloco simulate` and `diloco plan`: flags in, one answer out, torch only where something is measured."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from diloco.report.plan import plan_json, print_plans, print_remedy
from diloco.report.simulation import (
    bandwidth_json,
    print_bandwidth,
    print_published,
    print_wall_clock,
    wall_clock_json,
)
from diloco.simulator.bandwidth import GBIT_S, needed_gbit_s
from diloco.simulator.methods import Method, MethodSettings
from diloco.simulator.model_size import ModelSize
from diloco.simulator.paper import PaperModel
from diloco.simulator.physical import PhysicalModel
from diloco.simulator.planner import Task, feasible, remedy
from diloco.simulator.replicas import Replica, Stragglers
from diloco.simulator.timeline import Interval, paper_timeline, physical_timeline
from diloco.simulator.wall_clock import NETWORKS, IdealizedRun

if TYPE_CHECKING:
    from diloco.measure import Machines
    from diloco.training.config import TrainConfig

Preset = Literal["physical", "paper"]


def _console() -> Console:
    """Wide enough for the tables, also where nobody looks on."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def bandwidth(
    num_params: float,
    num_layers: int,
    step_seconds: tuple[float, ...],
    method: str,
    sync_every: int = 100,
    layers_per_fragment: int = 3,
    overlap_steps: int | tuple[int, ...] | None = None,
    num_steps: int | None = None,
    preset: Preset = "physical",
    targets: str = "0.5,0.8,0.9,0.95,0.99",
    width: int | None = None,
    vocab_size: int | None = None,
    num_replicas: int | None = None,
    latency_seconds: tuple[float, ...] | None = None,
    wire: str | None = None,
    combine: str | None = None,
    untied_embeddings: bool = False,
    step_variation: float = 0.0,
    stall_probability: float = 0.0,
    stall_seconds: float = 0.0,
    seed: int = 0,
    json: bool = False,
) -> None:
    """The bandwidth that a compute utilization needs, of 50 from 0.1 to 1000 Gbit/s.

    Args:
        num_params: N, all parameters.
        num_layers: L, transformer blocks.
        step_seconds: Compute of an inner step; one number, or one a replica.
        method: data_parallel, diloco, streaming, streaming_overlapped or streaming_overlapped_fp4.
        sync_every: H; nothing to data_parallel.
        layers_per_fragment: Of the streaming methods.
        overlap_steps: τ of the overlapped methods, one number or one a replica; left out, 1.
        num_steps: Of a run that ends when everything has arrived; left out, the steady state.
        preset: physical: replicas on links, as the engine works; paper: the simulator of the paper's table.
        targets: Compute utilizations, separated by commas.
        width: D; left out, what 12·L·D² and the embeddings make N of (physical).
        vocab_size: V; left out, 32,000 (physical).
        num_replicas: M; left out, 2, or as many as there are numbers (physical).
        latency_seconds: One way; one number, or one a replica; left out, 0 (physical).
        wire: Codec; left out, FP32 or, for fp4, E3M0 (physical).
        combine: gather, reduce_scatter, or reduce_scatter:CODEC; left out, gather (physical).
        untied_embeddings: The head has a matrix of its own (physical).
        step_variation: Standard deviation of a step's compute time, as a part of it (physical).
        stall_probability: How often a step takes longer by --stall-seconds (physical).
        stall_seconds: By how much (physical).
        seed: What these are drawn from (physical).
        json: Print JSON.
    """
    wanted = [target.strip() for target in targets.split(",")]
    for name, value, most in (
        ("sync_every", sync_every, 100_000),
        ("num_layers", num_layers, 10_000),
        ("num_steps", num_steps or 0, 1_000_000),
    ):
        if value > most:
            raise ValueError(f"{name} must be at most {most:,} in a simulation, not {value:,}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, not {seed}")
    settings = _settings(method, sync_every, layers_per_fragment, overlap_steps)
    given = {
        "width": width,
        "vocab_size": vocab_size,
        "num_replicas": num_replicas,
        "latency_seconds": latency_seconds,
        "wire": wire,
        "combine": combine,
        "untied_embeddings": untied_embeddings or None,
        "step_variation": step_variation or None,
        "stall_probability": stall_probability or None,
        "stall_seconds": stall_seconds or None,
        "seed": seed or None,
    }
    paper = None
    if preset == "paper":
        paper = _paper_model(settings, num_params, num_layers, step_seconds, given)
        utilization = paper.compute_utilization(GBIT_S, num_steps=num_steps)
    else:
        stragglers = Stragglers(
            variation=step_variation, stall_probability=stall_probability, stall_seconds=stall_seconds
        )
        model = PhysicalModel(
            settings=settings,
            size=ModelSize(
                num_params=num_params,
                num_layers=num_layers,
                width=width,
                vocab_size=32_000 if vocab_size is None else vocab_size,
                tied_embeddings=not untied_embeddings,
            ),
            replicas=_replicas(
                num_replicas, step_seconds, (0.0,) if latency_seconds is None else latency_seconds, (None,)
            ),
            wire=wire,
            combine="gather" if combine is None else combine,
            stragglers=None if stragglers == Stragglers() else stragglers,
        )
        utilization = model.compute_utilization(GBIT_S, num_steps=num_steps, seed=seed)
    needed = {target: needed_gbit_s(utilization, _number(target)) for target in wanted}
    if json:
        print(bandwidth_json(needed))
    else:
        print_bandwidth(needed, _console())
    if paper is not None and settings.streams and (period := paper.schedule.sync_every) != sync_every:
        fragments = paper.schedule.num_fragments
        print(
            f"diloco: the preset paper took H = {period}, a multiple of its {fragments} fragments", file=sys.stderr
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
            raise ValueError(f"{name}={value} means nothing to the preset paper: leave it out, or take physical")
    if len(step_seconds) != 1:
        raise ValueError(f"step_seconds={step_seconds}: the preset paper has one replica, and takes one number")
    return PaperModel(
        settings=settings, num_params=num_params, num_layers=num_layers, step_seconds=step_seconds[0]
    )


def _replicas(
    num_replicas: int | None,
    step_seconds: Sequence[float],
    latency_seconds: Sequence[float],
    gbit_s: Sequence[float | None],
) -> tuple[Replica, ...]:
    given = {"step_seconds": step_seconds, "latency_seconds": latency_seconds, "link_gbit_s": gbit_s}
    longest = max(map(len, given.values()))
    num_replicas = num_replicas if num_replicas is not None else max(2, longest)
    if num_replicas < 1:
        raise ValueError(f"num_replicas must be at least 1, not {num_replicas}")
    for name, values in given.items():
        if len(values) not in (1, num_replicas):
            raise ValueError(f"{name}={values} must be one number, or one for each of {num_replicas} replicas")
    steps, latencies, links = (
        values if len(values) == num_replicas else list(values) * num_replicas for values in given.values()
    )
    return tuple(
        Replica(step_seconds=step, latency_seconds=latency, gbit_s=link)
        for step, latency, link in zip(steps, latencies, links, strict=True)
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number: --targets takes some like 0.5,0.9") from None


def published() -> None:
    """What the paper prints of bandwidth and wall-clock, cell by cell beside the preset paper."""
    print_published(_console())


def timeline(
    output: Path = Path("pictures"),
    method: str = "streaming_overlapped",
    num_layers: int = 6,
    num_params: float = 1e9,
    step_seconds: tuple[float, ...] = (0.1,),
    num_replicas: int | None = None,
    gbit_s: float = 80.0,
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
        gbit_s: Bandwidth of every link.
        sync_every: H.
        layers_per_fragment: Of the streaming methods.
        overlap_steps: τ.
        num_steps: How many to draw.
        preset: As in `diloco simulate bandwidth`.
    """
    from diloco.report.pictures import draw_timelines, save

    settings = _settings(method, sync_every, layers_per_fragment, overlap_steps)
    panels: dict[str, list[Interval]] = {}
    for fragments in ("strided", "sequential") if settings.streams else ("strided",):
        chosen = replace(settings, fragments=fragments)
        title = f"{method}, {fragments} fragments" if settings.streams else method
        if preset == "paper":
            model = _paper_model(chosen, num_params, num_layers, step_seconds, {"num_replicas": num_replicas})
            panels[title] = paper_timeline(model, gbit_s=gbit_s, num_steps=num_steps)
        else:
            size = ModelSize(num_params=num_params, num_layers=num_layers)
            replicas = _replicas(num_replicas, step_seconds, (0.0,), (None,))
            machines = PhysicalModel(settings=chosen, size=size, replicas=replicas)
            panels[title] = physical_timeline(machines, gbit_s=gbit_s, num_steps=num_steps)
    _tell(save(draw_timelines(panels), output, "timeline"))


def curves(figures: tuple[str, ...] = (), output: Path = Path("pictures")) -> None:
    """Draw the papers' figures of compute utilization over bandwidth, and of loss over wall-clock.

    Args:
        figures: Of methods, large_models, sync_every, overlap_steps, layers_per_fragment, diloco_sync_every,
            wall_clock; left out, all.
        output: Directory for NAME.svg and NAME.png.
    """
    from diloco.report.curves import FIGURES, draw_curves

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
            raise ValueError(f"{name}={network!r} is not a network: choose one of {', '.join(NETWORKS)}")
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
        print_wall_clock(run, _console())


COMMANDS = {
    "bandwidth": bandwidth,
    "published": published,
    "timeline": timeline,
    "curves": curves,
    "wall-clock": wall_clock,
}


def plan(
    num_params: float,
    num_layers: int,
    step_seconds: tuple[float, ...],
    link_gbit_s: tuple[float, ...],
    latency_seconds: tuple[float, ...] = (0.0,),
    num_replicas: int | None = None,
    width: int | None = None,
    vocab_size: int = 32_000,
    untied_embeddings: bool = False,
    num_tokens: float | None = None,
    batch_tokens: float = 2**21,
    target: float = 0.95,
    json: bool = False,
) -> None:
    """Which settings reach a compute utilization on given links; the first risks the least of the model's quality.

    With --measure RECIPE [--field value …] in the place of sizes and speeds, the recipe's step and the link
    between its replicas are timed first, here or, under torchrun, on several machines.

    Args:
        num_params: N, all parameters.
        num_layers: L, transformer blocks.
        step_seconds: Compute of an inner step; one number, or one a replica.
        link_gbit_s: Bandwidth of a replica's link, each way; one number, or one a replica.
        latency_seconds: One way; one number, or one a replica.
        num_replicas: M; left out, 2, or as many as there are numbers.
        width: D; left out, what 12·L·D² and the embeddings make N of.
        vocab_size: V.
        untied_embeddings: The head has a matrix of its own.
        num_tokens: Of the whole run; left out, 20·N.
        batch_tokens: Tokens of a step over all replicas.
        target: Compute utilization to be reached.
        json: Print JSON.
    """
    size = ModelSize(
        num_params=num_params,
        num_layers=num_layers,
        width=width,
        vocab_size=vocab_size,
        tied_embeddings=not untied_embeddings,
    )
    replicas = _replicas(num_replicas, step_seconds, latency_seconds, link_gbit_s)
    tokens = 20 * num_params if num_tokens is None else num_tokens
    for name, value in (("num_tokens", tokens), ("batch_tokens", batch_tokens)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, not {value}")
    task = Task(size=size, replicas=replicas, num_steps=round(tokens / batch_tokens), target=target)
    _answer(task, command="diloco train RECIPE", json=json)


def plan_measured(config: "TrainConfig", machines: "Machines", *, target: float, command: str, json: bool) -> None:
    """The same for a run's config, on machines that were measured."""
    replicas = tuple(
        Replica(step_seconds=step, gbit_s=gbit_s, latency_seconds=latency)
        for step, gbit_s, latency in zip(
            machines.step_seconds, machines.link_gbit_s, machines.latency_seconds, strict=True
        )
    )
    if not json:
        for index, replica in enumerate(replicas):
            print(
                f"replica {index}: {replica.step_seconds:.4g} s a step, {replica.gbit_s:.3g} Gbit/s, "
                f"latency {1000 * replica.latency_seconds:.3g} ms"
            )
    _answer(task_of(config, replicas, target=target), command=command, json=json)


def task_of(config: "TrainConfig", replicas: tuple[Replica, ...], *, target: float) -> Task:
    """What a run's config asks of its replicas' machines."""
    from diloco.models.ladder import num_matrix_params

    model = config.model
    size = ModelSize(
        num_params=num_matrix_params(model),
        num_layers=model.num_layers,
        width=model.width,
        vocab_size=model.vocab_size,
    )
    return Task(size=size, replicas=replicas, num_steps=config.num_steps, target=target)


def _answer(task: Task, *, command: str, json: bool) -> None:
    plans = feasible(task)
    help_ = None if plans else remedy(task)
    if json:
        print(plan_json(task, plans, help_))
    elif help_ is None:
        print_plans(task, plans, _console(), command=command)
    else:
        print_remedy(task, help_, _console())
