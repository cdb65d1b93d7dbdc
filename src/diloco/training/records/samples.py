"""Samples of a finished run: what its model writes after prompts that fit its text."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from diloco.data.shards import read_index
from diloco.data.tokenizers import load_tokenizer, text_pieces
from diloco.files import write_json
from diloco.models.language_model import LanguageModel, in_evaluation
from diloco.models.writer import write_together
from diloco.training.config.config import TrainConfig

SAMPLES_FILE = "samples.json"
"""The file of a finished run's samples: a list of objects with `prompt` and `text`."""
_NUM_TOKENS, _TEMPERATURE = 160, 0.8
_SECONDS = 30.0
"""The most that all samples take: a model that was sharded writes on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt, and what the model wrote after it."""

    prompt: str
    """The text that the model read; empty for the beginning of a document."""
    text: str
    """The text that it wrote."""


def prompts_for(sources: Sequence[str]) -> list[str]:
    """Three prompts that fit the text of some sources."""
    return ["import os\n", "class Queue", "def read("] if list(sources) == ["stdlib"] else [""] * 3


def write_samples(model: LanguageModel, config: TrainConfig) -> list[Sample]:
    """Three samples of a run's model, written into the run's directory.

    Args:
        model: with the outer parameters, on its device.
        config: the run's, resolved.
    """
    assert config.data.prepared is not None, "the config is resolved"
    tokenizer, until = load_tokenizer(config.data.prepared), time.monotonic() + _SECONDS
    prompts = prompts_for(read_index(config.data.prepared).settings.train)
    read = [tokenizer.encode([prompt])[0].tolist() for prompt in prompts]
    with in_evaluation(model):  # once, not at every token
        written = write_together(
            model,
            [[tokenizer.bos_id, *ids] for ids in read],
            _NUM_TOKENS,
            context=config.sequence_length,
            device=next(model.parameters()).device,
            vocab_size=tokenizer.vocab_size,
            temperature=_TEMPERATURE,
            seed=config.seed,
            stop=tokenizer.bos_id,
            until=until,
        )
    samples = [
        Sample(prompt=prompt, text="".join(text_pieces(tokenizer, iter(ids), after=before)))
        for prompt, ids, before in zip(prompts, written, read, strict=True)
    ]
    write_json(config.directory / SAMPLES_FILE, [asdict(sample) for sample in samples])
    return samples
