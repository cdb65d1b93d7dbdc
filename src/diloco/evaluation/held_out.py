"""Held-out loss in nats a token and bits a byte."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from diloco.models.language_model import LanguageModel, in_evaluation


@dataclass(frozen=True)
class HeldOutLoss:
    """The loss of a model on text that it was not trained on."""

    loss: float
    """Mean cross-entropy, nats a token."""
    standard_error: float | None
    """Standard error of the loss, over sequences; None for a single sequence."""
    bits_per_byte: float
    """loss · tokens a byte / ln 2; the tokens that begin documents cost bits and hold no byte."""
    num_tokens: int
    """Number of tokens that were predicted."""


def sequence_losses(model: LanguageModel, batches: Iterable[np.ndarray], device: torch.device) -> list[float]:
    """Mean cross-entropy of each sequence, nats a token.

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
        losses: mean cross-entropy of each sequence, nats a token.
        sequence_length: tokens predicted in each.
        bytes_per_token: UTF-8 bytes of the text divided by its tokens.

    >>> held_out_loss([2.0, 3.0], sequence_length=8, bytes_per_token=1.0)
    HeldOutLoss(loss=2.5, standard_error=0.5, bits_per_byte=3.6067376022224087, num_tokens=16)
    """
    mean = float(np.mean(losses))
    error = float(np.std(losses, ddof=1)) / math.sqrt(len(losses)) if len(losses) > 1 else None
    return HeldOutLoss(mean, error, mean / bytes_per_token / math.log(2), sequence_length * len(losses))
