import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from diloco.evaluation.held_out import held_out_loss, sequence_losses
from diloco.models.language_model import LanguageModel

CPU = torch.device("cpu")


class Bigrams(LanguageModel):
    """A model whose logits are a row of a table: that of the last token."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, tokens, cache=None):
        return self.table[tokens]


def test_a_uniform_model_needs_log2_of_the_vocabulary():
    losses = sequence_losses(Bigrams(torch.zeros(8, 8)), [np.zeros((2, 5), np.int64)] * 3, CPU)
    result = held_out_loss(losses, sequence_length=4, bytes_per_token=1.5)
    assert result.loss == pytest.approx(math.log(8))
    assert result.bits_per_byte == pytest.approx(3 / 1.5)
    assert (result.num_tokens, result.standard_error) == (24, pytest.approx(0, abs=1e-7))


def test_mean_and_standard_error_are_those_of_the_sequences():
    rng = np.random.default_rng(0)
    table = torch.from_numpy(rng.normal(size=(8, 8)).astype(np.float32))
    windows = rng.integers(0, 8, (5, 4))
    result = held_out_loss(
        sequence_losses(Bigrams(table), [windows[:3], windows[3:]], CPU), sequence_length=3, bytes_per_token=1
    )
    log_probabilities = table.log_softmax(-1).numpy()
    losses = [np.mean([-log_probabilities[a, b] for a, b in pairwise(w)]) for w in windows]
    assert result.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert result.standard_error == pytest.approx(np.std(losses, ddof=1) / math.sqrt(5), rel=1e-4)


def test_dropout_is_off_while_a_model_is_evaluated():
    model = Bigrams(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    model.dropout = torch.nn.Dropout(0.5)
    model.frozen = torch.nn.Dropout(0.5).eval()
    model.forward = lambda tokens, cache=None: model.dropout(model.table[tokens])
    batches = [np.arange(6).reshape(1, 6)]
    assert sequence_losses(model, batches, CPU) == sequence_losses(Bigrams(model.table), batches, CPU)
    assert (model.training, model.dropout.training, model.frozen.training) == (True, True, False)
