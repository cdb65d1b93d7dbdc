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
    for grid in tier.batch_grids:
        runs = [tier.run(batch=batch, tokens=grid.tokens) for batch in grid.batches]
        tokens = [run.num_tokens for run in runs]
        assert max(tokens) - min(tokens) <= max(run.tokens_per_step for run in runs)
        assert min(tokens) > (grid.tokens - 0.01) * tier.run().num_tokens
    assert tier.run(tokens=8).num_tokens == 8 * tier.run().num_tokens


def test_a_larger_batch_has_a_larger_learning_rate():
    tier = TIERS["small"]()
    rates = [tier.run(batch=batch).optimizer.learning_rate for batch in (1, 4)]
    assert rates[1] == 2 * rates[0] == 2 * tier.base_config.optimizer.learning_rate
    assert tier.run(batch=4, rate=0.25).optimizer.learning_rate == rates[0] / 2


def test_overtrained_text_is_dolma_and_what_is_held_out_stays_c4():
    tier = TIERS["paper"]()
    for config in tier.overtrained.values():
        assert config.data.train == ("hf:allenai/dolma:v1_7",)
        assert config.data.held_out == tier.base_config.data.held_out == ("hf:allenai/c4:en:validation",)
    budgets = [tier.overtrained["1B"].num_tokens * multiple for multiple in tier.multiples["1B"]]
    assert [round(budget / 1e9) for budget in budgets] == [25, 100, 250], "of Table 2"
