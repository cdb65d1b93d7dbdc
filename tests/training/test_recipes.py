from pathlib import Path

import pytest

from diloco.training.config.recipes import RECIPES, scaling_laws
from diloco.training.config.resolve import resolve


def test_every_recipe_is_a_run_that_can_be_resolved():
    for recipe in RECIPES.values():
        config = recipe()
        vocab_size = config.model.vocab_size or 257
        assert resolve(config, vocab_size=vocab_size, prepared=Path("p")).num_steps == config.num_steps > 0


def test_the_ladder_recipes_follow_the_published_power_laws():
    config = scaling_laws("35M", num_replicas=2)
    assert config.optimizer.learning_rate == pytest.approx(0.0059, rel=0.01)
    assert config.global_batch == 32
    assert config.num_tokens == pytest.approx(20 * 35_651_584, rel=1e-3)
    # 36.2 sequences are 12.1 of each of three replicas, 2^3.6
    assert scaling_laws("35M", num_replicas=3).global_batch == 3 * 16
