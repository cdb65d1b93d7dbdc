"""The forecast of a run, and its memory model: what they count is what a run needs, and what is chosen fits."""

import re
from dataclasses import replace
from itertools import chain

import pytest
import torch
from tests.training.cases import resolved
from tests.training.runs import summary

from diloco.models.decoder_config import DecoderConfig
from diloco.training.config.config import OptimizerConfig, TrainConfig
from diloco.training.config.forecast import activation_bytes, device_bytes, fitted, forecast
from diloco.training.config.recipes import PAPER_RECIPES, recipe
from diloco.training.optimizer import inner_optimizer
from diloco.training.records.runs import read_config


def test_the_bytes_are_those_that_the_run_sent(finished_run):
    result, was = forecast(read_config(finished_run)), summary(finished_run)
    assert result.num_params == was["num_params"]
    assert result.bytes_sent == was["bytes_sent_per_replica"]
    assert result.data_parallel_bytes == was["data_parallel_bytes_per_replica"]


@pytest.mark.parametrize(("method", "num_copies"), [("streaming", 6), ("data_parallel", 4)])
def test_memory_counts_a_copy_for_parameters_gradients_moments_and_outer_state(method, num_copies):
    config = resolved(method=method)
    result = forecast(config)
    assert result.state_bytes == num_copies * 4 * result.num_params
    assert result.logits_bytes == 2 * 2 * 4 * 64 * 257
    assert forecast(replace(config, precision="fp32")).logits_bytes == 2 * 4 * 4 * 64 * 257
    assert (result.schedule is None) == (method == "data_parallel")


@pytest.mark.parametrize(("method", "num_bytes"), [("streaming", 16), ("data_parallel", 8)])
def test_parameters_in_bfloat16_halve_all_but_the_outer_state(method, num_bytes):
    result = forecast(resolved(method=method, precision="bf16-params"))
    assert result.state_bytes == num_bytes * result.num_params


@pytest.mark.parametrize(
    ("changes", "num_more"),
    [({"outer": "delayed_nesterov"}, 1), ({"merge": "taylor"}, 1), ({"error_feedback": 1.0}, 1), ({}, 0)],
)
def test_memory_counts_every_vector_beside_the_outer_parameters(changes, num_more):
    config = resolved(method="streaming")
    other = forecast(replace(config, diloco=replace(config.diloco, mixing=None, **changes)))
    assert other.state_bytes == (6 + num_more) * 4 * other.num_params


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd", "schedule_free"])
def test_memory_counts_the_state_of_each_optimizer(name):
    config = resolved(method="data_parallel", optimizer=OptimizerConfig(name=name))
    model = config.model.build(seed=0)
    state = inner_optimizer(model, config.optimizer).state.values()
    state_bytes = sum(tensor.nbytes for one in state for tensor in one.values() if tensor.ndim)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    aside_bytes = 4 * num_params if name == "schedule_free" else 0
    assert forecast(config).state_bytes == 2 * 4 * num_params + state_bytes + aside_bytes
    in_vectors = 4 * num_params - 4 * config.model.num_matrix_params
    default = replace(config, optimizer=OptimizerConfig())
    more = state_bytes + aside_bytes - 2 * 4 * num_params
    assert device_bytes(config) - device_bytes(default) == pytest.approx(more, abs=2 * in_vectors)


def test_data_parallel_sends_at_every_step():
    result = forecast(resolved(method="data_parallel"))
    assert result.bytes_sent == result.data_parallel_bytes == 60 * result.sync_bytes[0]


GB = 1e9
METHODS = ("data_parallel", "streaming_overlapped_fp4")


def kept_bytes(config: TrainConfig) -> int:
    """The tensors that a forward pass really keeps, but for parameters and logits."""
    model = config.model.build(seed=0)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.dtype != torch.int64:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    half = config.precision == "bf16"
    tokens = torch.zeros(config.micro_batch, config.sequence_length, dtype=torch.int64)
    saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with saved, torch.autocast("cpu", torch.bfloat16, enabled=half):
        logits = model(tokens)
    copies = 2 * config.model.num_matrix_params if half else 0
    assert logits.requires_grad
    return sum(kept.values()) - copies


