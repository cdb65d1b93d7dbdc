"""Resume in a script that loads the model before there can be an engine."""

import copy

import torch

import diloco


def build_model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 1)


def build_engine(model: torch.nn.Module) -> diloco.StreamingDiLoCo:
    return diloco.StreamingDiLoCo(
        model, fragments="whole", sync_every=4, overlap_steps=2, exchange=diloco.LoopbackExchange()
    )


def train(model: torch.nn.Linear, engine: diloco.StreamingDiLoCo, last: int) -> str:
    for step in range(engine.num_steps + 1, last + 1):
        with torch.no_grad():
            model.weight.add_(0.1 * step)
        engine.step()
    return engine.outer_hash()


model = build_model()
engine = build_engine(model)
train(model, engine, 5)
saved = copy.deepcopy({"model": model.state_dict(), "engine": engine.state_dict()})
undisturbed = train(model, engine, 10)

# --8<-- [start:resume]
model = build_model()
model.load_state_dict(saved["model"], assign=True)  # the script's own

own = copy.deepcopy(model.state_dict())
model.load_state_dict(saved["engine"]["outer"], strict=False)  # Θ, the same on all replicas
engine = build_engine(model)
model.load_state_dict(own)
engine.load_state_dict(saved["engine"])
# --8<-- [end:resume]
assert train(model, engine, 10) == undisturbed
