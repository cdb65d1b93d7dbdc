"""Likelihoods that a model gives to text: its loss on held-out sequences, and those of continuations.

Continuations are scored in batches, each distinct context read once.

Shapes: B sequences, T tokens; G contexts of T tokens; R continuations of them, the longest of U + 1 tokens; V
vocabulary.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from diloco.errors import UserError
from diloco.models.language_model import LanguageModel, in_evaluation


@dataclass(frozen=True)
class HeldOutLoss:
    """The loss of a model on text that it was not trained on."""

    loss: float
    """Mean cross-entropy, nats per token."""
    standard_error: float | None
    """Standard error of the loss, over sequences; None for a single sequence."""
    bits_per_byte: float
    """loss · tokens per byte / ln 2; the tokens that begin documents cost bits and hold no byte."""
    num_tokens: int
    """Number of tokens that were predicted."""


def sequence_losses(model: LanguageModel, batches: Iterable[np.ndarray], device: torch.device) -> list[float]:
    """Mean cross-entropy of each sequence, nats per token.

    Args:
        model: whose loss is measured.
        batches: int64 arrays (B, T+1): T tokens and, shifted by one, their targets.
        device: where the model is.
    """
    losses: list[float] = []
    with torch.inference_mode(), in_evaluation(model):
        for batch in batches:
            window_BxT1 = torch.from_numpy(batch).to(device)
            logits_BxTxV = model(window_BxT1[:, :-1])
            for logits_TxV, window_T1 in zip(logits_BxTxV, window_BxT1, strict=True):
                losses.append(model.loss(logits_TxV[None], window_T1[None, 1:])[0].item())
    return losses


def held_out_loss(losses: Sequence[float], *, sequence_length: int, bytes_per_token: float) -> HeldOutLoss:
    """The mean loss over sequences of equal length.

    Args:
        losses: mean cross-entropy of each sequence, nats per token.
        sequence_length: tokens predicted in each.
        bytes_per_token: UTF-8 bytes of the text divided by its tokens.

    >>> held_out_loss([2.0, 3.0], sequence_length=8, bytes_per_token=1.0)
    HeldOutLoss(loss=2.5, standard_error=0.5, bits_per_byte=3.6067376022224087, num_tokens=16)
    """
    mean = float(np.mean(losses))
    error = float(np.std(losses, ddof=1)) / math.sqrt(len(losses)) if len(losses) > 1 else None
    return HeldOutLoss(mean, error, mean / bytes_per_token / math.log(2), sequence_length * len(losses))


class Likelihood(NamedTuple):
    """The likelihood of a continuation, given its context."""

    log_likelihood: float
    """Nats."""
    is_greedy: bool
    """True if each of its tokens is the likeliest."""


def likelihoods(
    model: LanguageModel,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    max_length: int,
    device: torch.device,
    batch_tokens: int = 4096,
) -> list[Likelihood]:
    """The likelihood of each (context, continuation), both at least a token long.

    Contexts of equal length are read together, and a context that several continuations share is read once, unless
    they are more than one pass takes. A context that is too long loses its beginning; a continuation of more than
    half of `max_length` is scored in parts.

    Args:
        model: a model that offers a cache.
        requests: token ids of each context and continuation.
        max_length: the most tokens that the model may read in one sequence.
        device: where the model is.
        batch_tokens: the most tokens in one forward pass, unless a single request has more.

    Raises:
        UserError: if a continuation has no token, or the model offers no cache.
    """
    parts = [part for index, request in enumerate(requests) for part in _parts(index, request, max_length)]
    totals = [Likelihood(0.0, True)] * len(requests)
    with torch.inference_mode(), in_evaluation(model):
        for group in _batches(parts, batch_tokens):
            for (index, *_), part in zip(group, _score(model, group, device), strict=True):
                before = totals[index]
                totals[index] = Likelihood(
                    before.log_likelihood + part.log_likelihood, before.is_greedy and part.is_greedy
                )
    return totals


_Part = tuple[int, tuple[int, ...], tuple[int, ...]]  # index of the request, context, continuation


def _parts(index: int, request: tuple[Sequence[int], Sequence[int]], max_length: int) -> Iterator[_Part]:
    """The parts of a request's continuation that fit beside some context, each with what comes before it."""
    context, continuation = tuple(request[0]), tuple(request[1])
    if not continuation:
        raise UserError(f"request {index}: its continuation has no token: give it text")
    size = len(continuation) if len(continuation) <= max_length // 2 else max(1, max_length // 2)
    for start in range(0, len(continuation), size):
        part, before = continuation[start : start + size], context + continuation[:start]
        yield index, before[-(max_length + 1 - len(part)) :], part


def _batches(parts: list[_Part], batch_tokens: int) -> Iterator[list[_Part]]:
    """Groups of parts whose contexts have one length; parts with the same context are neighbours.

    A group has one part, or at most `batch_tokens` tokens, those that fill up shorter continuations included.
    """
    group: list[_Part] = []
    context_tokens = longest = 0
    for part in sorted(parts, key=lambda part: (len(part[1]), part[1], len(part[2]))):
        _, context, continuation = part
        new_tokens = 0 if group and context == group[-1][1] else len(context)
        padded_tokens = (len(group) + 1) * max(longest, len(continuation))
        is_full = context_tokens + new_tokens + padded_tokens > batch_tokens
        if group and (is_full or len(context) != len(group[-1][1])):
            yield group
            group, context_tokens, longest, new_tokens = [], 0, 0, len(context)
        context_tokens, longest = context_tokens + new_tokens, max(longest, len(continuation))
        group.append(part)
    if group:
        yield group


def _score(model: LanguageModel, group: list[_Part], device: torch.device) -> list[Likelihood]:
    """The likelihoods of parts whose contexts have one length: each is read once, then the continuations."""
    contexts = list(dict.fromkeys(context for _, context, _ in group))
    row_of = {context: row for row, context in enumerate(contexts)}
    rows_R = torch.tensor([row_of[context] for _, context, _ in group], dtype=torch.int64, device=device)
    longest = max(len(continuation) for *_, continuation in group)
    targets_RxU1 = torch.zeros(len(group), longest, dtype=torch.int64, device="cpu")
    for row, (*_, continuation) in enumerate(group):
        targets_RxU1[row, : len(continuation)] = torch.tensor(continuation, dtype=torch.int64, device="cpu")
    targets_RxU1 = targets_RxU1.to(device)

    cache = model.new_cache()
    if cache is None:
        raise UserError(
            f"{type(model).__name__} offers no cache: zero-shot tasks can't be scored with it", "tasks"
        )
    logits_RxU1xV = model(torch.tensor(contexts, dtype=torch.int64, device=device), cache)[:, -1:][rows_R]
    if longest > 1:
        following_RxUxV = model(targets_RxU1[:, :-1], cache.select(rows_R))
        logits_RxU1xV = torch.cat([logits_RxU1xV, following_RxUxV], dim=1)
    log_p_RxU1xV = logits_RxU1xV.float().log_softmax(dim=-1)
    chosen_RxU1 = log_p_RxU1xV.gather(-1, targets_RxU1[..., None]).squeeze(-1).cpu().double()
    greedy_RxU1 = (log_p_RxU1xV.argmax(dim=-1) == targets_RxU1).cpu()
    lengths = [len(continuation) for *_, continuation in group]
    return [
        Likelihood(chosen_RxU1[row, :length].sum().item(), bool(greedy_RxU1[row, :length].all()))
        for row, length in enumerate(lengths)
    ]
