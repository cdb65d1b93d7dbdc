"""Held-out loss in nats a token and bits a byte."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diloco.models.decoder import next_token_loss


@dataclass(frozen=True)
class HeldOutLoss:
    """How well a model predicts text that it was not trained on."""

    loss: float
    """Mean cross-entropy, nats a token."""
    standard_error: float
    """Of the loss, over sequences."""
    bits_per_byte: float
    """Nats a token · tokens a byte of the text / ln 2; tokens that begin documents cost bits and hold no byte."""
    num_tokens: int
    """Tokens predicted."""


def held_out_loss(
    forward: Callable[[Tensor], Tensor],
    batches: Iterable[np.ndarray],
    *,
    bytes_per_token: float,
    device: torch.device,
) -> HeldOutLoss:
    """Evaluate a model on windows of tokens.

    Args:
        forward: tokens (B, T) to logits (B, T, V).
        batches: int64 arrays (B, T+1): T tokens and, shifted by one, their targets.
        bytes_per_token: UTF-8 bytes of the text for each of its tokens.
        device: where the model is.

    Raises:
        ValueError: if there is no batch.
    """
    losses: list[float] = []
    num_tokens = 0
    with torch.inference_mode():
        for batch in batches:
            window_BxT1 = torch.from_numpy(batch).to(device)
            logits_BxTxV = forward(window_BxT1[:, :-1])
            for logits_TxV, window_T1 in zip(logits_BxTxV, window_BxT1, strict=True):
                losses.append(next_token_loss(logits_TxV[None], window_T1[None, 1:])[0].item())
            num_tokens += window_BxT1[:, 1:].numel()
    if not losses:
        raise ValueError("there is no held-out text to evaluate on: give some with --data.held-out")
    mean = float(np.mean(losses))
    spread = float(np.std(losses, ddof=1)) if len(losses) > 1 else math.nan
    return HeldOutLoss(mean, spread / math.sqrt(len(losses)), mean / bytes_per_token / math.log(2), num_tokens)
