"""Text that a model writes: with its cache the same tokens as without, until the context is full and after."""

import math
from collections import Counter
from itertools import islice

import pytest
import torch

from diloco.models.decoder_config import DecoderConfig
from diloco.models.writer import Writer, _Choice, generate, write_together

VOCABULARY = 11


@pytest.fixture(scope="module")
def model():
    return DecoderConfig(num_layers=2, num_heads=2, width=16, vocab_size=VOCABULARY).build(seed=0)


def logits_after(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens]))[0, -1]


def written(model, prompt, num_tokens, **options):
    writer = Writer(model, **{"context": 64, "temperature": 0, **options})
    writer.read(prompt)
    return [*generate(writer, num_tokens)]


def test_each_token_is_the_likeliest_after_all_before_it(model):
    tokens = [1, 2]
    for _ in range(20):
        tokens.append(int(logits_after(model, tokens).argmax()))
    assert written(model, [1, 2], 20) == tokens[2:]
    assert written(model, [1, 2], 20, temperature=1.0, top_k=1) == tokens[2:]


def test_a_text_read_in_parts_is_one_text(model):
    writer = Writer(model, context=64, temperature=0)
    writer.read([1, 2])
    first = [*generate(writer, 5)]
    writer.read([3, 4])
    assert [*generate(writer, 5)] == written(model, [1, 2, *first, 3, 4], 5)


def test_a_text_that_outgrows_the_context_goes_on_after_its_last_half(model):
    context, tokens = 8, [*range(6)]
    expected = []
    for _ in range(12):
        tokens = tokens if len(tokens) <= context else tokens[-context // 2 :]
        expected.append(int(logits_after(model, tokens).argmax()))
        tokens.append(expected[-1])
    assert written(model, range(6), 12, context=context) == expected
    assert written(model, [5] * 9 + [*range(4)], 3, context=context) == written(model, [*range(4)], 3)


def test_a_model_without_a_cache_writes_the_same(model, monkeypatch):
    expected = written(model, [1, 2], 10)
    monkeypatch.setattr(type(model), "new_cache", lambda _: None)
    assert written(model, [1, 2], 10) == expected


def test_tokens_are_drawn_from_the_likeliest_by_their_probabilities(model):
    choice = _Choice(temperature=0.5, top_k=3, seed=1)
    logits = logits_after(model, [1, 2])
    draws = Counter(choice.of(logits) for _ in range(4000))
    top = logits.topk(3)
    assert set(draws) == set(top.indices.tolist())
    for token, probability in zip(top.indices.tolist(), (top.values / 0.5).softmax(-1).tolist(), strict=True):
        assert draws[token] / 4000 == pytest.approx(probability, abs=4 * math.sqrt(0.25 / 4000))


def test_a_seed_repeats_its_draws_and_tokens_beyond_the_tokenizers_are_never_drawn(model):
    one, same, other = (written(model, [1], 30, temperature=1.0, seed=seed, vocab_size=7) for seed in (3, 3, 4))
    assert one == same != other and max(one) < 7


def test_the_stop_token_ends_the_text_and_is_no_part_of_it(model):
    text = written(model, [1, 2], 20)
    writer = Writer(model, context=64, temperature=0)
    writer.read([1, 2])
    stop = text[3]
    assert [*generate(writer, 20, stop=stop)] == [*islice(text, text.index(stop))]


@pytest.mark.parametrize("temperature", [1e-40, 1e-320])
def test_a_temperature_near_zero_takes_the_likeliest(model, temperature):
    assert written(model, [1, 2], 5, temperature=temperature) == written(model, [1, 2], 5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("context", [8, 64])
def test_texts_written_together_are_those_written_alone(model, temperature, context):
    prompts, options = [[1, 2], [3], [4, 5, 6, 7, 8]], {"context": context, "temperature": temperature}
    alone = [written(model, prompt, 20, **options, seed=3 + n) for n, prompt in enumerate(prompts)]
    together = {**options, "device": torch.device("cpu"), "seed": 3}
    assert write_together(model, prompts, 20, **together) == alone
    stop = alone[0][4]
    until_stop = [text[: [*text, stop].index(stop)] for text in alone]
    assert write_together(model, prompts, 20, **together, stop=stop) == until_stop
    assert write_together(model, prompts, 20, **together, until=0.0) == [[], [], []]
