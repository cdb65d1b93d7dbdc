"""The contract of a model family: a config that is its size, and builds, names and exports its model. No torch.

A family is a subclass of `ModelConfig` and a subclass of `LanguageModel`, the module that the config builds;
`diloco.models.families` knows those of this package.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from diloco.errors import UserError
from diloco.files import write_json, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from diloco.models.language_model import LanguageModel

_MOST_LAYERS = 4096


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """The size of a model; each family adds its own fields.

    Raises:
        UserError: if a size is out of its range.
    """

    family: ClassVar[str]
    """The import path of the class, by which a stored config names it."""

    size_fields: ClassVar[tuple[str, ...]] = ("width", "num_layers", "vocab_size")
    """The fields that decide how large the model is, for refusals of too large ones."""

    replayed_fields: ClassVar[tuple[str, ...]] = ()
    """Fields in which replicas may differ, but not those that come and go: a replay of their log needs them."""

    num_layers: int
    """Transformer blocks."""
    width: int = field(metadata={"column": True})
    """D, of the residual stream."""
    vocab_size: int = 0
    """V; 0 takes the tokenizer's."""

    def __init_subclass__(cls) -> None:
        cls.family = f"{cls.__module__}.{cls.__qualname__}"

    def __post_init__(self) -> None:
        """Refuse sizes out of range; a family checks its own fields after these."""
        for name, least in (("num_layers", 1), ("width", 1), ("vocab_size", 0)):
            self._check_at_least(name, least)
        if self.num_layers > _MOST_LAYERS:
            raise UserError(
                f"model.num_layers={self.num_layers} must be at most {_MOST_LAYERS}", "model.num_layers"
            )

    def _check_at_least(self, name: str, least: int) -> None:
        if (value := getattr(self, name)) < least:
            raise UserError(f"model.{name}={value} must be at least {least}", f"model.{name}")

    @abstractmethod
    def build(self, *, seed: int) -> "LanguageModel":
        """The model, its parameters drawn by `seed`, on the current default device; `vocab_size` is above 0."""

    def initial(self, *, seed: int) -> "LanguageModel":
        """The model with which a run begins; another one than `build` gives where training starts from weights."""
        return self.build(seed=seed)

    def fitted(self, *, vocab_size: int, sequence_length: int) -> Self:
        """This config for a tokenizer's vocabulary and sequences of a length.

        Raises:
            UserError: if the model's vocabulary is smaller than the tokenizer's, or much larger, or if it can't
                read so long a sequence.
        """
        if self.vocab_size and self.vocab_size < vocab_size:
            raise UserError(
                f"model.vocab_size={self.vocab_size} is smaller than the tokenizer's {vocab_size}: leave it 0, or "
                "choose another data.tokenizer",
                *("model.vocab_size", "data.tokenizer"),
            )
        if self.vocab_size > 2 * vocab_size:
            raise UserError(
                f"model.vocab_size={self.vocab_size} is more than twice the tokenizer's {vocab_size}, so that "
                "most of it would never be read: choose another data.tokenizer, and text in data.train, or leave "
                "it 0",
                *("model.vocab_size", "data.tokenizer", "data.train"),
            )
        return replace(self, vocab_size=self.vocab_size or vocab_size)

    def check_tensor_parallel(self, number: int) -> None:
        """Refuse to compute each matrix on as many processes together; a family that can does not.

        Raises:
            UserError: with the remedy.
        """
        if number > 1:
            raise UserError(
                f"tensor_parallel={number} with a model of {self.family}, which has no plan for it: leave it out, "
                "and raise shards_per_replica",
                *("tensor_parallel", "shards_per_replica"),
            )

    @property
    @abstractmethod
    def num_matrix_params(self) -> int:
        """The parameters that scaling laws count: all but gains and biases."""

    @property
    def num_params(self) -> int:
        """All parameters; a family whose model has gains or biases adds them."""
        return self.num_matrix_params

    @property
    def least_bytes(self) -> int:
        """The parameters take at least this memory."""
        return 4 * self.num_matrix_params

    @property
    def num_trained_params(self) -> int:
        """The parameters that are trained, and so exchanged."""
        return self.num_params

    @property
    def slow_imports(self) -> tuple[str, ...]:
        """Modules that each process needs to build the model, and that take a second to import."""
        return ()

    def flops_per_token(self, sequence_length: int) -> float:
        """Operations of a forward and backward pass for a token: 6 N + 12 L D T (arXiv 2204.02311, appendix B).

        The scores of attention are counted whole, as there, though a causal mask needs half of them.
        """
        return 6.0 * self.num_matrix_params + 12.0 * self.num_layers * self.width * sequence_length

    def to_hugging_face(
        self, state: Mapping[str, "Tensor"], *, context: int, bos_id: int
    ) -> tuple[dict[str, Any], dict[str, "Tensor"]]:
        """The contents of `config.json` and `model.safetensors` for a stock class of `transformers`.

        Args:
            state: the model's `state_dict()`.
            context: tokens in the sequences that it was trained on.
            bos_id: the token that precedes each document.

        Raises:
            UserError: if no stock class computes this family's function.
        """
        raise UserError(
            f"transformers has no class that computes {type(self).__name__}'s model: take to=safetensors", "to"
        )

    def published_name(self, name: str) -> str:
        """The name by which programs that follow a run know a parameter."""
        return name

    def export(
        self, model: "LanguageModel", directory: Path, *, context: int, bos_id: int, merged: bool = False
    ) -> str:
        """Write a model, but not its tokenizer, as `transformers` loads it.

        Args:
            model: of this family.
            directory: to write to.
            context: as in `to_hugging_face`.
            bos_id: as in `to_hugging_face`.
            merged: write a whole model where adapters of one were trained.

        Returns:
            A sentence about it.

        Raises:
            UserError: as `to_hugging_face`, and for a model without adapters that is to be merged.
        """
        if merged:
            raise UserError("merged means nothing to a model that has no adapters: leave it out", "merged")
        values, state = self.to_hugging_face(model.state_dict(), context=context, bos_id=bos_id)
        write_tensors(directory / "model.safetensors", state, {"format": "pt"})
        write_json(directory / "config.json", values)
        return f"`{values['architectures'][0]}` computes the same function as diloco's model."
