"""`diloco plan`: a task and its links in, settings out; torch is loaded only to measure."""

import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from diloco.cli._command import call, changes, flag_words, flags_in_errors
from diloco.errors import UserError
from diloco.fleets.planner import FleetPlan, FleetTask, answer
from diloco.fleets.planner import explain as binding
from diloco.rendezvous.prices import read_prices
from diloco.report.terminal.fleets import fleet_plan_json, fleet_plan_parts
from diloco.report.terminal.tables import link_plan_json, link_plan_parts, show, store_sentence
from diloco.scaling.prediction import predict
from diloco.simulator.description import ModelSize, Replica, replicas_of
from diloco.simulator.fleet import read_fleet
from diloco.simulator.link_planner import MIN_STEPS, LinkPlan, LinkTask, feasible
from diloco.simulator.wall_clock import step_seconds as seconds_of_step
from diloco.training.config.recipes import RECIPES
from diloco.units import Amount, Amounts, Rates, amount, rate

if TYPE_CHECKING:
    from diloco.training.config.config import TrainConfig

HELP = "what run a link allows: diloco plan --num-params 124M --flops-per-second 30T --link 20Mbit"
ORDER = 2
_LAWS = "arXiv 2503.09799"
_LEAST_FLOPS = 1e9


def run(arguments: list[str]) -> None:
    """Plan for machines that the command line describes, or that are measured."""
    if not arguments:
        arguments = ["--measure", "laptop", "--link", _asked_link()]
    if arguments[0].casefold() in RECIPES:
        raise UserError(
            f"a recipe is measured: type diloco plan --measure {arguments[0].casefold()} --link 20Mbit"
        )
    words = [part for one in arguments for part in one.split("=", one.startswith("--measure="))]
    if any(word.partition("=")[0] == "--fleet" for word in arguments):
        call(_plan_fleet, arguments, prog="diloco plan")
    elif "--measure" in words:
        at = words.index("--measure")
        _plan_measured([*words[at + 1 :], *words[:at]])  # the recipe first
    else:
        call(_plan_described, arguments, prog="diloco plan")


