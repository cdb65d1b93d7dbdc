import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from tests.training.cases import resolved
from tests.training.test_metrics import metrics
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from diloco.models.decoder_config import DecoderConfig
from diloco.report.terminal.training import TrainingProgress
from diloco.training.config.recipes import recipe
from diloco.training.hardware import model_flops_utilization, peak_memory_bytes
from diloco.training.world import join


def test_the_operations_of_a_token_are_three_times_those_that_torch_counts_in_a_forward_pass():
    config = DecoderConfig(num_layers=3, num_heads=2, width=16, vocab_size=50)
    model, tokens = config.build(seed=0), torch.zeros(2, 24, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens)
    assert config.flops_per_token(24) * tokens.numel() == 3 * counter.get_total_flops()


def test_utilization_is_what_is_done_over_what_can_be_done(monkeypatch):
    config = resolved()
    assert model_flops_utilization(config.step_flops, torch.device("cpu"), 0.1) is None
    assert peak_memory_bytes(torch.device("cpu")) is None
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    tokens = config.process_batch * config.sequence_length
    flops = config.model.flops_per_token(config.sequence_length) * tokens
    utilization = model_flops_utilization(config.step_flops, torch.device("cuda"), 0.1)
    assert utilization == pytest.approx(flops / 0.1 / 312e12)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "something new")
    assert model_flops_utilization(config.step_flops, torch.device("cuda"), 0.1) is None


@pytest.mark.parametrize(
    ("precision", "capabilities", "is_said"),
    [
        ("bf16", {}, True),
        ("bf16-params", {"avx2": True}, True),
        ("bf16", {"avx512_bf16": True}, False),
        ("fp32", {}, False),
        ("auto", {}, False),
    ],
)
def test_bfloat16_without_instructions_for_it_is_said_to_be_slow(
    precision, capabilities, is_said, monkeypatch, caplog
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    with join(replace(recipe("tiny"), num_replicas=1, precision=precision, device="cpu")) as world:
        assert world.autocast == (precision == "bf16")
    assert [record.levelname for record in caplog.records] == ["WARNING"] * is_said


def test_progress_shows_what_is_known_of_the_gpu():
    config = resolved()
    step = replace(metrics(60), tokens=config.num_tokens)
    lines = []
    for known in ({}, {"model_flops_utilization": 0.5, "peak_memory_bytes": 3_200_000_000}):
        console = Console(file=io.StringIO())
        TrainingProgress(config, console)(replace(step, **known))
        lines.append(console.file.getvalue())
    assert "MFU" not in lines[0] and "memory" not in lines[0]
    assert "MFU 50.0%  memory 3.20 GB" in lines[1]
