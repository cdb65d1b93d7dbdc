"""Text that a model writes, token after token; its cache remembers those before.

Shapes: B texts, T tokens, V vocabulary.
"""

import math
import time
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
        self._choice = _Choice(temperature, top_k, seed)
        self._texts = _Texts(model, [[]], context=context, device=device, vocab_size=vocab_size)

    def read(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text."""
        self._texts.add([tokens])

    def write(self) -> int:
        """The next token, which is added to the text; something must have been read before."""
        token = self._choice.of(self._texts.logits()[0])
        self._texts.add([[token]])
        return token


class _Texts:
    """Texts of equal length that a model reads together; its cache remembers what it has read of them."""

    def __init__(
        self,
        model: LanguageModel,
        texts: Sequence[Sequence[int]],
        *,
        context: int,
        device: torch.device,
        vocab_size: int | None,
    ) -> None:
        self._model, self._context, self._device, self._vocab_size = model, context, device, vocab_size
        self._texts = [list(text) for text in texts]
        self._cache, self._num_cached = model.new_cache(), 0

    def add(self, tokens: Sequence[Sequence[int]]) -> None:
        """Add as many tokens to each text."""
        for text, more in zip(self._texts, tokens, strict=True):
            text += more

    @torch.inference_mode()
    def logits(self) -> Tensor:
        """The logits (B, V) of the next token of each text, on the CPU."""
        length = len(self._texts[0])
        assert length, "a model writes after at least one token"
        if self._cache is None:
            self._keep(self._context)
        elif length > self._context:
            self._keep(max(1, self._context // 2))
            self._cache = self._model.new_cache()
        unread = [text[self._num_cached :] for text in self._texts]
        self._num_cached = len(self._texts[0])
        with in_evaluation(self._model):
            unread_BxT = torch.tensor(unread, dtype=torch.int64, device=self._device)
            return self._model(unread_BxT, self._cache)[:, -1, : self._vocab_size].float().cpu()

    def _keep(self, num_tokens: int) -> None:
        """Keep the last tokens of each text, none of which was read."""
        self._texts, self._num_cached = [text[-num_tokens:] for text in self._texts], 0


class _Choice:
    """The choice of a token by its logits; arguments and errors as those of `Writer`."""

    def __init__(self, temperature: float, top_k: int, seed: int) -> None:
        check_sampling(temperature, top_k)
        self._temperature, self._top_k = temperature, top_k
        self._generator = torch.Generator().manual_seed(seed)

    def of(self, logits_V: Tensor) -> int:
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


def write_together(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    context: int,
    device: torch.device,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    top_k: int = 40,
    seed: int = 0,
    stop: int | None = None,
    until: float = math.inf,
) -> list[list[int]]:
    """The tokens that a model writes after each of several prompts: all of them in the passes that one takes.

    Each is what a `Writer` of its own writes, to rounding, if no prompt is longer than the context. While one is
    still read, the shorter ones are written on.

    Args:
        model: tokens to logits.
        prompts: of at least one token each.
        num_tokens: at most so many are written after each.
        context: as of `Writer`, like those below.
        device: where the model is.
        vocab_size: the tokenizer's.
        temperature: by which logits are divided.
        top_k: how many of the likeliest tokens are drawn from.
        seed: of the draws after the first prompt; those after the others have the next ones.
        stop: the token that ends a text, and is not one of its tokens.
        until: time of `time.monotonic` at which all texts end.

    Raises:
        UserError: if temperature or top_k is out of its range.
    """
    num_read = min(map(len, prompts))
    begun = [prompt[:num_read] for prompt in prompts]
    texts = _Texts(model, begun, context=context, device=device, vocab_size=vocab_size)
    choices = [_Choice(temperature, top_k, seed + number) for number in range(len(prompts))]
    written: list[list[int]] = [[] for _ in prompts]
    is_open = [num_tokens > 0] * len(prompts)
    while any(is_open) and time.monotonic() < until:
        logits, tokens = texts.logits(), list[int]()
        for number, (prompt, choice) in enumerate(zip(prompts, choices, strict=True)):
            if num_read < len(prompt):
                tokens.append(prompt[num_read])
                continue
            tokens.append(choice.of(logits[number]))
            if is_open[number] and tokens[-1] != stop:
                written[number].append(tokens[-1])
            is_open[number] &= tokens[-1] != stop and len(written[number]) < num_tokens
        texts.add([[token] for token in tokens])
        num_read += 1
    return written