def _asked_link() -> str:
    """The link's rate, which is asked for in a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(
            "diloco plan needs a model, a speed and a link: diloco plan --num-params 124M --flops-per-second 30T "
            "--link 20Mbit, or, to time this machine, diloco plan --measure laptop --link 20Mbit"
        )
    print("This times a step of the recipe laptop on this machine (of another: diloco plan --measure RECIPE).")
    try:
        return input("The slowest way of a replica's link, mostly its upload, such as 20Mbit: ").strip()
    except EOFError:
        raise UserError("diloco plan needs the rate of a link, such as 20Mbit") from None


def _plan_described(
    size: Annotated[ModelSize, tyro.conf.arg(name="")],
    link: Rates,
    step_seconds: tuple[float, ...] = (),
    flops_per_second: Amounts = (),
    latency_seconds: tuple[float, ...] = (0.0,),
    num_replicas: int | None = None,
    num_tokens: Amount | None = None,
    batch_tokens: Amount | None = None,
    target: float = 0.95,
    store: bool = False,
    json: bool = False,
) -> None:
    """Settings that reach a compute utilization on given links; the first risks the least of the model's quality.

    With --measure RECIPE [--field value …] in the place of sizes and speeds, the recipe's step and the link
    between its replicas are timed first, here or, under torchrun, on several machines. With --link, the link is as
    given, and one replica has this machine to itself; so it is, with the recipe laptop, where nothing is given.

    With --fleet FLEET.toml [--budget-dollars N] [--deadline-hours N] [--explain] [--picture DIR] [--prices FILE]
    [--json] and none of the flags below, the machines of a fleet are chosen, too, within a budget and a deadline.

    Args:
        size: The model.
        link: Rate of a replica's link, of its slower way, such as 20Mbit or 1Gbit; one, or one per replica.
        step_seconds: Compute time of an inner step; one number, or one per replica.
        flops_per_second: In its place, the floating-point operations a second that a replica reaches in training,
            such as 30T, for steps of 6·N·B/M operations; one number, or one per replica.
        latency_seconds: Latency of a replica's link, one way; one number, or one per replica.
        num_replicas: M; left out, 2, or as many as the longest of the four lists above.
        num_tokens: Tokens of the whole run; left out, 20·N.
        batch_tokens: Tokens of a step over all replicas; left out, those of the law of arXiv 2503.09799.
        target: Compute utilization to reach, between 0 and 1.
        store: Say, too, what a day costs if the replicas meet in a bucket; with --json that is always said.
        json: Print JSON.
    """
    speeds = _speeds(step_seconds, flops_per_second)
    if num_replicas is None:
        num_replicas = max(2, len(speeds), len(latency_seconds), len(link))
    if num_replicas < 2:
        raise UserError(f"num_replicas={num_replicas}, but a link has two ends: take 2 or more", "num_replicas")
    tokens, batch, facts = _budget(size, num_tokens, batch_tokens, num_replicas)
    if flops_per_second:
        seconds = [
            seconds_of_step(
                num_params=size.num_params, batch_tokens=batch / num_replicas, num_chips=1, flops_per_chip=flops
            )
            for flops in flops_per_second
        ]
        how = f"6·N·B/M operations at {' and '.join(map(amount, flops_per_second))} a second"
    else:
        seconds, how = step_seconds, "as given"
    replicas = replicas_of(num_replicas, seconds, latency_seconds, link)
    num_steps = round(tokens / batch)
    _check_length(num_steps, num_tokens=tokens, batch_tokens=batch)
    task = LinkTask(size=size, replicas=replicas, num_steps=num_steps, target=target)
    facts = [*facts, *_machines(replicas, how, "as given")]
    _answer(task, facts, command="diloco train RECIPE", json=json)
    if not json and (plans := feasible(task)):
        show([_recipes_sentence(size.num_params, batch), *([store_sentence(plans[0])] if store else [])])


def _plan_fleet(
    fleet: Path,
    budget_dollars: float = math.inf,
    deadline_hours: float = math.inf,
    explain: bool = False,
    json: bool = False,
    picture: Path | None = None,
    prices: Path | None = None,
) -> None:
    """Machines of a fleet, and settings, within a budget and a deadline; with neither, all that nothing beats.

    With a budget the plan has the least loss that it pays for, within a month where no deadline is given; with a
    deadline alone, the fewest dollars, where a higher loss counts as the compute that would make up for it.

    Args:
        fleet: TOML file with num_params, step_tokens, and for each kind of machine a [[machines]] with name,
            count, step_seconds or flops_per_second, up_mbit_s, down_mbit_s, dollars_per_hour, and others.
        budget_dollars: The most that machines, requests and egress may cost.
        deadline_hours: The longest that the run may take.
        explain: Name the constraints that bind, and the best plan with twice as much of each.
        json: Print JSON.
        picture: Directory to write pareto.svg and pareto.png to: loss over dollars and hours.
        prices: TOML file that takes the place of our list prices, src/diloco/rendezvous/prices.toml.
    """
    task = FleetTask(
        fleet=read_fleet(fleet),
        prices=read_prices(prices),
        budget_dollars=budget_dollars,
        deadline_hours=deadline_hours,
    )
    best = answer(task)
    relaxations = binding(task, best.plan) if explain else None
    if json:
        print(fleet_plan_json(best, relaxations, flags=_words))
    else:
        show(fleet_plan_parts(best, relaxations, command=_train, flags=_words))
        if best.plan is not None:
            show([_recipes_sentence(task.fleet.num_params)])
    if picture is not None and best.pareto:
        from diloco.report.figures.fleets import draw_pareto

        for path in draw_pareto(best.pareto, picture):
            print(path, file=sys.stderr if json else sys.stdout)


def _train(plan: FleetPlan) -> str:
    """The words that start a replica, or a fixed group."""
    return "diloco train RECIPE" + ("" if plan.store is None else " --rendezvous s3://BUCKET/run --name NAME")


def _recipes_sentence(num_params: float, batch_tokens: float | None = None) -> str:
    """The recipes that RECIPE may stand for in the command, and the batch that it leaves to them."""
    from diloco.cli._recipe import nearest_sizes

    sizes = nearest_sizes(num_params)
    own = f"{' and '.join(sizes)} are the recipes next to {amount(num_params)} parameters; " if sizes else ""
    text = f"RECIPE: {own}any recipe trains a model of transformers with --model.hf NAME."
    if batch_tokens is not None:
        text += f" The plan holds for {batch_tokens:,.0f} tokens per step"
        text += ": set --global-batch where a recipe has others."
    return text


def _speeds(step_seconds: tuple[float, ...], flops_per_second: tuple[float, ...]) -> tuple[float, ...]:
    """The speeds of the replicas, in the way in which they are given."""
    if bool(step_seconds) == bool(flops_per_second):
        raise UserError(
            "give the speed of a replica once: step_seconds, such as 1.5, or flops_per_second, such as 30T; or "
            "time this machine with diloco plan --measure RECIPE --link RATE",
            *("step_seconds", "flops_per_second"),
        )
    for flops in flops_per_second:
        if not 0 < flops < math.inf:
            raise UserError(f"flops_per_second must be above 0 and finite, not {flops}", "flops_per_second")
        if flops < _LEAST_FLOPS:
            meant = f": did you mean {flops:g}T?" if flops < 1000 else ""
            raise UserError(
                f"flops_per_second={flops:g} is less than any computer's 1G{meant}", "flops_per_second"
            )
    return step_seconds or flops_per_second


def _budget(
    size: ModelSize, num_tokens: float | None, batch_tokens: float | None, num_replicas: int
) -> tuple[float, float, list[str]]:
    """Tokens of the run and of a step, and a line for each fact about model and budget."""
    tokens = 20 * size.num_params if num_tokens is None else num_tokens
    batch, how = batch_tokens, "as given"
    if batch is None:
        batch = predict(size.num_params, num_replicas)["batch_tokens"]["power_of_two"]
        how = f"the law of {_LAWS} for M = {num_replicas}, to a power of two"
    for name, value in (("num_tokens", tokens), ("batch_tokens", batch)):
        if not 0 < value < math.inf:
            raise UserError(f"{name} must be above 0 and finite, not {value}", name)
    if math.isinf(tokens / batch):
        raise UserError(
            f"batch_tokens={batch} is too small for num_tokens={tokens:g}", "batch_tokens", "num_tokens"
        )
    per_param = "20 per parameter" if num_tokens is None else "as given"
    return tokens, batch, [*_lines(size, tokens, per_param, batch, how)]


def _lines(size: ModelSize, tokens: float, per_param: str, batch: float, how: str) -> Sequence[str]:
    return (
        f"model   {amount(size.num_params)} parameters, {size.num_layers} layers",
        f"tokens  {amount(tokens)} ({per_param})",
        f"batch   {batch:,.0f} tokens a step over all replicas ({how})",
    )


def _machines(replicas: Sequence[Replica], step: str, link: str) -> list[str]:
    """A line for the steps and one for the links, with how each is known; one for all replicas that are alike."""
    steps = " and ".join(dict.fromkeys(f"{one.step_seconds:.4g} s" for one in replicas))
    links = " and ".join(
        dict.fromkeys(f"{rate(one.gbit_s or 0)}, latency {1000 * one.latency_seconds:.3g} ms" for one in replicas)
    )
    return [f"step    {steps} on each of {len(replicas)} replicas ({step})", f"link    {links} ({link})"]


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
        link: Rates = ()
        """Rate of a replica's link, such as 20Mbit, in the place of the measured one; one, or one per replica."""
        latency_seconds: tuple[float, ...] = (0.0,)
        """With --link, the latency of a replica's link, one way; one number, or one per replica."""
        target: float = 0.95
        """Compute utilization to reach, between 0 and 1."""
        json: bool = False
        """Print JSON."""

    with flags_in_errors(Command):
        command = parsed_recipe(Command, arguments, prog="diloco plan --measure")
        with prepared():
            _measure(
                command.config, command.link, command.latency_seconds, target=command.target, json=command.json
            )


