"""The samples of a finished run, and how a terminal shows them."""

import json

import pytest
from rich.console import Console
from tests.cli.test_generate import BOS
from tests.processes import SAMPLE_TOKENS

from diloco.models.writer import Writer, generate
from diloco.report.terminal.training import print_outcome
from diloco.training.records.finished import run_parameters
from diloco.training.records.runs import read_config
from diloco.training.records.samples import Sample, prompts_for
from diloco.training.records.summary import Outcome


def test_the_file_has_three_samples_of_the_outer_parameters(finished_run):
    samples = json.loads((finished_run / "samples.json").read_text())
    model, config = run_parameters(finished_run, "outer")[0], read_config(finished_run)
    expected = []
    for number in range(3):
        writer = Writer(model, context=64, vocab_size=257, temperature=0.8, seed=config.seed + number)
        writer.read([BOS])
        written = bytes(generate(writer, SAMPLE_TOKENS, stop=BOS)).decode(errors="replace")
        expected.append({"prompt": "", "text": written})
    assert samples == expected and len({sample["text"] for sample in samples}) == 3


@pytest.mark.parametrize(
    ("sources", "prompts"),
    [
        (["stdlib"], ["import os\n", "class Queue", "def read("]),
        (["text.jsonl"], [""] * 3),
        (["stdlib", "text.jsonl"], [""] * 3),
    ],
)
def test_prompts_fit_the_text(sources, prompts):
    assert prompts_for(sources) == prompts


def test_a_terminal_shows_the_samples_and_what_larger_models_take(finished_run):
    summary = json.loads((finished_run / "summary.json").read_text())
    samples = [Sample(prompt="def read(", text="[b]self)\n"), Sample(prompt="", text="the cat")]
    console = Console(width=100, record=True, file=None, quiet=False)
    with console.capture() as shown:
        print_outcome(read_config(finished_run), Outcome(summary, samples), console)
    text = shown.get()
    assert "\nThe model writes\n\nafter 'def read(':\ndef read([b]self)\n" in text
    assert "\nat the beginning of a document:\nthe cat\n" in text
    assert "What was published of larger ones:" in text and "arXiv 2305.07759" in text
