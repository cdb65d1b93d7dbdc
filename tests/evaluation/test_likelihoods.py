import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from diloco.errors import UserError
from diloco.evaluation.likelihoods import held_out_loss, likelihoods, sequence_losses
from diloco.models.decoder import Decoder
from diloco.models.decoder_config import DecoderConfig
from diloco.models.language_model import LanguageModel

CPU = torch.device("cpu")
MODEL = DecoderConfig(num_layers=2, num_heads=2, width=16, vocab_size=13).build(seed=3)


def directly(context: list[int], continuation: list[int], max_length: int) -> tuple[float, bool]:
    """One forward pass over the last `max_length` tokens of both."""
    tokens = torch.tensor([(context + continuation)[-(max_length + 1) :]])
    with torch.no_grad():
        log_p_TxV = MODEL(tokens[:, :-1])[0].log_softmax(-1)[-len(continuation) :]
    targets = torch.tensor(continuation)
    chosen = log_p_TxV[range(len(continuation)), targets].double()
    return chosen.sum().item(), bool((log_p_TxV.argmax(-1) == targets).all())


def requests(seed: int, number: int) -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(seed)

    def some(most: int) -> list[int]:
        length = int(torch.randint(1, most + 1, (), generator=generator))
        return torch.randint(0, 13, (length,), generator=generator).tolist()

    contexts = [some(12) for _ in range(number)]
    return [
        (context, some(6))
        for context in contexts
        for _ in range(int(torch.randint(1, 5, (), generator=generator)))
    ]


@pytest.mark.parametrize("batch_tokens", [1, 50, 4096])
def test_each_likelihood_is_that_of_a_forward_pass_alone(batch_tokens):
    pairs = requests(seed=0, number=20)
    with torch.no_grad():  # one whose every token is the likeliest
        greedy = [int(MODEL(torch.tensor([[1, 2, 3]]))[0, -1].argmax())]
        greedy.append(int(MODEL(torch.tensor([[1, 2, 3, *greedy]]))[0, -1].argmax()))
    pairs.append(([1, 2, 3], greedy))
    scores = likelihoods(MODEL, pairs, max_length=64, device=CPU, batch_tokens=batch_tokens)
    for (context, continuation), (log_likelihood, is_greedy) in zip(pairs, scores, strict=True):
        expected = directly(context, continuation, 64)
        assert log_likelihood == pytest.approx(expected[0], abs=1e-5) and is_greedy == expected[1]
    assert scores[-1].is_greedy and not all(likelihood.is_greedy for likelihood in scores)


def test_a_context_that_is_too_long_loses_its_beginning():
    pairs = [(list(range(13)) * 2, [4, 5, 6]), ([1] * 30, [2]), ([3], [1, 2, 3])]
    scores = likelihoods(MODEL, pairs, max_length=8, device=CPU)
    for (context, continuation), (log_likelihood, _) in zip(pairs, scores, strict=True):
        assert log_likelihood == pytest.approx(directly(context, continuation, 8)[0], abs=1e-5)


def test_a_continuation_that_is_long_itself_is_scored_in_parts():
    context, continuation = [7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    expected = sum(
        directly(context + continuation[:first], continuation[first : first + 4], 8)[0] for first in (0, 4, 8)
    )
    (score,) = likelihoods(MODEL, [(context, continuation)], max_length=8, device=CPU)
    assert score.log_likelihood == pytest.approx(expected, abs=1e-5)


def test_a_continuation_without_a_token_is_refused():
    with pytest.raises(ValueError, match="request 1: its continuation has no token"):
        likelihoods(MODEL, [([1], [2]), ([1], [])], max_length=8, device=CPU)


def test_a_context_that_is_shared_is_read_once():
    model = Recording()
    context = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    likelihoods(model, [(context, [1, 2, 3]), (context, [4, 5]), (context, [6])] * 2, max_length=64, device=CPU)
    assert model.num_tokens == [9, 6 * 2]


class Recording(Decoder):
    """A decoder that notes the tokens of each pass."""

    def __init__(self) -> None:
        super().__init__(num_layers=2, num_heads=2, width=16, vocab_size=13, seed=3)
        self.num_tokens: list[int] = []

    def forward(self, tokens_BxT, cache=None):
        self.num_tokens.append(tokens_BxT.numel())
        return super().forward(tokens_BxT, cache)


@pytest.mark.parametrize(
    "pairs",
    [
        [([1], [i % 13] * 11) for i in range(300)],  # one context, as where every request begins with BOS alone
        [([1, i % 13], [2] * (100 if i == 250 else 1)) for i in range(300)],  # one long continuation
    ],
)
def test_no_pass_has_more_tokens_than_are_allowed(pairs):
    model = Recording()
    scores = likelihoods(model, pairs, max_length=256, device=CPU, batch_tokens=200)
    assert max(model.num_tokens) <= 200
    for pair, score in list(zip(pairs, scores, strict=True))[::50]:
        assert score.log_likelihood == pytest.approx(directly(*pair, 256)[0], abs=1e-4)


class Bigrams(LanguageModel):
    """A model whose logits are a row of a table: that of the last token."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, tokens, cache=None):
        return self.table[tokens]


def test_a_model_without_a_cache_is_refused():
    with pytest.raises(UserError, match="Bigrams offers no cache"):
        likelihoods(Bigrams(torch.zeros(8, 8)), [([1], [2])], max_length=8, device=CPU)


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
