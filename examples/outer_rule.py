"""An outer rule of one's own: Adam on the averaged outer gradients (FedAdam, arXiv 2003.00295), one replica."""

from dataclasses import dataclass

import torch

import diloco
from diloco.extend import Average, Cohort, FragmentState, OuterRule, Sync


@dataclass(frozen=True, kw_only=True)
class OuterAdam(OuterRule):
    """m ← β₁ m + (1 − β₁) Δ; s ← β₂ s + (1 − β₂) Δ²; Θ ← Θ − η m / (√s + ε)."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-3

    slots = ("first_moment", "second_moment")  # FP32 vectors that the engine keeps, saves and loads

    def on_average(self, fragment: FragmentState, average: Average, sync: Sync, cohort: Cohort) -> None:
        delta_N = average.divided()
        first_N, second_N = fragment.use("first_moment"), fragment.use("second_moment")
        first_N.lerp_(delta_N, 1 - self.beta1)
        second_N.lerp_(delta_N.square(), 1 - self.beta2)
        fragment.use("outer").sub_(self.lr * first_N / (second_N.sqrt() + self.epsilon))


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = diloco.StreamingDiLoCo(
        model,
        fragments="whole",
        sync_every=5,
        overlap_steps=1,
        outer=OuterAdam(lr=0.1),
        exchange=diloco.LoopbackExchange(),
    )
    inputs, target = torch.randn(64, 8), torch.randn(8, 1)
    for step in range(100):
        loss = (model(inputs) - inputs @ target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    engine.finish()
    with engine.outer_parameters_applied(), torch.no_grad():
        print(f"outer parameters: loss {(model(inputs) - inputs @ target).square().mean().item():.4f}")


if __name__ == "__main__":
    main()
