"""The tiers at which an experiment is run: on a laptop in minutes, or at the papers' sizes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from diloco.data.config import DataConfig
from diloco.data.tokenizers import ByteTokenizer
from diloco.models.decoder_config import DecoderConfig
from diloco.presets import Method
from diloco.scaling.hyperparameters import STREAMING_OUTER_LEARNING_RATE, hyperparameters, nearest_power_of_two
from diloco.scaling.judgement import EXTRAPOLATED
from diloco.scaling.laws import Kind
from diloco.training.config.config import CheckpointConfig, EvaluationConfig, InnerOptimizerName, TrainConfig
from diloco.training.config.recipes import recipe
from diloco.units import count

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
class TuningGrid:
    """Runs over learning rate and batch at each size and M, and over η at the middle of both."""

    replicas: tuple[int, ...]
    """Values of M; 0 is Data-Parallel."""
    rates: tuple[float, ...]
    """Multiples of the learning rate, beside the square root of the batch's."""
    batches: tuple[float, ...]
    """Multiples of the batch of the method."""
    outer_learning_rates: tuple[float, ...]
    """Values of η."""
    sizes: tuple[str, ...]
    """Names in the tier's sizes."""


@dataclass(frozen=True, kw_only=True)
class Extrapolation:
    """Models whose loss is predicted from smaller ones, or by the published laws, before they are trained."""

    sizes: tuple[str, ...]
    """The names of their sizes."""
    fitted: tuple[str, ...]
    """The names of the smaller sizes; empty for the published laws."""
    fits: tuple[tuple[Kind, int], ...]
    """The kind of law whose hyperparameters a run takes, and M; 0 is Data-Parallel."""


@dataclass(frozen=True, kw_only=True)
class RulesGrid:
    """Runs of every outer rule and merge rule on one base."""

    base: TrainConfig
    """The config that all of them vary."""
    replicas: tuple[int, ...]
    """Values of M, the smallest first."""
    sync_everies: tuple[int, ...]
    """Values of H."""
    outer_learning_rates: Mapping[str, tuple[float | None, ...]]
    """Values of η by the name of the rule, whose other settings the experiment has; None is the rule's own."""


@dataclass(frozen=True, kw_only=True)
class InnerGrid:
    """Runs of Data-Parallel and DiLoCo with several inner optimizers on one base."""

    base: TrainConfig
    """The config that all of them vary."""
    replicas: tuple[int, ...]
    """Values of M, the smallest first; Data-Parallel is always beside them."""
    optimizers: tuple[InnerOptimizerName, ...]
    """Names of the inner optimizers, AdamW first."""
    rates: tuple[float, ...]
    """Multiples of the base's learning rate."""


