"""`diloco export`: the outer parameters of a run, for other programs."""

from pathlib import Path

from diloco.cli._command import Run, call
from diloco.hub import check_online, push
from diloco.training.records.export import Format, export_run

HELP = "outer parameters for other programs: diloco export RUN --to safetensors|hf --output DIRECTORY"
ORDER = 5


def run(arguments: list[str]) -> None:
    """Export the run that a command line names."""
    call(_export, arguments, prog="diloco export")


def _export(
    run: Run,
    to: Format,
    output: Path,
    prepared: Path | None = None,
    merged: bool = False,
    push_to_hub: str | None = None,
) -> None:
    """Write a run's outer parameters, with config and tokenizer, for other programs.

    Args:
        run: Directory of the run, or the URL of the store in which its replicas meet.
        to: safetensors, with this project's names; or hf, for transformers' AutoModelForCausalLM.from_pretrained.
        output: A new directory to write to.
        prepared: Directory of the run's data, if it was moved, or the run is in a store.
        merged: With --to hf, the whole model where adapters of one were trained (--model.lora).
        push_to_hub: A repository of the Hugging Face Hub to upload it to, such as me/model; a new one is private.
    """
    if push_to_hub is not None:
        check_online("push_to_hub", push_to_hub)
    export_run(run, to, output, prepared=prepared, merged=merged)
    print(output)
    if push_to_hub is not None:
        print(push(output, push_to_hub))
