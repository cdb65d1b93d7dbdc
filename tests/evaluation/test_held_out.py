import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from diloco.evaluation.held_out import held_out_loss

CPU = torch.device("cpu")


def uniform(tokens):
    return torch.zeros(*tokens.shape, 8)


def test_a_uniform_model_needs_log2_of_the_vocabulary():
    found = held_out_loss(uniform, [np.zeros((2, 5), np.int64)] * 3, bytes_per_token=1.5, device=CPU)
    assert found.loss == pytest.approx(math.log(8))
    assert found.bits_per_byte == pytest.approx(3 / 1.5)
    assert (found.num_tokens, found.standard_error) == (24, pytest.approx(0, abs=1e-7))


def test_mean_and_standard_error_are_those_of_the_sequences():
    rng = np.random.default_rng(0)
    table = torch.from_numpy(rng.normal(size=(8, 8)).astype(np.float32))
    windows = rng.integers(0, 8, (5, 4))
    found = held_out_loss(lambda t: table[t], [windows[:3], windows[3:]], bytes_per_token=1, device=CPU)
    log_probabilities = table.log_softmax(-1).numpy()
    losses = [np.mean([-log_probabilities[a, b] for a, b in pairwise(w)]) for w in windows]
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert found.standard_error == pytest.approx(np.std(losses, ddof=1) / math.sqrt(5), rel=1e-4)


def test_no_text_is_refused():
    with pytest.raises(ValueError, match="no held-out text"):
        held_out_loss(uniform, [], bytes_per_token=1, device=CPU)