@dataclass(frozen=True, kw_only=True)
class Comparisons:
    """The grids of the experiments of neither paper."""

    rules: RulesGrid
    """As many steps as the papers' smallest runs have."""
    many_outer_steps: RulesGrid
    """The same rules in 133 outer steps."""
    few_outer_steps: RulesGrid
    """The same rules in 17 outer steps."""
    inner_optimizers: InnerGrid
    """Inner optimizers, in as many steps as `rules`."""


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
    tuning: TuningGrid
    """The grid that is searched for the best hyperparameters."""
    extrapolation: Extrapolation
    """The models whose loss is predicted."""
    comparisons: Comparisons
    """The grids over outer rules and inner optimizers."""
    tuned: Callable[[TrainConfig, Method, int, Kind | None], TrainConfig] | None = None
    """The config of a size at the hyperparameters of a method with M replicas; None leaves those of the size."""
    of_laws: "Tier | None" = None
    """The tier of the experiments of arXiv 2503.09799; None is this one."""
    gpu_bytes: float | None = None
    """Memory of each GPU for which commands have shards and micro-batches; None leaves both as they are."""

    @property
    def base_config(self) -> TrainConfig:
        """The config of the base size."""
        return self.sizes[self.base]

    @property
    def compared_sizes(self) -> list[str]:
        """The names of the sizes at which methods are compared: not those that the published laws predict."""
        predicted = () if self.extrapolation.fitted else self.extrapolation.sizes
        return [name for name in self.sizes if name not in predicted]

    @property
    def sync_every(self) -> int:
        """H of the experiments that do not vary it."""
        return self.base_config.diloco.sync_every

    def run(
        self,
        method: Method = STREAMING,
        *,
        size: str | None = None,
        base: TrainConfig | None = None,
        num_replicas: int = 2,
        tokens: float = 1.0,
        batch: float = 1.0,
        rate: float = 1.0,
        overtrained: bool = False,
        fit: Kind | None = None,
        **diloco: Any,
    ) -> TrainConfig:
        """The config of a run.

        Args:
            method: how the replicas are synchronized.
            size: a name in `sizes`, or in `overtrained`; None is the base.
            base: a config to vary in the place of a size's.
            num_replicas: M, but for Data-Parallel.
            tokens: multiple of the size's token budget.
            batch: multiple of the batch; the learning rate grows with its square root, as suits AdamW.
            rate: multiple of the learning rate, beside that.
            overtrained: take the size from `overtrained`.
            fit: of the laws that give the hyperparameters, as `hyperparameters` takes it.
            diloco: fields of DilocoConfig; Data-Parallel has none.
        """
        config = base or (self.overtrained if overtrained else self.sizes)[size or self.base]
        is_baseline = method == BASELINE
        if is_baseline:
            num_replicas = self.data_parallel_replicas
        if self.tuned is not None:
            config = self.tuned(config, method, num_replicas, fit)
        global_batch = int(config.global_batch * batch)
        num_steps = round(tokens * config.num_tokens / (global_batch * config.sequence_length))
        learning_rate = config.optimizer.learning_rate * math.sqrt(batch) * rate
        return replace(
            config,
            method=method,
            num_replicas=num_replicas,
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
        tuning=replace(_SMALL_TUNING, sizes=(base, largest)),
        extrapolation=Extrapolation(sizes=(largest,), fitted=(base, other), fits=_SMALL_FITS),
        comparisons=_small_comparisons(sizes[base]),
    )


def _small_comparisons(base: TrainConfig) -> Comparisons:
    longer = _longer(base)
    return Comparisons(
        rules=_rules_grid(longer),
        many_outer_steps=_rules_grid(_smaller_batch(base), sync_everies=(30,)),
        few_outer_steps=_rules_grid(_shorter(base), replicas=(2,), sync_everies=(30,)),
        inner_optimizers=_inner_grid(longer),
    )


def _longer(base: TrainConfig) -> TrainConfig:
    """1.2M parameters and 7,200 steps, as many as the papers' smallest runs have.

    The best learning rate is 0.001 in 23,730 steps, and 0.002 in 2,048 (docs/results/quality.md): one between.
    """
    model = DecoderConfig(num_layers=6, num_heads=2, width=128)
    optimizer = replace(base.optimizer, learning_rate=0.00141)
    return replace(base, model=model, optimizer=optimizer, global_batch=8, num_tokens=7200 * 8 * 128)