def _measure(
    asked: "TrainConfig",
    link: tuple[float, ...],
    latency_seconds: tuple[float, ...],
    *,
    target: float,
    json: bool,
) -> None:
    """Time the recipe's step, and the link where none is given, and plan with them."""
    from diloco.training.config.config import fields_with, get
    from diloco.training.measure import measurable, measure_alone
    from diloco.training.processes import launch, slow_imports, under_a_launcher

    changed = changes(asked)
    for name in fields_with(type(asked), "planned").keys() & changed.keys():
        value = get(asked, name)
        raise UserError(f"{name}={value}: the plan chooses it, for strided fragments; leave it out", name)
    lengths = {name: get(asked, name) for name in ("num_tokens", "global_batch", "sequence_length")}
    _check_length(asked.num_steps, **lengths)
    config = measurable(asked)
    # Refuse now what would be refused after measuring.
    _task_of(config, replicas_of(config.num_replicas, (1.0,), latency_seconds, link or (1.0,)), target=target)
    # Every plan names the number of replicas itself.
    kept = (words for name, words in changed.items() if name != "num_replicas")
    train = " ".join(["diloco train", config.recipe, *map(shlex.join, kept)])
    if link:
        replicas = replicas_of(config.num_replicas, (measure_alone(config),), latency_seconds, link)
        how = "measured: the recipe's step on this machine, which each replica has to itself"
        _answer_measured(config, replicas, (how, "as given"), target, train, json)
    elif under_a_launcher():
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
        _answer_measured(config, replicas, ("measured", "measured"), target, train, json)


