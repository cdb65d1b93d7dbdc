"""Loops built as public training scripts of images and games are; diloco is added as the docs say."""

import copy
from collections.abc import Iterator
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


class Diffusion(nn.Module):
    """A network that predicts noise, and its schedule in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(17, 64), nn.SiLU(), nn.Linear(64, 16))
        self.register_buffer("kept", torch.linspace(0.99, 0.1, 10))

    def forward(self, pixels: Tensor, data: torch.Generator) -> Tensor:
        t = torch.randint(0, 10, (len(pixels),), generator=data)
        kept, noise = self.kept[t][:, None], torch.randn(pixels.shape, generator=data)
        noisy = kept.sqrt() * pixels + (1 - kept).sqrt() * noise
        return F.mse_loss(self.model(torch.cat([noisy, t[:, None] / 10], 1)), noise)


def diffusion(out_dir: Path, resume_from: int | None) -> Outcome:
    """denoising-diffusion-pytorch's Trainer.

    It is built, and perhaps loaded, before it trains; it accumulates, and keeps an exponential moving average of
    the model, which is what it samples from and saves.
    """

    class Trainer:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.step, self.data = model, 0, torch.Generator().manual_seed(replica())
            self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.99))
            self.ema = copy.deepcopy(model).requires_grad_(False)
            self.engine = diloco.StreamingDiLoCo(model, fragments="whole", **TIMING, exchange=diloco.connect())
            self.engine.attach(self.optimizer)
            self.engine.on_merge(self.update_ema)

        def update_ema(self, names: tuple[str, ...]) -> None:
            average, outer = dict(self.ema.named_parameters()), self.engine.outer_parameters()
            for name in names:
                average[name].lerp_(outer[name], 0.5)

        def save(self) -> None:
            state = {"step": self.step, "data": self.data.get_state()}
            for name in ("model", "optimizer", "ema", "engine"):
                state[name] = getattr(self, name).state_dict()
            torch.save(state, out_dir / f"model-{self.step}.pt")

        def load(self, milestone: int) -> None:
            state = torch.load(out_dir / f"model-{milestone}.pt", weights_only=True)
            self.step = state["step"]
            self.data.set_state(state["data"])
            for name in ("engine", "model", "optimizer", "ema"):
                getattr(self, name).load_state_dict(state[name])

        def train(self, num_steps: int) -> Iterator[float]:
            while self.step < num_steps:
                for _ in range(2):
                    loss = self.model(images(self.data, 16)[0].flatten(1) - 3, self.data)
                    (loss / 2).backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.step += 1
                if self.step % 10 == 0:
                    self.save()
                yield loss.item()
            self.engine.finish()

    torch.manual_seed(0)
    trainer = Trainer(Diffusion())
    if resume_from is not None:
        trainer.load(resume_from)
    losses = list(trainer.train(40))
    held_out = torch.Generator().manual_seed(99)
    common = trainer.ema(images(held_out, 64)[0].flatten(1) - 3, held_out).item()
    return Outcome(losses, [common]).after(trainer.engine)


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
