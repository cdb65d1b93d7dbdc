"""The tiers: their sizes, and what a run's budget and batch do to it."""

from dataclasses import replace

from diloco.data.tokenizers import ByteTokenizer
from diloco.experiments.papers.tiers import TIERS


def test_the_small_tier_is_small():
    models = [replace(c.model, vocab_size=ByteTokenizer.vocab_size) for c in TIERS["small"]().sizes.values()]
    params = [model.num_matrix_params for model in models]
    assert params == sorted(params) and params[0] > 1e5 and params[-1] < 5e5


def test_the_tokens_of_a_run_do_not_depend_on_its_batch():
    tier = TIERS["small"]()
    tokens = [tier.run(batch=batch).num_tokens for batch in tier.batches]
    most = max(tier.run(batch=batch).tokens_per_step for batch in tier.batches)
    assert max(tokens) - min(tokens) <= most
    assert tier.run(tokens=8).num_tokens == 8 * tier.run().num_tokens


def test_a_larger_batch_has_a_larger_learning_rate():
    tier = TIERS["small"]()
    rates = [tier.run(batch=batch).optimizer.learning_rate for batch in (1, 4)]
    assert rates[1] == 2 * rates[0] == 2 * tier.base_config.optimizer.learning_rate
