"""`diloco plan`: a task and its links in, settings out; torch is loaded only to measure."""

import math
import os
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from diloco.cli._command import call, changes, flags, spelled
from diloco.errors import UserError
from diloco.report.terminal.tables import plan_json, plan_parts, remedy_sentence, show, store_sentence
from diloco.simulator.description import ModelSize, Replica, replicas_of
from diloco.simulator.planner import MIN_STEPS, Plan, Task, feasible, remedy

if TYPE_CHECKING:
    from diloco.training.config.config import TrainConfig

HELP = "what run a link allows: diloco plan --num-params N --num-layers L --step-seconds S --link-gbit-s G"
ORDER = 2


def run(arguments: list[str]) -> None:
    """Plan for machines that the command line describes, or that are measured."""
    if any(argument.partition("=")[0] == "--measure" for argument in arguments):
        _plan_measured([argument.removeprefix("--measure=") for argument in arguments if argument != "--measure"])
    else:
        call(_plan_described, arguments, prog="diloco plan")


def _plan_described(
    size: Annotated[ModelSize, tyro.conf.arg(name="")],
    step_seconds: tuple[float, ...],
    link_gbit_s: tuple[float, ...],
    latency_seconds: tuple[float, ...] = (0.0,),
    num_replicas: int | None = None,
    num_tokens: float | None = None,
    batch_tokens: float = 2**21,
    target: float = 0.95,
    store: bool = False,
    json: bool = False,
) -> None:
    """Settings that reach a compute utilization on given links; the first risks the least of the model's quality.

    With --measure RECIPE [--field value …] in the place of sizes and speeds, the recipe's step and the link
    between its replicas are timed first, here or, under torchrun, on several machines.

    Args:
        size: The model.
        step_seconds: Compute time of an inner step; one number, or one per replica.
        link_gbit_s: Bandwidth of a replica's link, each way, in Gbit/s; one number, or one per replica.
        latency_seconds: Latency of a replica's link, one way; one number, or one per replica.
        num_replicas: M; left out, 2, or as many as the longest of the three lists above.
        num_tokens: Tokens of the whole run; left out, 20·N.
        batch_tokens: Tokens of a step over all replicas.
        target: Compute utilization to reach, between 0 and 1.
        store: Say, too, what a day costs if the replicas meet in a bucket; with --json that is always said.
        json: Print JSON.
    """
    replicas = replicas_of(num_replicas, step_seconds, latency_seconds, link_gbit_s)
    tokens = 20 * size.num_params if num_tokens is None else num_tokens
    for name, value in (("num_tokens", tokens), ("batch_tokens", batch_tokens)):
        if not 0 < value < math.inf:
            raise UserError(f"{name} must be above 0 and finite, not {value}", name)
    if math.isinf(tokens / batch_tokens):
        raise UserError(
            f"batch_tokens={batch_tokens} is too small for num_tokens={tokens:g}", "batch_tokens", "num_tokens"
        )
    num_steps = round(tokens / batch_tokens)
    _check_length(num_steps, num_tokens=tokens, batch_tokens=batch_tokens)
    task = Task(size=size, replicas=replicas, num_steps=num_steps, target=target)
    _answer(task, command="diloco train RECIPE", json=json)
    if store and not json and (plans := feasible(task)):
        show([store_sentence(plans[0])])


def _check_length(num_steps: int, **settings: float) -> None:
    """Refuse a run that is too short to plan, by the settings that decide its length."""
    if num_steps < MIN_STEPS:
        names = ", ".join(f"{name}={value:.12g}" for name, value in settings.items())
        raise UserError(f"{names} make a run of {num_steps} steps: a plan needs at least {MIN_STEPS}", *settings)


def _plan_measured(arguments: list[str]) -> None:
    """Measure a recipe's replicas, all on this machine or each under torchrun, and plan for them."""
    from diloco.cli._recipe import parsed_recipe
    from diloco.training.config.config import TrainConfig
    from diloco.training.processes import prepared

    @dataclass(frozen=True, kw_only=True)
    class Command:
        config: Annotated[TrainConfig, tyro.conf.arg(name="")]
        target: float = 0.95
        """Compute utilization to reach, between 0 and 1."""
        json: bool = False
        """Print JSON."""

    with spelled(Command):
        command = parsed_recipe(Command, arguments, prog="diloco plan --measure")
        with prepared():
            _measure(command.config, target=command.target, json=command.json)


def _measure(asked: "TrainConfig", *, target: float, json: bool) -> None:
    from diloco.training.config.config import fields_with, get
    from diloco.training.measure import measurable
    from diloco.training.processes import launch, slow_imports, under_a_launcher

    changed = changes(asked)
    for name in fields_with(type(asked), "planned").keys() & changed.keys():
        value = get(asked, name)
        raise UserError(f"{name}={value}: the plan chooses it, for strided fragments; leave it out", name)
    lengths = {name: get(asked, name) for name in ("num_tokens", "global_batch", "sequence_length")}
    _check_length(asked.num_steps, **lengths)
    config = measurable(asked)
    # Refuse now what would be refused after measuring.
    _task_of(config, (Replica(step_seconds=1.0, gbit_s=1.0),) * config.num_replicas, target=target)
    # Every plan names the number of replicas itself.
    kept = (words for name, words in changed.items() if name != "num_replicas")
    train = " ".join(["diloco train", config.recipe, *map(shlex.join, kept)])
    if under_a_launcher():
        _measure_and_plan(config, target, train, json)
    else:
        sizes = (config.num_replicas, config.processes_per_replica)
        launch(_measure_and_plan, *sizes, config, target, train, json, imports=slow_imports(config))


def _measure_and_plan(config: "TrainConfig", target: float, train: str, json: bool) -> None:
    """Measure as one of the replicas; the first then prints the plan."""
    from diloco.training.measure import measure_machines

    machines = measure_machines(config)
    if int(os.environ["RANK"]) == 0:
        numbers = zip(machines.step_seconds, machines.link_gbit_s, machines.latency_seconds, strict=True)
        replicas = tuple(Replica(step_seconds=s, gbit_s=g, latency_seconds=delay) for s, g, delay in numbers)
        if not json:
            _print_machines(replicas)
        _answer(_task_of(config, replicas, target=target), command=train, json=json)


def _print_machines(replicas: tuple[Replica, ...]) -> None:
    for index, replica in enumerate(replicas):
        print(
            f"replica {index}: {replica.step_seconds:.4g} s a step, {replica.gbit_s:.3g} Gbit/s, "
            f"latency {1000 * replica.latency_seconds:.3g} ms"
        )


def _task_of(config: "TrainConfig", replicas: tuple[Replica, ...], *, target: float) -> Task:
    """The task of training a config's model on these replicas."""
    model = config.model
    size = ModelSize(
        num_params=model.num_matrix_params,
        num_layers=model.num_layers,
        width=model.width,
        vocab_size=model.vocab_size,
    )
    return Task(size=size, replicas=replicas, num_steps=config.num_steps, target=target)


def _answer(task: Task, *, command: str, json: bool) -> None:
    """Print the plans for a task, or what would allow one; `command` is the words before a plan's flags."""
    plans = feasible(task)
    help_ = None if plans else remedy(task)
    if json:
        print(plan_json(task, plans, help_, command=command, flags=_flags))
    elif help_ is None:
        show(plan_parts(task, plans, command=command, flags=_flags))
    else:
        show([remedy_sentence(task, help_)])


def _flags(plan: Plan) -> str:
    """The flags of `diloco train` that follow a plan."""
    return shlex.join(word for words in flags(plan.train_settings).values() for word in words)
