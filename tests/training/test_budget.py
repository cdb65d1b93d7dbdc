import math
from dataclasses import replace

import pytest

from diloco.errors import UserError
from diloco.training.config.recipes import tiny
from diloco.training.config.resolve import Budget, epochs, parse_tokens, with_budget

SIZED = replace(tiny(), model=replace(tiny().model, vocab_size=257))
STEP = 8 * 64


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("30720", 30_720),
        ("1e6", 1e6),
        ("1M", 1e6),
        ("2.5k", 2500),
        ("1,000,000", 1e6),
        ("3G", 3e9),
        ("3b", 3e9),
        ("20x", 20 * SIZED.model.num_matrix_params),
        ("0.5X", 0.5 * SIZED.model.num_matrix_params),
    ],
)
def test_a_budget_is_tokens_or_a_multiple_of_the_parameters(text, tokens):
    assert parse_tokens(text).num_tokens(SIZED, epoch_tokens=1) == pytest.approx(tokens)


@pytest.mark.parametrize("text", ["", "x", "1MB", "-1", "1e", "nan", "M1", "1 x", "0", "0x", "1e999"])
def test_a_text_that_is_no_budget_is_refused(text):
    with pytest.raises(UserError, match=rf"num_tokens={text} ") as refusal:
        parse_tokens(text)
    assert refusal.value.field == "num_tokens"


@pytest.mark.parametrize("number", [0.0, -1.0, math.nan, math.inf])
def test_epochs_are_above_zero(number):
    with pytest.raises(UserError, match=r"epochs=.* must be above 0 and finite"):
        epochs(number)


@pytest.mark.parametrize(
    ("budget", "num_steps"),
    [
        (Budget(100.4 * STEP, "tokens"), 100),
        (Budget(100.6 * STEP, "tokens"), 101),
        (Budget(STEP, "tokens"), 1),
        (Budget(3, "epochs"), round(3 * 12_345 / STEP)),
    ],
)
def test_a_budget_is_rounded_to_the_nearest_whole_step(budget, num_steps):
    assert with_budget(SIZED, budget, epoch_tokens=12_345) == replace(SIZED, num_tokens=num_steps * STEP)


def test_a_budget_without_a_step_or_beyond_all_runs_is_refused():
    with pytest.raises(UserError, match=r"7 tokens are less than half a step of .*=512 tokens"):
        with_budget(SIZED, Budget(7, "tokens"), epoch_tokens=1)
    with pytest.raises(UserError, match=r"more than any run can take"):
        with_budget(SIZED, Budget(1e30, "tokens a parameter"), epoch_tokens=1)
