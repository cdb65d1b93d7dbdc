"""The `diloco` command: thin, and quick to start; each part is imported when it is used."""

import argparse
import os
import select
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

from diloco.errors import UserError
from diloco.version import __version__

if TYPE_CHECKING:
    from diloco.training.config import TrainConfig

_COMMANDS = {
    "train": "train a language model: diloco train RECIPE [--field value …] [--resume RUN]",
    "plan": "what run a link allows: diloco plan --num-params N --num-layers L --step-seconds S --link-gbit-s G",
    "simulate": "links and runs: diloco simulate bandwidth|utilization|timeline|curves|wall-clock|published",
    "eval": "held-out loss and zero-shot accuracy of a run: diloco eval RUN [--tasks …] [--data FILES]",
    "export": "outer parameters for other programs: diloco export RUN --to safetensors|hf --output DIRECTORY",
    "experiment": "the papers' experiments: diloco experiment NAME|all [--tier small|paper] [--corpus FILES]",
    "sweep": "runs over learning rate, batch, replicas: diloco sweep RECIPE --axis NAME=VALUES … [--plan]",
    "scaling": "loss and hyperparameters to expect: diloco scaling predict|fit|pictures [--data FILE]",
    "report": "one HTML page about runs and experiments: diloco report RUN_OR_CSV … [--output FILE]",
    "bench": "measure what parts of it take here: diloco bench wire [--json]",
    "data": "prepare text for training: diloco data prepare --output DIRECTORY [--field value …]",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line; exits with 0, with 1 when a run fails, with 2 for a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="diloco",
        description="Train one language model on computers joined by slow links (Streaming DiLoCo).",
        epilog="Try: diloco train laptop. And diloco COMMAND --help tells more.",
    )
    parser.add_argument("--version", action="version", version=f"diloco {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in _COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0].startswith("-") and given[0] not in ("-h", "--help", "--version"):
        parser.error(f"unknown option {given[0]}: COMMAND comes first")
    command = parser.parse_args(given[:1]).command
    run = {
        "train": _train,
        "plan": _plan,
        "simulate": _simulate,
        "eval": _eval,
        "export": _export,
        "experiment": _experiment,
        "report": _report,
        "scaling": _scaling,
        "sweep": _sweep,
        "bench": _bench,
        "data": _data,
    }[command]
    try:
        try:
            run(given[1:])
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def _nobody_reads() -> bool:
    """Whether standard output is a pipe that was closed, as by `| head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _train(arguments: list[str]) -> None:
    import tyro
    from rich.console import Console

    from diloco.cli.recipe import parsed
    from diloco.data.index import read_index
    from diloco.report.terminal.preparation import preparation_progress
    from diloco.training.config import TrainConfig
    from diloco.training.launcher import launch, under_a_launcher
    from diloco.training.prepare import prepare_run
    from diloco.training.recipes import RECIPES
    from diloco.training.runs import CONFIG_FILE, resumable

    @dataclass(frozen=True, kw_only=True)
    class Command:
        config: Annotated[TrainConfig, tyro.conf.arg(name="")]
        resume: Path | None = None
        """Go on with this run, a directory, from the newest step that every replica holds."""

    with _explained():
        configs: dict[str, TrainConfig] = {}
        if (run := _resumed(arguments)) is not None:  # a resume begins with what the run was told
            saved = resumable(run)
            configs = {name: saved for name in RECIPES if saved.recipe in ("", name)}
            if saved.recipe in RECIPES and arguments[0] not in RECIPES:
                arguments = [saved.recipe, *arguments]
        command = parsed(lambda config: Command(config=config), arguments, prog="diloco train", configs=configs)
        with preparation_progress(Console(stderr=True)) as progress:
            config = prepare_run(command.config, resume=command.resume, progress=progress)
    with _explained(
        hint=f"; go on with: diloco train {config.recipe} --resume {config.directory}",
        where=config.directory / CONFIG_FILE,
    ):
        if under_a_launcher():
            _replica(config, command.resume is not None)
            return
        if config.data.prepared is not None:
            print(f"data  {config.data.prepared}, digest {read_index(config.data.prepared).digest[:16]}")
        print(f"run   {config.directory}", flush=True)
        launch(_replica, config.num_replicas, config.num_shards, config, command.resume is not None)


def _resumed(arguments: Sequence[str]) -> Path | None:
    """The run that a command line resumes."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--resume", type=Path)
    try:
        return parser.parse_known_args(arguments)[0].resume
    except argparse.ArgumentError:
        return None  # tyro says what is wrong with it


def _replica(config: "TrainConfig", resume: bool) -> None:
    """One replica, in a process of its own."""
    from rich.console import Console

    from diloco.report.terminal.outcome import print_outcome
    from diloco.report.terminal.progress import TrainingProgress
    from diloco.training.loop import train

    console = Console()
    progress = TrainingProgress(config, console) if int(os.environ["RANK"]) == 0 else None
    on_start = progress.resumed if progress is not None and resume else None
    try:
        outcome = train(config, resume=resume, on_start=on_start, on_step=progress)
    finally:
        if progress is not None:
            progress.close()
    if outcome is not None:
        print_outcome(config, outcome, console)


