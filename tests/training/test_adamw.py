"""The inner optimizer: torch's numbers, without torch's compiler."""

import subprocess
import sys

import torch

from diloco.training.optimizer import AdamW

STEPS = """
import sys, torch
from diloco.training.optimizer import AdamW
parameter = torch.nn.Parameter(torch.ones(3))
optimizer = AdamW([parameter], fused=True)
parameter.grad = torch.ones(3)
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
print("torch._dynamo" in sys.modules)
"""


def test_the_steps_are_torchs_bit_for_bit():
    torch.manual_seed(0)
    start = torch.randn(50)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    options = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1, "fused": True}
    optimizers = AdamW([ours], **options), torch.optim.AdamW([theirs], **options)
    for _ in range(5):
        gradient = torch.randn(50)
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
            assert not parameter.grad.requires_grad
    assert torch.equal(ours, theirs)
    state, expected = (optimizer.state_dict()["state"][0] for optimizer in optimizers)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_the_first_step_imports_no_compiler():
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
