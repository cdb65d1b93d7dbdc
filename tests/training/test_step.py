"""The inner step against AdamW written out by hand, and its learning rate."""

import copy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.training.cases import begin, rate, resolved, tokens_of

from diloco.models.decoder_config import DecoderConfig
from diloco.models.language_model import LanguageModel
from diloco.training.config.config import OptimizerConfig
from diloco.training.config.recipes import tiny
from diloco.training.loop import inner_step
from diloco.training.state import FixedProgress, Standing, initial_state
from diloco.training.world import alone

# Far from the usual, so that each of them is seen in the parameters.
OPTIMIZER = OptimizerConfig(
    learning_rate=0.02,
    beta1=0.8,
    beta2=0.7,
    epsilon=1e-3,
    weight_decay=0.3,
    warmup_steps=2,
    clip_norm=0.4,
    z_loss=0.05,
)


def config_of(micro_batch: int | None = None, optimizer: OptimizerConfig = OPTIMIZER):
    return resolved(num_replicas=1, precision="fp32", micro_batch=micro_batch, optimizer=optimizer)


def batch_of(config, step: int) -> np.ndarray:
    return tokens_of(config, config.global_batch, step)


def by_hand(config, model, num_steps: int):
    """Losses, gradient norms and parameters; AdamW (arXiv 1711.05101) in float64."""
    model, o = copy.deepcopy(model), config.optimizer
    theta = {name: p.detach().double() for name, p in model.named_parameters()}
    m, v = ({name: torch.zeros_like(p) for name, p in theta.items()} for _ in range(2))
    measured = []
    for t in range(1, num_steps + 1):
        window = torch.from_numpy(batch_of(config, t))
        logits = model(window[:, :-1]).double()
        z = torch.log(torch.exp(logits).sum(-1))
        loss = (z - logits.gather(-1, window[:, 1:, None])[..., 0]).mean()
        gradients = torch.autograd.grad(loss + o.z_loss * (z**2).mean(), tuple(model.parameters()))
        norm = torch.sqrt(sum((g**2).sum() for g in gradients))
        measured.append((loss.item(), norm.item()))
        for name, gradient in zip(theta, gradients, strict=True):
            g = gradient.double() * min(1.0, o.clip_norm / norm)
            m[name] = o.beta1 * m[name] + (1 - o.beta1) * g
            v[name] = o.beta2 * v[name] + (1 - o.beta2) * g**2
            direction = (m[name] / (1 - o.beta1**t)) / ((v[name] / (1 - o.beta2**t)).sqrt() + o.epsilon)
            theta[name] = theta[name] - rate(config, t) * (direction + o.weight_decay * theta[name])
        model.load_state_dict(theta)
    return measured, theta


@pytest.mark.parametrize("micro_batch", [8, 2, 1])
def test_inner_steps_equal_adamw_by_hand(micro_batch):
    config = config_of(micro_batch)
    world = alone(config.precision)
    state = initial_state(config, world)
    expected, parameters = by_hand(config, state.model, 4)
    assert all(norm > config.optimizer.clip_norm for _, norm in expected), "gradients are clipped"
    for step, loss_and_norm in enumerate(expected, start=1):
        measured = inner_step(state, batch_of(config, step), world, rate(config, step))
        assert measured == pytest.approx(loss_and_norm, rel=1e-5)
    for name, parameter in state.model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), parameters[name], rtol=1e-4, atol=1e-5)


class Packed(torch.nn.Parameter):
    """Weights in a form of their own, as those of bitsandbytes."""


def test_bf16_params_leave_packed_weights_as_they_are(monkeypatch):
    def initial(config: DecoderConfig, *, seed: int) -> LanguageModel:
        model = config.build(seed=seed)
        model.packed = Packed(torch.ones(3), requires_grad=False)
        return model

    monkeypatch.setattr(DecoderConfig, "initial", initial)
    model = initial_state(resolved(num_replicas=1, precision="bf16-params"), alone("bf16-params")).model
    assert model.packed.dtype == torch.float32
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.bfloat16}


def test_the_learning_rate_warms_up_to_the_peak_and_ends_at_five_percent():
    config = resolved()
    peak = config.optimizer.learning_rate
    rates = [rate(config, step) for step in range(1, 61)]
    assert rates[:6] == pytest.approx([peak * step / 6 for step in range(1, 7)])
    assert rates[5 + 27] == pytest.approx(peak * (0.05 + 0.95 / 2))
    assert rates[-1] == pytest.approx(0.05 * peak)
    assert all(a > b for a, b in pairwise(rates[5:]))


def test_wsd_stays_at_the_peak_and_decays_in_the_last_steps():
    config = resolved(optimizer=replace(tiny().optimizer, schedule="wsd", decay_fraction=0.25))
    peak = config.optimizer.learning_rate
    rates = [rate(config, step) for step in range(1, 61)]
    assert rates[:6] == pytest.approx([peak * step / 6 for step in range(1, 7)])
    assert set(rates[5:45]) == {peak}
    assert rates[45:] == pytest.approx([peak * (1 - 0.95 * (x / 15) ** 0.5) for x in range(1, 16)])
    assert rate(config, 44.5) == peak and rate(config, 100) == pytest.approx(0.05 * peak)


def test_wsd_may_decay_from_the_end_of_the_warm_up_on():
    """Six of 60 steps warm up by default, and 0.9 of them decay: in floats 1 − 0.9 is less than 0.1."""
    config = resolved(optimizer=replace(tiny().optimizer, schedule="wsd", decay_fraction=0.9))
    rates = [rate(config, step) for step in range(1, 61)]
    assert max(rates) == rates[5] == config.optimizer.learning_rate
    assert all(a > b for a, b in pairwise(rates[5:]))


class Counting(FixedProgress):
    """Progress that remembers when it was asked."""

    asked: list[int] = []  # noqa: RUF012

    def after(self, step: int) -> Standing:
        self.asked.append(step)
        return super().after(step)


def test_a_step_asks_once():
    config = config_of()
    world = alone(config.precision)
    state = initial_state(config, world)
    state.progress = progress = Counting(config.num_steps, config.tokens_per_step)
    for step in (1, 2, 3):
        begun = begin(state, batch_of(config, step), config, world)
        assert begun.tokens == step * config.tokens_per_step
    assert progress.asked == [1, 2, 3]
