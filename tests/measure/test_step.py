from dataclasses import replace

import pytest

from diloco.errors import UserError
from diloco.measure.step import flops_per_second, measurable
from diloco.training.config.recipes import recipe


def test_a_run_is_resolved_without_data():
    tiny = recipe("tiny")
    config = measurable(replace(tiny, data=replace(tiny.data, tokenizer="bpe:1000")))
    assert config.model.vocab_size == 1000 and config.micro_batch == config.process_batch
    assert measurable(tiny).model.vocab_size == 257


def test_one_replica_has_no_link_to_measure():
    with pytest.raises(UserError, match="num_replicas=1, but a link has two ends: take 2 or more") as refusal:
        measurable(replace(recipe("tiny"), num_replicas=1))
    assert refusal.value.field == "num_replicas"


def test_flops_are_those_of_all_cores():
    assert 1e6 < flops_per_second(recipe("tiny"), num_cores=2) < 1e14