def _simulate(arguments: list[str]) -> None:
    with _explained():
        from diloco.cli.simulate import COMMANDS

        _subcommand(COMMANDS, "diloco simulate", arguments)


def _eval(arguments: list[str]) -> None:
    import tyro

    with _explained():
        from diloco.cli.run import evaluate

        tyro.cli(evaluate, prog="diloco eval", args=arguments)


def _export(arguments: list[str]) -> None:
    import tyro

    with _explained():
        from diloco.cli.run import export

        tyro.cli(export, prog="diloco export", args=arguments)


def _report(arguments: list[str]) -> None:
    import tyro

    with _explained():
        from diloco.cli.run import report

        tyro.cli(report, prog="diloco report", args=arguments)


def _scaling(arguments: list[str]) -> None:
    with _explained():
        from diloco.cli.scaling import COMMANDS

        _subcommand(COMMANDS, "diloco scaling", arguments)


def _sweep(arguments: list[str]) -> None:
    with _explained(hint="; call it again to go on"):
        from diloco.cli.sweep import sweep

        sweep(arguments)


def _experiment(arguments: list[str]) -> None:
    import tyro

    with _explained(hint="; call it again to go on"):
        from diloco.cli.experiment import run

        tyro.cli(run, prog="diloco experiment", args=arguments)


def _plan(arguments: list[str]) -> None:
    with _explained():
        from diloco.cli.plan import plan

        plan(arguments)


def _data(arguments: list[str]) -> None:
    import tyro
    from rich.console import Console

    from diloco.data.config import DataConfig
    from diloco.data.index import read_index, total
    from diloco.data.prepare import prepare
    from diloco.report.terminal.preparation import preparation_progress

    def command(output: Path, data: Annotated[DataConfig, tyro.conf.arg(name="")] = DataConfig()) -> None:  # noqa: B008
        """Tokenize text into memory-mapped shards; run it again after an interruption, and it goes on.

        Args:
            output: Directory to write to.
            data: What to read.
        """
        if data.prepared is not None or data.cache != DataConfig.cache:
            raise UserError("--prepared and --cache mean nothing here: text is read and written to --output")
        with preparation_progress(Console(stderr=True)) as progress:
            prepare(data, output, progress=progress)
        index = read_index(output)
        for split, shards in index.splits.items():
            print(f"{split}: {total(shards).num_documents:,} documents, {total(shards).num_tokens:,} tokens")
        print(f"digest {index.digest}")

    with _explained():
        _subcommand({"prepare": command}, "diloco data", arguments)


def _bench(arguments: list[str]) -> None:
    from typing import Literal

    import torch
    from rich.console import Console

    from diloco.measure.gradient import demo_gradient, load_gradient
    from diloco.measure.wire import measure_wire
    from diloco.report.terminal.wire import print_wire, wire_json
    from diloco.wire import CODECS, codec

    def command(
        wires: tuple[str, ...] = (),
        gradient: Path | None = None,
        values: int = 1 << 26,
        device: Literal["cpu", "cuda"] = "cpu",
        json: bool = False,
    ) -> None:
        """Bits, error and speed of the wire formats, beside the speed of a copy.

        Args:
            wires: Codecs with options, such as e3m0:block=128; left out, all.
            gradient: A safetensors file with a real outer gradient; left out, the laptop recipe's first, made now.
            values: Length of the vector that speed is measured on.
            device: Where it lies.
            json: Print JSON.
        """
        for wire in wires:
            codec(wire)
        if values < 1:
            raise UserError(f"--values must be at least 1, not {values}")
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError("torch finds no GPU here: leave --device out")
        gradient_N = load_gradient(gradient) if gradient is not None else demo_gradient()
        found = measure_wire(wires or tuple(CODECS), gradient_N=gradient_N, num_values=values, device=device)
        if json:
            print(wire_json(found))
        else:
            print_wire(found, Console())

    with _explained():
        _subcommand({"wire": command}, "diloco bench", arguments)


def _subcommand(commands: Mapping[str, Callable[..., None]], prog: str, arguments: Sequence[str]) -> None:
    """Call the command that the first argument names; with a program of its own, its hints name it in full."""
    import tyro

    if arguments and arguments[0] in commands:
        tyro.cli(commands[arguments[0]], prog=f"{prog} {arguments[0]}", args=arguments[1:])
    else:
        tyro.extras.subcommand_cli_from_dict(dict(commands), prog=prog, args=arguments)


@contextmanager
def _explained(hint: str = "", where: Path | None = None) -> Iterator[None]:
    """Turn what is expected to go wrong into one sentence and an exit code.

    A hint follows where something was begun: where a file is, if one is named.
    """
    try:
        yield
    except KeyboardInterrupt:
        _complain("interrupted" + (hint if where is None or where.exists() else ""), 130)
    except Exception as error:
        from diloco.errors import UserError
        from diloco.training.launcher import exit_code_of

        if isinstance(error, BrokenPipeError) and _nobody_reads():
            raise
        exit_code = exit_code_of(error)
        if exit_code is None or os.environ.get("DILOCO_TRACEBACK"):
            raise
        is_begun = exit_code != UserError.exit_code and (where is None or where.exists())
        _complain(str(error) + (hint if is_begun else ""), exit_code)


def _complain(sentence: str, exit_code: int) -> NoReturn:
    print(f"diloco: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(exit_code) from None
