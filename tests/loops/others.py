"""Loops built as public training scripts of images and games are; diloco is added as the docs say."""

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from tests.loops.text import TIMING, Outcome, replica
from torch import Tensor, nn

import diloco


def images(data: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    """Images of 4 × 4, and which quarter of each is bright."""
    labels = torch.randint(0, 4, (num,), generator=data)
    pixels = torch.randn(num, 1, 4, 4, generator=data) + 3
    for i, label in enumerate(labels.tolist()):
        row, column = 2 * (label // 2), 2 * (label % 2)
        pixels[i, 0, row : row + 2, column : column + 2] += 2
    return pixels, labels


def imagenet(out_dir: Path, resume_from: int | None) -> Outcome:
    """imagenet of pytorch/examples.

    DataParallel around a network with BatchNorm, SGD, a scheduler per epoch, and in each epoch a validation, a
    checkpoint and a copy of the best.
    """
    outcome = Outcome()
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    model = nn.DataParallel(nn.Sequential(*layers, nn.Linear(128, 4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    engine = diloco.StreamingDiLoCo(model, fragments="whole", **TIMING, exchange=diloco.connect())
    engine.attach(optimizer)
    start_epoch, best_loss = 0, float("inf")
    if resume_from is not None:
        checkpoint = torch.load(out_dir / f"checkpoint-{resume_from}.pth.tar", weights_only=True)
        start_epoch, best_loss = checkpoint["epoch"], checkpoint["best_loss"]
        engine.load_state_dict(checkpoint["engine"])
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    train = torch.utils.data.TensorDataset(*images(torch.Generator().manual_seed(replica()), 80))
    held_out = images(torch.Generator().manual_seed(99), 64)
    for epoch in range(start_epoch, 3):
        model.train()
        order = torch.Generator().manual_seed(epoch)
        for pixels, labels in torch.utils.data.DataLoader(train, 8, shuffle=True, generator=order):
            loss = F.cross_entropy(model(pixels), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            outcome.losses.append(loss.item())
        with engine.outer_parameters_applied():
            shipped = copy.deepcopy(model)
        torch.optim.swa_utils.update_bn([held_out[0]], shipped)
        with torch.no_grad():
            loss = F.cross_entropy(shipped.eval()(held_out[0]), held_out[1]).item()
        outcome.common.append(loss)
        scheduler.step()
        is_best, best_loss = loss < best_loss, min(loss, best_loss)
        checkpoint = {
            "epoch": epoch + 1,
            "state_dict": model.state_dict(),
            "best_loss": best_loss,
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "engine": engine.state_dict(),
        }
        torch.save(checkpoint, out_dir / f"checkpoint-{epoch}.pth.tar")
        if is_best:
            torch.save(shipped.state_dict(), out_dir / "model_best.pth.tar")
    engine.finish()
    return outcome.after(engine)


class Agent(nn.Module):
    """An actor and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        self.actor = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def ppo(out_dir: Path, resume_from: int | None) -> Outcome:
    """cleanrl's ppo.py.

    One seed for everything, an actor and a critic under one optimizer, and epochs over what was played that end
    early: the optimizer's steps differ between replicas.
    """
    outcome, num_optimizer_steps = Outcome(), 0
    torch.manual_seed(1)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2, eps=1e-5)
    engine = diloco.StreamingDiLoCo(agent, fragments="whole", **TIMING, exchange=diloco.connect())
    torch.manual_seed(1 + replica())
    for update in range(40):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - update / 40)
        observed, best = images(torch.default_generator, 64)
        observed = observed.flatten(1) - 3
        with torch.no_grad():
            policy = torch.distributions.Categorical(logits=agent.actor(observed))
            actions = policy.sample()
            logprobs = policy.log_prob(actions)
            rewards = (actions == best).float()
            advantages = rewards - agent.critic(observed).flatten()
        for _ in range(3):
            for batch in torch.randperm(64).split(32):
                policy = torch.distributions.Categorical(logits=agent.actor(observed[batch]))
                ratio = (policy.log_prob(actions[batch]) - logprobs[batch]).exp()
                gain = torch.min(ratio * advantages[batch], ratio.clamp(0.8, 1.2) * advantages[batch])
                value_loss = (agent.critic(observed[batch]).flatten() - rewards[batch]).square().mean()
                loss = -gain.mean() - 0.01 * policy.entropy().mean() + 0.5 * value_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                num_optimizer_steps += 1
            if (ratio - 1 - ratio.log()).mean() > 0.01:
                break
        engine.step()
        outcome.losses.append(1 - rewards.mean().item())
    engine.finish()
    assert num_optimizer_steps < 240, "some updates ended early"
    return outcome.after(engine)