def _smaller_batch(base: TrainConfig) -> TrainConfig:
    """The same tokens in 4,008 steps of a quarter of the batch, at half the learning rate."""
    optimizer = replace(base.optimizer, learning_rate=base.optimizer.learning_rate * 0.5)
    return replace(base, optimizer=optimizer, global_batch=base.global_batch // 4)


def _shorter(base: TrainConfig) -> TrainConfig:
    """512 steps of half the batch: 17 outer steps with H = 30, and a minute on two cores."""
    optimizer = replace(base.optimizer, learning_rate=base.optimizer.learning_rate * 0.5**0.5)
    evaluation = replace(base.evaluation, num_tokens=65_536)
    return replace(
        base, optimizer=optimizer, evaluation=evaluation, global_batch=8, num_tokens=512 * 8 * base.sequence_length
    )


def _rules_grid(
    base: TrainConfig, *, replicas: tuple[int, ...] = (2, 4), sync_everies: tuple[int, ...] = (30, 100)
) -> RulesGrid:
    return RulesGrid(base=base, replicas=replicas, sync_everies=sync_everies, outer_learning_rates=_RATES_OF_RULES)


_RATES_OF_RULES: dict[str, tuple[float | None, ...]] = {
    "averaging": (1.0,),
    "nesterov": (0.2, 0.4, 0.8),
    "auto": (None,),
    "rda": (0.5, 0.7, 1.0),
    "rda_momentum": (0.4, 0.7),
    "delayed_nesterov": (0.4, 0.8),
    "sparseloco": (0.5, 1.0),
    "pulse": (0.4,),
    "adamw": (0.01, 0.03),
    **dict.fromkeys(("mix", "overwrite", "in_flight", "taylor", "eager"), (0.4,)),
    "delayed_late": (0.4, 0.8),
}


def _inner_grid(base: TrainConfig) -> InnerGrid:
    return InnerGrid(base=base, replicas=(1, 2, 4, 8), optimizers=("adamw", "muon"), rates=(0.5, 1, 2))


_SMALL_TUNING = TuningGrid(
    replicas=(0, 1, 2, 4), rates=(0.5, 1), batches=(0.25, 1), outer_learning_rates=(0.4, 0.8), sizes=()
)
_SMALL_FITS: tuple[tuple[Kind, int], ...] = tuple(("independent", m) for m in (0, 1, 2, 4))
_TOKENS_PER_PARAM, _LEARNING_RATE, _BASE_PARAMS = 20, 0.016, 102_564
_OUTER_RATES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Values of η in arXiv 2503.09799, section 5.1."""


def paper(corpus: tuple[str, ...] = (), held_out: tuple[str, ...] = ()) -> Tier:
    """The papers' sizes, tokens and text: C4, and for more tokens Dolma, with C4 held out."""
    held_out = held_out or (() if corpus else ("hf:allenai/c4:en:validation",))
    # All runs on C4 have one text, whatever they read of it, and the same words are held out of it.
    text = DataConfig(train=corpus or C4, held_out=held_out, tokenizer="bpe:32000")
    dolma = replace(text, train=text.train if corpus else DOLMA)
    sizes = {name: _of_streaming(scale, num_tokens, text) for name, scale, num_tokens in _ARCHITECTURES}
    smallest = sizes["35M"]
    short, halfway = (replace(smallest, num_tokens=steps * smallest.tokens_per_step) for steps in (512, 4000))
    comparisons = Comparisons(
        rules=_rules_grid(smallest),
        many_outer_steps=_rules_grid(halfway, sync_everies=(30,)),
        few_outer_steps=_rules_grid(short, replicas=(2,), sync_everies=(30,)),
        inner_optimizers=_inner_grid(sizes["100M"]),
    )
    of_laws = _of_laws(text, comparisons)
    longer = {name: replace(of_laws.sizes[name], data=dolma) for name in _LAWS_MULTIPLES}
    # As in Tables 2 and 8; the column of hours gives the batch.
    on_dolma = replace(sizes["1B"], data=dolma, sequence_length=2048, global_batch=512)
    on_dolma = replace(on_dolma, diloco=replace(on_dolma.diloco, sync_every=100))
    return replace(
        of_laws,
        sizes=sizes,
        base="500M",
        overtrained={"1B": on_dolma, **longer},
        multiples={"1B": (1, 4, 10), **_LAWS_MULTIPLES},
        of_laws=of_laws,
    )


def _paper_config(scale: str, num_tokens: float, text: DataConfig) -> TrainConfig:
    """A run of either paper: evaluated on 5M tokens or more, and compiled."""
    evaluation = EvaluationConfig(num_tokens=5 * 2**20)
    return replace(recipe(scale), num_tokens=round(num_tokens), data=text, evaluation=evaluation, compile=True)


def _of_streaming(scale: str, num_tokens: float, text: DataConfig) -> TrainConfig:
    """A size of arXiv 2501.18512: vocabulary 32,000, sequences of 1,024, η = 0.4.

    The paper prints no batch of a size. Its Table 1 gives all methods at 1B the same 186,250 steps, of about
    131,072 tokens: the batch of Data-Parallel's law, which is taken for all methods at each size.
    """
    config = _paper_config(scale, num_tokens, text)
    model = replace(config.model, vocab_size=0)  # the tokenizer's
    baseline = hyperparameters(BASELINE, num_params(replace(config, model=model)))
    return replace(
        config,
        sequence_length=1024,
        global_batch=nearest_power_of_two(baseline.batch_tokens / 1024),
        model=model,
        diloco=replace(config.diloco, outer_learning_rate=STREAMING_OUTER_LEARNING_RATE),
        log_layer_cosine=True,
    )


def _of_laws(text: DataConfig, comparisons: Comparisons) -> Tier:
    """The tier of arXiv 2503.09799: 32,768 entries, of which text uses 32,000; sequences of 2,048; 20·N tokens."""
    swept = ("35m", "90m", "180m", "330m", "550m", "1.3b", "2.4b")
    names = {scale: scale.upper() for scale in (*swept, "4b", "10b")}
    # N is the name's: so Table 3 has the budgets (70M for 35M is a misprint of 700M).
    sizes = {name: _paper_config(scale, 20 * count(scale), text) for scale, name in names.items()}
    grids = ("550M", "90M", "1.3B")
    return Tier(
        sizes=sizes,
        data_parallel_replicas=2,
        base="550M",
        sync_everies=(5, 10, 30, 100, 300),
        step_batches=(1,),
        batch_grids=tuple(
            BatchGrid(size=name, tokens=1, batches=(0.25, 0.5, 1, 2, 4), rates=(1,), replicas=(1, 2, 4, 8))
            for name in grids
        ),
        cadence_grids=tuple(
            CadenceGrid(
                size=name,
                replicas=replicas,
                sync_everies=(1, 5, 10, 30, 100, 300),
                outer_learning_rates=_OUTER_RATES,
            )
            for name in ("550M", "90M", "180M")
            for replicas in (2, 1, 4)
        ),
        overtrained={},
        multiples={},
        layers_per_fragment=(1, 2, 3, 6, 9),
        seeds=(0,),
        tuning=TuningGrid(
            replicas=(0, 1, 2, 4, 8),
            rates=(0.5**0.5, 1, 2**0.5),
            batches=(0.5, 1, 2),
            outer_learning_rates=(0.2, 0.4, 0.6, 0.8, 1.0),
            sizes=tuple(names[scale] for scale in swept),
        ),
        extrapolation=Extrapolation(sizes=("4B", "10B"), fitted=(), fits=(*EXTRAPOLATED,)),
        comparisons=comparisons,
        tuned=_tuned,
        gpu_bytes=80e9,
    )


def _tuned(config: TrainConfig, method: Method, num_replicas: int, fit: Kind | None) -> TrainConfig:
    """A paper's config at the hyperparameters of a method with M replicas.

    In arXiv 2503.09799 all of them are tuned. In 2501.18512 batch and η are those of the size, and the learning
    rate, which is not stated, is the law's.
    """
    tuned = hyperparameters(method, num_params(config), num_replicas, fit=fit)
    config = replace(config, optimizer=replace(config.optimizer, learning_rate=tuned.learning_rate))
    if config.model.vocab_size == 0:
        return config
    outer = tuned.outer_learning_rate or config.diloco.outer_learning_rate
    return replace(
        config,
        global_batch=tuned.sequences(num_replicas, config.sequence_length),
        diloco=replace(config.diloco, outer_learning_rate=outer),
    )


def num_params(config: TrainConfig) -> int:
    """N of a tier's config, whose model may have the vocabulary of a tokenizer that is not yet made."""
    return with_vocabulary(config).model.num_matrix_params


def with_vocabulary(config: TrainConfig) -> TrainConfig:
    """A tier's config with its tokenizer's vocabulary, where the model has none of its own."""
    kind, _, size = config.data.tokenizer.partition(":")
    vocab_size = config.model.vocab_size or (int(size) if kind == "bpe" else ByteTokenizer.vocab_size)
    return replace(config, model=replace(config.model, vocab_size=vocab_size))


C4 = ("hf:allenai/c4:en:train",)
DOLMA = ("hf:allenai/dolma:v1_7",)
"""The name of Dolma, by which runs are known; its files are downloaded, as it is loaded by a script."""
_LAWS_MULTIPLES = {"90M": (1, 4, 16), "330M": (1, 4, 16)}
"""Multiples of the token budgets in Figure 11 of arXiv 2503.09799."""

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

TIERS = {"small": small, "paper": paper}
"""Tiers by name; each takes sources of training and held-out text, and has its own where they are left out."""
