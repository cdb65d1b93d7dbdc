"""The tiers at which an experiment is run: on a laptop in minutes, or at the papers' sizes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from diloco.data.config import DataConfig
from diloco.data.tokenizers import ByteTokenizer
from diloco.models.decoder_config import DecoderConfig
from diloco.presets import Method
from diloco.training.config.config import CheckpointConfig, EvaluationConfig, TrainConfig
from diloco.training.config.recipes import recipe

BASELINE: Method = "data_parallel"
DILOCO: Method = "diloco"
STREAMING: Method = "streaming_overlapped_fp4"


@dataclass(frozen=True, kw_only=True)
class BatchGrid:
    """Runs of one size over the global batch."""

    size: str
    """A name in the tier's sizes."""
    tokens: int
    """Multiple of the size's token budget."""
    batches: tuple[float, ...]
    """Multiples of its batch."""
    rates: tuple[float, ...]
    """Multiples of its learning rate, beside the square root of the batch's."""
    replicas: tuple[int, ...]
    """Values of M of DiLoCo; Data-Parallel is always beside them."""


@dataclass(frozen=True, kw_only=True)
class CadenceGrid:
    """Runs of DiLoCo over H and the outer learning rate."""

    size: str
    """A name in the tier's sizes."""
    replicas: int
    """M."""
    sync_everies: tuple[int, ...]
    """Values of H."""
    outer_learning_rates: tuple[float, ...]
    """Values of η."""


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
    step_batches: tuple[float, ...]
    """Multiples of a size's batch at which sizes are compared; the last is the smallest: the most steps."""
    batch_grids: tuple[BatchGrid, ...]
    """Grids over the batch, the last with the most tokens; the first is at the base size."""
    cadence_grids: tuple[CadenceGrid, ...]
    """Grids over H and η, the first at the base size."""
    overtrained: Mapping[str, TrainConfig]
    """Configs that are overtrained, by the name of their size, at their smallest token budget."""
    multiples: Mapping[str, tuple[int, ...]]
    """Multiples of that budget, by the same names."""
    layers_per_fragment: tuple[int, ...]
    """Numbers of blocks in a fragment."""
    seeds: tuple[int, ...]
    """Seeds, with each of which every run is made."""
    gpu_bytes: float | None = None
    """Memory of each GPU for which commands have shards and micro-batches; None leaves both as they are."""

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
        tokens: float = 1.0,
        batch: float = 1.0,
        rate: float = 1.0,
        overtrained: bool = False,
        **diloco: Any,
    ) -> TrainConfig:
        """The config of a run.

        Args:
            method: how the replicas are synchronized.
            size: a name in `sizes`, or in `overtrained`; None is the base.
            num_replicas: M, but for Data-Parallel.
            tokens: multiple of the size's token budget.
            batch: multiple of the size's batch; the learning rate grows with its square root, as suits AdamW.
            rate: multiple of the learning rate, beside that.
            overtrained: take the size from `overtrained`.
            diloco: fields of DilocoConfig; Data-Parallel has none.
        """
        config = (self.overtrained if overtrained else self.sizes)[size or self.base]
        global_batch = int(config.global_batch * batch)
        num_steps = round(tokens * config.num_tokens / (global_batch * config.sequence_length))
        is_baseline = method == BASELINE
        learning_rate = config.optimizer.learning_rate * math.sqrt(batch) * rate
        return replace(
            config,
            method=method,
            num_replicas=self.data_parallel_replicas if is_baseline else num_replicas,
            global_batch=global_batch,
            optimizer=replace(config.optimizer, learning_rate=learning_rate),
            num_tokens=num_steps * global_batch * config.sequence_length,
            diloco=recipe(config.recipe).diloco if is_baseline else replace(config.diloco, **diloco),
        )


