"""Facts of entry 0 that a stranger wrote: refused by our own error before anything of their sizes is made."""

import re
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from tests.hostile.mutations import generator, mutated_json
from tests.rendezvous.handwritten import SEED, Handwritten

from diloco.cli.main import main
from diloco.data.config import DataConfig
from diloco.data.prepare import prepare
from diloco.data.shards import read_index
from diloco.errors import DilocoError
from diloco.models.decoder_config import DecoderConfig
from diloco.rendezvous.replay import replayed
from diloco.training.config.config import to_json
from diloco.training.config.recipes import tiny
from diloco.training.config.resolve import DATA_DIGEST
from diloco.training.records.store_runs import initial_parameters, store_parameters

NUM_EXAMPLES = settings.get_profile("hostile").max_examples
MODEL = DecoderConfig(num_layers=1, num_heads=1, width=4, vocab_size=9)
PLACE = "shape, fragment and place of parameter "


class Stranger(Handwritten):
    """A run whose facts are what the test says, and nothing else."""

    def _facts(self, wire: str) -> dict[str, object]:
        return {}


def facts_of(values: dict[str, Any], where: str = "") -> dict[str, Any]:
    facts = {}
    for name, value in values.items():
        facts |= facts_of(value, f"{where}{name}.") if isinstance(value, dict) else {where + name: value}
    return facts


def initial() -> dict[str, torch.Tensor]:
    return dict(MODEL.build(seed=SEED).named_parameters())


def sound_facts(directory: Path) -> dict[str, Any]:
    """The facts of a trainer's run of `MODEL`, and those of its engine."""
    engine = Handwritten(directory, initial=initial())._facts("fp32")
    config = facts_of(to_json(replace(tiny(), model=MODEL, seed=SEED)))
    return {name: value for name, value in config.items() if not name.startswith(("name", "runs"))} | engine


def run_with(directory: Path, facts: dict[str, Any]) -> str:
    """A run of these facts with one outer step and a snapshot."""
    run = Stranger(directory, facts=facts, initial=initial())
    run.join("a")
    run.step(0, [run.send(0, 0)])
    run.snapshot(0)
    return str(run.directory)


@pytest.mark.slow
def test_changed_facts_are_refused_by_our_own_error_or_sound(tmp_path):
    sound, rng = sound_facts(tmp_path / "sound"), generator()
    url = run_with(tmp_path / "same", sound)
    assert replayed(url, initial=initial_parameters).checked.steps == 1
    assert store_parameters(url)[0].state_dict().keys() == MODEL.build(seed=0).state_dict().keys()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(NUM_EXAMPLES):
        try:
            url = run_with(tmp_path / str(number), mutated_json(sound, rng))
        except DilocoError:
            continue  # the log's own reader refuses them
        for read in (lambda url: replayed(url, initial=initial_parameters), store_parameters):
            try:
                read(url)
            except DilocoError as error:
                assert len(str(error)) < 2000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 128 << 10, "more than 128 MiB"


@pytest.fixture(scope="module")
def prepared(small_corpus, tmp_path_factory) -> Path:
    config = DataConfig(train=(str(small_corpus),), held_out_fraction=0.1, tokenizer="bytes")
    return prepare(config, tmp_path_factory.mktemp("data") / "prepared")


HUGE = 1 << 40
HOSTILE = {
    "a section that is a number": ({"model": 3, "model.width": 4}, "model.width is a field of what has none"),
    "a width": ({"model.width": 2 * HUGE}, r"model.width=\d+, .* parameters alone take [\d,]+ bytes"),
    "a number of layers": ({"model.num_layers": HUGE}, r"num_layers=\d+ must be at most 4096"),
    "no vocabulary": ({"model.vocab_size": 0}, "its model has no vocab_size"),
    "a shape": ({f"{PLACE}blocks.0.mlp_out.weight": [[16, 4], 0, 180]}, "describes blocks.0.mlp_out.weight"),
    "a parameter": ({f"{PLACE}embedding.weight": [[HUGE], 0, 0]}, r"parameters, .* take [\d,]+ bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("verb", ["verify", "eval"])
def test_facts_that_no_run_can_mean_end_in_one_sentence(name, verb, prepared, tmp_path, capsys):
    changes, sentence = HOSTILE[name]
    sound = sound_facts(tmp_path / "sound") | {DATA_DIGEST: read_index(prepared).digest}
    if name == "a parameter":
        sound = {fact: value for fact, value in sound.items() if not fact.startswith(PLACE)}
    url = run_with(tmp_path / "run", changes | {fact: v for fact, v in sound.items() if fact not in changes})
    with pytest.raises(SystemExit):
        main(["store", "verify", url] if verb == "verify" else ["eval", url, "--prepared", str(prepared)])
    out, error = capsys.readouterr()
    assert re.search(sentence, error) and error.count("\n") == 1, out + error