@pytest.mark.parametrize(("precision", "least"), [("fp32", 0.97), ("bf16", 0.8)])
def test_the_tensors_that_a_pass_keeps_are_counted(precision: str, least: float):
    """On a CPU autocast leaves queries and keys in bfloat16, so that the count for a GPU is an upper bound."""
    config = replace(
        recipe("laptop"),
        precision=precision,
        micro_batch=4,
        model=DecoderConfig(num_layers=4, num_heads=2, width=128, vocab_size=257),
    )
    assert least < kept_bytes(config) / activation_bytes(config) <= 1


@pytest.mark.parametrize(("scale", "measured"), [("35m", 19.50 * GB), ("550m", 108.31 * GB)])
def test_the_estimate_is_close_to_what_was_measured_on_a_gpu(scale: str, measured: float):
    """docs/results/gpu.md: 32 sequences of 2,048 tokens, not compiled, forward to AdamW."""
    config = replace(recipe(scale), method="data_parallel", num_replicas=1, micro_batch=32, precision="bf16")
    config = replace(config, model=replace(config.model, vocab_size=32_768))
    assert 1 <= device_bytes(config) / measured < 1.05


def test_shards_and_micro_batches_are_the_fewest_and_the_largest_that_fit():
    for scale, least in (("35m", 1), ("1.3b", 1), ("4b", 2), ("10b", 4)):
        for method in METHODS:
            chosen = fitted(replace(recipe(scale), method=method), 80 * GB)
            assert device_bytes(chosen) <= 72 * GB
            assert chosen.shards_per_replica >= least
            share = chosen.process_batch
            larger = [size for size in range((chosen.micro_batch or share) + 1, share + 1) if share % size == 0]
            if larger:
                assert device_bytes(replace(chosen, micro_batch=larger[0])) > 72 * GB
            if chosen.shards_per_replica > 1:
                fewer = replace(chosen, shards_per_replica=chosen.shards_per_replica // 2, micro_batch=1)
                assert device_bytes(fewer) > 72 * GB


def test_the_page_shows_what_fits_into_80_gb(pytestconfig):
    page = (pytestconfig.rootpath / "docs" / "how-to" / "configure-a-run.md").read_text()
    lines = re.findall(r"^\| (`[\w., `]*`) \| (\d+), (\d+) \| (\d+), (\d+) \|$", page, re.MULTILINE)
    rows = [(scale, numbers) for names, *numbers in lines for scale in re.findall(r"`([\w.]+)`", names)]
    assert [scale for scale, _ in rows] == list(PAPER_RECIPES)
    for scale, numbers in rows:
        asked = [recipe(scale, method=method) for method in (*METHODS, "diloco")]
        fits = [fitted(replace(one, model=replace(one.model, vocab_size=32_768)), 80 * GB) for one in asked]
        chosen = [(one.shards_per_replica, one.micro_batch or one.process_batch) for one in fits]
        assert chosen[1] == chosen[2]
        assert [*map(str, chain(*chosen[:2]))] == numbers


def test_the_outer_parameters_take_eight_bytes_a_parameter():
    config = replace(recipe("550m"), shards_per_replica=2, micro_batch=1)
    baseline, overlapped, ours = (device_bytes(replace(config, method=m)) for m in (*METHODS, "diloco"))
    assert ours - baseline == pytest.approx(8 * config.model.num_matrix_params / 2)
    # A sync beside the next pass: 2.5 FP32 vectors of three blocks, and two payloads of half a byte an element.
    assert overlapped - ours == pytest.approx((10 + 2 * 0.504) * 36 * config.model.width**2 / 2, rel=0.001)
