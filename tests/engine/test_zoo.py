"""Models and optimizers that were tried; docs/explanation/engine.md lists them.

One replica with α = 0, η = 1, μ = 0, τ = 0 trains as without the engine, up to rounding: Θ ← Θ − (Θ − θ), θ ← Θ.
"""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import diloco

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "engine.md"
NUM_STEPS = 8


def train(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], make_optimizer, *, with_engine: bool
) -> list[float]:
    torch.manual_seed(0)
    optimizer = make_optimizer(model)
    if with_engine:
        fragments = diloco.whole(model)
        engine = diloco.StreamingDiLoCo(
            model,
            fragments=fragments,
            schedule=diloco.Schedule(sync_every=2, num_fragments=1),
            outer=diloco.Nesterov(lr=1.0, momentum=0.0),
            mixing=0.0,
            wire="fp32",
            exchange=diloco.LoopbackExchange(),
        )
        engine.attach(optimizer)
    losses = []
    for _ in range(NUM_STEPS):

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = loss(model)
            value.backward()
            return value

        losses.append(optimizer.step(closure).item())
    if with_engine:
        assert engine.num_steps == NUM_STEPS
    return losses


def text_model(name: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    narrow = small | {"intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 8}
    configs = {
        "GPT-2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2),
        "Llama": lambda: transformers.LlamaConfig(**narrow),
        "Qwen3": lambda: transformers.Qwen3Config(**narrow),
        "Gemma": lambda: transformers.GemmaConfig(**narrow),
        "Mixtral (mixture of experts)": lambda: transformers.MixtralConfig(**narrow, num_local_experts=4),
        "GPT-NeoX": lambda: transformers.GPTNeoXConfig(**small, intermediate_size=32),
        "Mamba": lambda: transformers.MambaConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4
        ),
        "T5 (encoder and decoder)": lambda: transformers.T5Config(
            vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
        ),
    }
    torch.manual_seed(0)
    config = configs[name]()
    for field in (
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "dropout_rate",
        "attention_dropout",
        "hidden_dropout",
    ):
        if hasattr(config, field):
            setattr(config, field, 0.0)
    kind = transformers.AutoModelForSeq2SeqLM if "T5" in name else transformers.AutoModelForCausalLM
    tokens = torch.randint(0, 64, (2, 12))
    return kind.from_config(config), lambda model: model(input_ids=tokens, labels=tokens).loss


def own_model(name: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    torch.manual_seed(0)
    inputs = torch.randn(8, 6, 16)
    if name == "convolutional network with BatchNorm":
        model = nn.Sequential(
            nn.Conv1d(6, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14, 16)
        )
        return model, lambda model: F.mse_loss(model(inputs), inputs[:, 0])
    if name == "LSTM":
        return nn.LSTM(16, 16, 2, batch_first=True), lambda model: F.mse_loss(model(inputs)[0], inputs)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    model: nn.Module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    if name == "tied weights":
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        model[2].weight = model[0].weight
    if name == "frozen layers":
        model.layers[0].requires_grad_(False)
    if name == "weight normalisation (parametrized)":
        model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), nn.Linear(16, 16))
    if name == "autocast to bfloat16":

        def loss(model: nn.Module) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return F.mse_loss(model(inputs), inputs)

        return model, loss
    if name == "activation checkpointing":
        from torch.utils.checkpoint import checkpoint

        return model, lambda model: F.mse_loss(checkpoint(model, inputs, use_reentrant=False), inputs)
    return model, lambda model: F.mse_loss(model(inputs), inputs)


TEXT_MODELS = ["GPT-2", "Llama", "Qwen3", "Gemma", "Mixtral (mixture of experts)", "GPT-NeoX", "Mamba"]
TEXT_MODELS += ["T5 (encoder and decoder)"]
OWN_MODELS = ["torch.nn.TransformerEncoder", "convolutional network with BatchNorm", "LSTM", "tied weights"]
OWN_MODELS += ["frozen layers", "weight normalisation (parametrized)", "autocast to bfloat16"]
OWN_MODELS += ["activation checkpointing"]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TEXT_MODELS, *OWN_MODELS])
def test_a_model_trains_as_without_the_engine(name):
    model, loss = (text_model if name in TEXT_MODELS else own_model)(name)
    plain, engined = (
        train(deepcopy(model), loss, adamw, with_engine=with_engine) for with_engine in (False, True)
    )
    assert engined == pytest.approx(plain, rel=2e-3) and plain[-1] < plain[0]
    assert name in " ".join(PAGE.read_text().split())


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2),
    "AdamW": adamw,
    "AdamW, fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "AdamW, foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters(), lr=1e-2),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=1e-2),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters(), lr=1.0),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=1e-2),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), lr=1e-2),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=2),
    "Muon": lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2], lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_trains_as_without_the_engine(name):
    if name == "Muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    model, loss = own_model("torch.nn.TransformerEncoder")
    if name == "Muon":
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.ndim == 2)
    plain, engined = (
        train(deepcopy(model), loss, OPTIMIZERS[name], with_engine=with_engine) for with_engine in (False, True)
    )
    assert engined == pytest.approx(plain, rel=2e-3) and plain[-1] < plain[0]
    assert name in " ".join(PAGE.read_text().split())