def small(corpus: tuple[str, ...] = (), held_out: tuple[str, ...] = ()) -> Tier:
    """Models of 0.1M to 0.24M parameters of bytes, for two cores.

    The learning rate is the best of 0.004, 0.008, 0.016 and 0.032 at the base size, on English books, for both
    Data-Parallel and Streaming DiLoCo. It falls with the inverse of the size, as the best of 0.3M and 1.2M
    parameters do. η is the default, 0.4, which in a sweep of DiLoCo (docs/results/sweep.csv) is the best of five
    at the base size for M = 1 and 2; 0.8 is the best for M = 4.
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

    base, other, largest = "0.10M", "0.15M", "0.24M"
    sizes = {base: size(36), other: size(44), largest: size(56)}
    few = {"sync_everies": (5, 30, 100), "outer_learning_rates": (0.1, 0.2, 0.4, 0.8)}
    return Tier(
        sizes=sizes,
        data_parallel_replicas=1,  # two runs at once on two cores, instead of an all-reduce at every step
        base=base,
        sync_everies=(5, 10, 30, 60, 100),
        step_batches=(1, 0.25),
        batch_grids=(
            BatchGrid(size=base, tokens=1, batches=(0.5, 1, 2, 4), rates=(1,), replicas=(1, 2, 4, 8)),
            # As many steps as the papers' smallest runs have, and more; the best rates lie lower in longer runs.
            BatchGrid(size=base, tokens=6, batches=(0.25, 0.5, 1), rates=(0.5, 0.25), replicas=(1, 2)),
        ),
        cadence_grids=(
            CadenceGrid(
                size=base, replicas=2, sync_everies=(1, 5, 10, 30, 100), outer_learning_rates=_OUTER_RATES
            ),
            CadenceGrid(size=base, replicas=1, **few),
            CadenceGrid(size=base, replicas=4, **few),
            CadenceGrid(size=largest, replicas=2, **few),
        ),
        overtrained={base: sizes[base], largest: sizes[largest]},
        multiples={base: (1, 2, 8), largest: (1, 2)},
        layers_per_fragment=(1, 2, 3, 6),
        seeds=(0, 1),
    )


_TOKENS_PER_PARAM, _LEARNING_RATE, _BASE_PARAMS = 20, 0.016, 102_564
_OUTER_RATES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Values of η in arXiv 2503.09799, section 5.1."""


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

    sizes = {name: size(scale, num_tokens) for name, scale, num_tokens in _ARCHITECTURES}
    return Tier(
        sizes=sizes,
        data_parallel_replicas=2,
        base="500M",
        sync_everies=(5, 10, 30, 100, 300),
        step_batches=(1,),
        batch_grids=tuple(
            BatchGrid(size=name, tokens=1, batches=(0.25, 0.5, 1, 2, 4), rates=(1,), replicas=(1, 2, 4, 8))
            for name in ("500M", "100M", "1B")
        ),
        cadence_grids=tuple(
            CadenceGrid(
                size=name,
                replicas=replicas,
                sync_everies=(1, 5, 10, 30, 100, 300),
                outer_learning_rates=_OUTER_RATES,
            )
            for name in ("500M", "100M", "200M")
            for replicas in (2, 1, 4)
        ),
        overtrained=_on_dolma(sizes, dolma=not corpus),
        multiples=_MULTIPLES,
        layers_per_fragment=(1, 2, 3, 6, 9),
        seeds=(0,),
        gpu_bytes=80e9,
    )


def _on_dolma(sizes: Mapping[str, TrainConfig], *, dolma: bool) -> dict[str, TrainConfig]:
    """The configs to overtrain, with text for the most tokens: Dolma, or what was named; C4 stays held out."""
    overtrained = {}
    for name, (*_, most) in _MULTIPLES.items():
        config = sizes[name]
        text = replace(config.data, max_train_bytes=round(_BYTES_PER_TOKEN * most * config.num_tokens))
        overtrained[name] = replace(config, data=replace(text, train=_DOLMA) if dolma else text)
    # As in arXiv 2501.18512.
    longer = overtrained["1B"]
    overtrained["1B"] = replace(
        longer,
        sequence_length=2048,
        global_batch=longer.global_batch // 2,
        diloco=replace(longer.diloco, sync_every=100),
    )
    return overtrained


_DOLMA = ("hf:allenai/dolma:v1_7",)
_MULTIPLES = {"1B": (1, 4, 10), "100M": (1, 4, 16), "300M": (1, 4, 16)}
"""Multiples of the token budgets: Tables 2 and 8 of arXiv 2501.18512; Figure 11 of arXiv 2503.09799."""

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
"""Bytes of a token: more than one of a vocabulary of 32,000 has, so that no text is read twice."""

TIERS = {"small": small, "paper": paper}
"""Tiers by name; each takes sources of training and held-out text, and has its own where they are left out."""
