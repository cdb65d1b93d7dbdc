"""The module of a model family: its base class, with the default loss.

Shapes: B sequences, T tokens, V vocabulary, R rows taken from B.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn

from diloco.models.cross_entropy import cross_entropy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@runtime_checkable
class Cache(Protocol):
    """A model's memory of the tokens that it has read in each of B sequences."""

    def select(self, rows_R: Tensor) -> "Cache":
        """A cache of R sequences, each a copy of one of the B."""
        ...


class LanguageModel(nn.Module):
    """Tokens to the logits of the next token."""

    blocks: nn.ModuleList
    """The transformer blocks, from which fragments are made and which are sharded one by one."""

    def forward(self, tokens_BxT: Tensor, cache: Any = None) -> Tensor:
        """The logits (B, T, V) of the next token at each position.

        Args:
            tokens_BxT: int64.
            cache: of this model's `new_cache`; the tokens then follow those read before, and are added to it.
        """
        raise NotImplementedError

    def new_cache(self) -> Cache | None:
        """An empty cache, with which text is written and zero-shot tasks are scored; None if there is none."""
        return None

    def parallelize(self, mesh: "DeviceMesh") -> None:
        """Cut the matrices over the processes of a mesh of one dimension, which compute on the same tokens.

        Every parameter is a DTensor on the mesh then; a family has it that `check_tensor_parallel` lets through.
        """
        raise NotImplementedError

    def loss(
        self, logits_BxTxV: Float[Tensor, "B T V"], targets_BxT: Int64[Tensor, "B T"], z_loss: float = 0.0
    ) -> tuple[Float32[Tensor, ""], Float32[Tensor, ""]]:
        """Mean cross-entropy in nats per token, to report, and the objective to train on, with the z-loss."""
        return cross_entropy(logits_BxTxV.flatten(0, -2), targets_BxT.flatten(), z_loss)


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """A context without what a model does in training only, such as dropout."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
