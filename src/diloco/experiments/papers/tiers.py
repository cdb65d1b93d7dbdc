"""The tiers at which an experiment is run: on a laptop in minutes, or at the papers' sizes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from diloco.data.config import DataConfig
from diloco.data.tokenizers import ByteTokenizer
from diloco.models.decoder_config import DecoderConfig
from diloco.presets import Method
from diloco.training.config import TrainConfig
from diloco.training.recipes import recipe
from diloco.training.sections import CheckpointConfig, EvaluationConfig

BASELINE: Method = "data_parallel"
DILOCO: Method = "diloco"
STREAMING: Method = "streaming_overlapped_fp4"


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Base configs, and the values that the experiments vary around them."""

    sizes: Mapping[str, TrainConfig]
    """Configs by the name of their size, each with its tokens, batch and learning rate; the smallest first."""
    data_parallel_replicas: int
    """M of Data-Parallel, which changes nothing but how it is computed."""
    base: str
    """The size of the experiments that do not vary it."""
    sync_everies: tuple[int, ...]
    """Values of H."""
    overtrained: TrainConfig
    """The config that is overtrained, at its smallest token budget."""
    multiples: tuple[int, ...]
    """Multiples of that budget."""
    overtrained_replicas: tuple[int, ...]
    """Values of M for overtraining."""
    layers_per_fragment: tuple[int, ...]
    """Numbers of blocks in a fragment."""
    batches: tuple[float, ...]
    """Multiples of the base's global batch."""
    seeds: tuple[int, ...]
    """Every run is made with each."""

    @property
    def base_config(self) -> TrainConfig:
        """The config of the base size."""
        return self.sizes[self.base]

    @property
    def sync_every(self) -> int:
        """H of the experiments that do not vary it."""
        return self.base_config.diloco.sync_every

    def run(
        self,
        method: Method = STREAMING,
        *,
        size: str | None = None,
        num_replicas: int = 2,
        seed: int = 0,
        tokens: float = 1.0,
        batch: float = 1.0,
        **diloco: Any,
    ) -> TrainConfig:
        """The config of a run.

        Args:
            method: how the replicas are synchronized.
            size: a name in `sizes`, or `OVERTRAINED`; None is the base.
            num_replicas: M, but for Data-Parallel.
            seed: the run's.
            tokens: multiple of the size's token budget.
            batch: multiple of the size's batch; the learning rate grows with its square root, as suits AdamW.
            diloco: fields of DilocoConfig; Data-Parallel has none.
        """
        config = self.overtrained if size == OVERTRAINED else self.sizes[size or self.base]
        global_batch = int(config.global_batch * batch)
        num_steps = round(tokens * config.num_tokens / (global_batch * config.sequence_length))
        is_baseline = method == BASELINE
        optimizer = replace(config.optimizer, learning_rate=config.optimizer.learning_rate * math.sqrt(batch))
        return replace(
            config,
            method=method,
            num_replicas=self.data_parallel_replicas if is_baseline else num_replicas,
            seed=seed,
            global_batch=global_batch,
            optimizer=optimizer,
            num_tokens=num_steps * global_batch * config.sequence_length,
            diloco=recipe(config.recipe).diloco if is_baseline else replace(config.diloco, **diloco),
        )


OVERTRAINED = "overtrained"
"""The name of `Tier.overtrained` as a size."""