def _answer_measured(
    config: "TrainConfig",
    replicas: tuple[Replica, ...],
    how: tuple[str, str],
    target: float,
    train: str,
    json: bool,
) -> None:
    """Print the answer for a recipe on replicas; `how` their steps and their links are known."""
    task = _task_of(config, replicas, target=target)
    batch = config.global_batch * config.sequence_length
    facts = [
        *_lines(task.size, config.num_tokens, "the recipe's", batch, "the recipe's"),
        *_machines(replicas, *how),
    ]
    _answer(task, facts, command=train, json=json)


def _task_of(config: "TrainConfig", replicas: tuple[Replica, ...], *, target: float) -> LinkTask:
    """The task of training a config's model on these replicas."""
    model = config.model
    size = ModelSize(
        num_params=model.num_matrix_params,
        num_layers=model.num_layers,
        width=model.width,
        vocab_size=model.vocab_size,
    )
    return LinkTask(size=size, replicas=replicas, num_steps=config.num_steps, target=target)


def _answer(task: LinkTask, facts: Sequence[str], *, command: str, json: bool) -> None:
    """Print the plans for a task, or what would allow one; `command` is the words before a plan's flags."""
    if json:
        print(link_plan_json(task, facts, command=command, flags=_flags))
    else:
        show(link_plan_parts(task, facts, command=command, flags=_flags))


def _flags(plan: LinkPlan) -> str:
    """The flags of `diloco train` that follow a plan."""
    return _words(plan.train_settings)


def _words(settings: Mapping[str, Any]) -> str:
    """The flags that give settings their values."""
    return shlex.join(word for words in flag_words(settings).values() for word in words)
