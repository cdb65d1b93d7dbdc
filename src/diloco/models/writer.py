"""Text that a model writes, token after token; its cache remembers those before.

Shapes: V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from diloco.errors import UserError
from diloco.models.language_model import LanguageModel, in_evaluation


class Writer:
    """A model that reads tokens and writes on, each token drawn from the likeliest ones given those before.

    It reads each token once. When the text outgrows `context`, it reads the last half of that anew. A model that
    offers no cache reads the last `context` tokens for each one that it writes.

    Args:
        model: tokens to logits.
        context: the most tokens that the model may read in one sequence.
        device: where the model is.
        vocab_size: the tokenizer's; the model may know more tokens than that.
        temperature: by which logits are divided; 0 takes the likeliest token.
        top_k: how many of the likeliest tokens are drawn from.
        seed: of the draws.

    Raises:
        UserError: if temperature or top_k is out of its range.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        context: int,
        device: torch.device = torch.device("cpu"),  # noqa: B008
        vocab_size: int | None = None,
        temperature: float = 1.0,
        top_k: int = 40,
        seed: int = 0,
    ) -> None:
        check_sampling(temperature, top_k)
        self._model, self._context, self._device, self._vocab_size = model, context, device, vocab_size
        self._temperature, self._top_k = temperature, top_k
        self._generator = torch.Generator().manual_seed(seed)
        self._cache, self._num_cached = model.new_cache(), 0
        self._tokens: list[int] = []

    def read(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text."""
        self._tokens += tokens

    def write(self) -> int:
        """The next token, which is added to the text; something must have been read before."""
        assert self._tokens, "a model writes after at least one token"
        token = self._chosen(self._logits())
        self._tokens.append(token)
        return token

    @torch.inference_mode()
    def _logits(self) -> Tensor:
        """The logits (V,) of the next token, on the CPU."""
        if self._cache is None:
            self._tokens, self._num_cached = self._tokens[-self._context :], 0
        elif len(self._tokens) > self._context:
            self._tokens = self._tokens[-max(1, self._context // 2) :]
            self._cache, self._num_cached = self._model.new_cache(), 0
        unread_1xT = torch.tensor([self._tokens[self._num_cached :]], dtype=torch.int64, device=self._device)
        self._num_cached = len(self._tokens)
        with in_evaluation(self._model):
            return self._model(unread_1xT, self._cache)[0, -1, : self._vocab_size].float().cpu()

    def _chosen(self, logits_V: Tensor) -> int:
        if self._temperature == 0:
            return int(logits_V.argmax())
        top = logits_V.topk(min(self._top_k, len(logits_V)))
        # The difference is at most 0: a quotient is 0 or -inf at worst, if FP32 does not round the divisor to 0.
        scaled = (top.values - top.values[0]) / max(self._temperature, torch.finfo(torch.float32).tiny)
        choice = torch.multinomial(scaled.softmax(dim=-1), 1, generator=self._generator)
        return int(top.indices[choice])


def check_sampling(temperature: float, top_k: int) -> None:
    """Refuse values that `Writer` can't take.

    Raises:
        UserError: if one is out of its range.
    """
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature={temperature} must be at least 0 and finite", "temperature")
    if top_k < 1:
        raise UserError(f"top_k={top_k} must be at least 1", "top_k")


def generate(writer: Writer, num_tokens: int, *, stop: int | None = None) -> Iterator[int]:
    """At most so many tokens that a writer writes on; the token `stop` ends them, and is not one of them."""
    for _ in range(num_tokens):
        token = writer.write()
        if token == stop:
            return
        yield token