def small(corpus: tuple[str, ...] = (), held_out: tuple[str, ...] = ()) -> Tier:
    """Models of 0.1M to 0.24M parameters of bytes, for two cores.

    The learning rate is the best of 0.004, 0.008, 0.016 and 0.032 at the base size, on English books, for both
    Data-Parallel and Streaming DiLoCo. It falls with the inverse of the size, as the best of 0.3M and 1.2M
    parameters do.
    """

    def size(width: int) -> TrainConfig:
        # The fastest settings on a core: FP32, one head, and short sequences.
        model = DecoderConfig(num_layers=6, num_heads=1, width=width)
        num_params = replace(model, vocab_size=ByteTokenizer.vocab_size).num_matrix_params
        laptop = recipe("laptop")
        step_tokens = 16 * 128
        return replace(
            laptop,
            num_tokens=round(_TOKENS_PER_PARAM * num_params / step_tokens) * step_tokens,
            global_batch=16,
            sequence_length=128,
            precision="fp32",
            model=model,
            optimizer=replace(laptop.optimizer, learning_rate=_LEARNING_RATE * _BASE_PARAMS / num_params),
            data=DataConfig(train=corpus or ("stdlib",), held_out=held_out),
            checkpoint=CheckpointConfig(every_steps=1000),
            evaluation=EvaluationConfig(num_tokens=262_144),
            log_layer_cosine=True,
        )

    base = size(36)
    return Tier(
        sizes={"0.10M": base, "0.15M": size(44), "0.24M": size(56)},
        data_parallel_replicas=1,  # two runs at once on two cores, instead of an all-reduce at every step
        base="0.10M",
        sync_everies=(5, 10, 30, 60, 100),
        overtrained=replace(base, num_tokens=base.num_steps // 2 * base.tokens_per_step),
        multiples=(1, 4, 16),
        overtrained_replicas=(2,),
        layers_per_fragment=(1, 2, 3, 6),
        batches=(0.5, 1, 2, 4),
        seeds=(0, 1),
    )


_TOKENS_PER_PARAM, _LEARNING_RATE, _BASE_PARAMS = 20, 0.016, 102_564


def paper(corpus: tuple[str, ...] = (), held_out: tuple[str, ...] = ()) -> Tier:
    """The papers' sizes and tokens: C4, vocabulary 32,000, sequences of 1,024; overtraining on Dolma, 2,048."""
    data = DataConfig(
        train=corpus or ("hf:allenai/c4:en:train",),
        held_out=held_out or (() if corpus else ("hf:allenai/c4:en:validation",)),
        tokenizer="bpe:32000",
    )

    def read_tokens(num_tokens: float) -> float:
        # Text held out of the training text must be the same at every size, and so must what is read.
        return num_tokens if data.held_out else max(most for _, _, most in _ARCHITECTURES)

    def size(scale: str, num_tokens: float) -> TrainConfig:
        config = recipe(scale)
        step_tokens = config.global_batch * 1024
        return replace(
            config,
            num_tokens=round(num_tokens / step_tokens) * step_tokens,
            sequence_length=1024,
            model=replace(config.model, vocab_size=0),
            data=replace(data, max_train_bytes=round(_BYTES_PER_TOKEN * read_tokens(num_tokens))),
            log_layer_cosine=True,
        )

    overtrained = size("1.3b", 25e9)
    if not corpus:
        dolma = DataConfig(train=("hf:allenai/dolma:v1_7",), tokenizer=data.tokenizer)
        overtrained = replace(overtrained, data=dolma)
    multiples = (1, 4, 10)
    most_bytes = round(_BYTES_PER_TOKEN * multiples[-1] * overtrained.num_tokens)
    overtrained = replace(overtrained, data=replace(overtrained.data, max_train_bytes=most_bytes))
    overtrained = replace(overtrained, sequence_length=2048, global_batch=overtrained.global_batch // 2)
    return Tier(
        sizes={name: size(scale, num_tokens) for name, scale, num_tokens in _ARCHITECTURES},
        data_parallel_replicas=2,
        base="500M",
        sync_everies=(5, 10, 30, 100, 300),
        overtrained=replace(overtrained, diloco=replace(overtrained.diloco, sync_every=100)),
        multiples=multiples,
        overtrained_replicas=(2, 4),
        layers_per_fragment=(1, 2, 3, 6, 9),
        batches=(0.25, 0.5, 1, 2, 4),
        seeds=(0,),
    )


# Table 3 of arXiv 2501.18512: its name of the size, our recipe of the same architecture, tokens.
_ARCHITECTURES = (
    ("35M", "35m", 700e6),
    ("100M", "90m", 1.5e9),
    ("200M", "180m", 3.5e9),
    ("300M", "330m", 6e9),
    ("500M", "550m", 11e9),
    ("1B", "1.3b", 25e9),
    ("4B", "4b", 83e9),
)

_BYTES_PER_TOKEN = 5
"""More than a token of a vocabulary of 32,000 has, so that no text is read twice."""

TIERS = {"small": small, "paper": paper}
"""Tiers by name; each takes sources of training and held-out text, and has its own where they are left out."""
