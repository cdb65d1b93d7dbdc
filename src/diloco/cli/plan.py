"""`diloco plan`: a task and its links in, settings out; torch only where something is measured."""

import math
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from diloco.errors import UserError
from diloco.report.terminal.plan import plan_json, print_plans, print_remedy
from diloco.report.terminal.simulation import wide_console
from diloco.simulator.model_size import ModelSize
from diloco.simulator.planner import Task, feasible, remedy
from diloco.simulator.replicas import Replica, replicas_of

if TYPE_CHECKING:
    from diloco.measure.measure import Machines
    from diloco.training.config import TrainConfig


def plan(arguments: list[str]) -> None:
    """For machines that are described, or measured."""
    if any(argument.partition("=")[0] == "--measure" for argument in arguments):
        _plan_measured([argument.removeprefix("--measure=") for argument in arguments if argument != "--measure"])
    else:
        tyro.cli(_plan_given, prog="diloco plan", args=arguments)


def _plan_given(
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
    replicas = replicas_of(num_replicas, step_seconds, latency_seconds, link_gbit_s)
    tokens = 20 * num_params if num_tokens is None else num_tokens
    for name, value in (("num_tokens", tokens), ("batch_tokens", batch_tokens)):
        if not 0 < value < math.inf:
            raise UserError(f"{name} must be above 0 and finite, not {value}")
    task = Task(size=size, replicas=replicas, num_steps=round(tokens / batch_tokens), target=target)
    _answer(task, command="diloco train RECIPE", json=json)


def _plan_measured(arguments: list[str]) -> None:
    from diloco.cli.recipe import parsed
    from diloco.measure.measure import measurable
    from diloco.training.config import TrainConfig
    from diloco.training.launcher import launch, under_a_launcher
    from diloco.training.recipes import flags

    @dataclass(frozen=True, kw_only=True)
    class Command:
        config: Annotated[TrainConfig, tyro.conf.arg(name="")]
        target: float = 0.95
        """Compute utilization to be reached."""
        json: bool = False
        """Print JSON."""

    asked = parsed(lambda config: Command(config=config), arguments, prog="diloco plan --measure")
    if asked.config.method == "data_parallel":
        raise UserError("leave out --method data_parallel: what is planned is Streaming DiLoCo")
    for name, words in flags(asked.config).items():
        if name in _CHOSEN_BY_A_PLAN:
            raise UserError(f"leave out {shlex.join(words)}: the plan chooses it, for strided fragments")
    config = measurable(asked.config)
    # What would be refused after measuring is refused now.
    _task_of(config, (Replica(step_seconds=1.0, gbit_s=1.0),) * config.num_replicas, target=asked.target)
    train = " ".join(["diloco train", config.recipe, *_flags_besides_a_plans(asked.config)])
    if under_a_launcher():
        _measure_and_plan(config, asked.target, train, asked.json)
    else:
        told = (config, asked.target, train, asked.json)
        launch(_measure_and_plan, config.num_replicas, config.num_shards, *told)


def _flags_besides_a_plans(asked: "TrainConfig") -> Iterator[str]:
    """What else the user changed in the recipe."""
    from diloco.training.recipes import flags

    for name, words in flags(asked).items():
        if name not in ("num_replicas", "method"):  # which stand in every plan
            yield shlex.join(words)


_CHOSEN_BY_A_PLAN = {
    f"diloco.{name}"
    for name in ("sync_every", "overlap_steps", "layers_per_fragment", "wire", "combine", "fragments", "offsets")
}


def _measure_and_plan(config: "TrainConfig", target: float, train: str, json: bool) -> None:
    """One replica of several that measure together."""
    from diloco.measure.measure import measure_machines

    machines = measure_machines(config)
    if int(os.environ["RANK"]) == 0:
        _tell_plan(config, machines, target=target, command=train, json=json)


def _tell_plan(config: "TrainConfig", machines: "Machines", *, target: float, command: str, json: bool) -> None:
    """Show what was measured, and what to do with it."""
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
    _answer(_task_of(config, replicas, target=target), command=command, json=json)


def _task_of(config: "TrainConfig", replicas: tuple[Replica, ...], *, target: float) -> Task:
    """What a run's config asks of its replicas' machines."""
    model = config.model
    size = ModelSize(
        num_params=model.num_matrix_params,
        num_layers=model.num_layers,
        width=model.width,
        vocab_size=model.vocab_size,
    )
    return Task(size=size, replicas=replicas, num_steps=config.num_steps, target=target)


def _answer(task: Task, *, command: str, json: bool) -> None:
    plans = feasible(task)
    help_ = None if plans else remedy(task)
    if json:
        print(plan_json(task, plans, help_, command=command))
    elif help_ is None:
        print_plans(task, plans, wide_console(), command=command)
    else:
        print_remedy(task, help_, wide_console())
