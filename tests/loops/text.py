"""Loops built as public training scripts of language models are, with diloco added as the docs say.

Nothing of theirs is copied: kept is the order in which they make, load, wrap, evaluate and save things.
"""

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import diloco

VOCABULARY, LENGTH, WIDTH = 16, 8, 16
TIMING: dict[str, Any] = {"sync_every": 6, "overlap_steps": 2}


@dataclass
class Outcome:
    """A loop's results on a replica."""

    losses: list[float] = field(default_factory=list)
    """Training losses, which must fall."""
    common: list[float] = field(default_factory=list)
    """Held-out losses of Θ, and what else must be equal on all replicas."""
    outer_hash: str = ""

    def after(self, engine: diloco.StreamingDiLoCo) -> "Outcome":
        """The same, with the hash of an engine that has finished."""
        assert engine.bytes_sent and engine.bytes_received, "nothing was exchanged"
        self.outer_hash = engine.outer_hash()
        return self


def replica() -> int:
    return int(os.environ["DILOCO_REPLICA"])


def text(data: torch.Generator, batch: int = 8, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Inputs and targets in which each token but a few follows from the one before."""
    tokens = torch.randint(0, VOCABULARY, (batch, length + 1), generator=data)
    for i in range(length):
        is_noise = torch.rand(batch, generator=data) < 0.1
        tokens[:, i + 1] = torch.where(is_noise, tokens[:, i + 1], (5 * tokens[:, i] + 3) % VOCABULARY)
    return tokens[:, :-1], tokens[:, 1:]


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.expand, self.contract = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.attend(self.norm_1(x)).chunk(3, -1)
        x = x + self.project(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + self.contract(F.gelu(self.expand(self.norm_2(x))))


class GPT(nn.Module):
    """A decoder whose head is tied to its embedding, or not."""

    transformer: Any

    def __init__(self, *, tied: bool = False, num_layers: int = 4) -> None:
        super().__init__()
        blocks = nn.ModuleList(Block() for _ in range(num_layers))
        embeddings = {"wte": nn.Embedding(VOCABULARY, WIDTH), "wpe": nn.Embedding(LENGTH, WIDTH)}
        self.transformer = nn.ModuleDict({**embeddings, "h": blocks, "ln_f": nn.LayerNorm(WIDTH)})
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.transformer["wte"].weight = self.lm_head.weight
            nn.init.normal_(self.lm_head.weight, std=0.3)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.transformer["wte"](tokens) + self.transformer["wpe"].weight[: tokens.shape[1]]
        for block in self.transformer["h"]:
            x = block(x.float())
        logits = self.lm_head(self.transformer["ln_f"](x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def estimate_loss(model: nn.Module) -> float:
    held_out = torch.Generator().manual_seed(99)
    model.eval()
    losses = [model(*text(held_out))[1].item() for _ in range(2)]
    model.train()
    return sum(losses) / len(losses)


def nanogpt(out_dir: Path, resume_from: int | None) -> Outcome:
    """nanoGPT's train.py.

    A GradScaler, which here skips a step of one replica, accumulation by hand, a compiled model, tied weights, a
    learning rate that the loop sets, and a block that evaluates and saves.
    """
    outcome = Outcome()
    torch.manual_seed(1337)
    model: Any = GPT(tied=True, num_layers=2)
    data, iter_num, best_val_loss = torch.Generator().manual_seed(1337 + replica()), 0, math.inf
    scaler, checkpoint = torch.amp.GradScaler("cpu"), {}
    if resume_from is not None:
        checkpoint = torch.load(out_dir / f"ckpt-{resume_from}.pt", weights_only=True)
        model.load_state_dict(checkpoint["engine"]["outer"], strict=False)  # Θ, the same on all replicas
        iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    engine = diloco.StreamingDiLoCo(model, **TIMING, exchange=diloco.connect())
    engine.attach(optimizer, scaler)
    if resume_from is not None:
        engine.load_state_dict(checkpoint["engine"])
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler.load_state_dict(checkpoint["scaler"])
        data.set_state(checkpoint["data"])
    unoptimized_model = model
    model = torch.compile(model, backend="eager")

    while iter_num < 24:
        for group in optimizer.param_groups:
            group["lr"] = 3e-2 * min(1, (iter_num + 1) / 4) * (1 + math.cos(math.pi * iter_num / 24)) / 2
        if iter_num % 7 == 0 and iter_num != resume_from:
            with engine.outer_parameters_applied():
                val_loss = estimate_loss(model)
            outcome.common.append(val_loss)
            best_val_loss = min(val_loss, best_val_loss)
            checkpoint = {
                "model": unoptimized_model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
                "engine": engine.state_dict(),
                "data": data.get_state(),
                "iter_num": iter_num,
                "best_val_loss": best_val_loss,
            }
            torch.save(checkpoint, out_dir / f"ckpt-{iter_num}.pt")
        for _ in range(2):
            _, loss = model(*text(data))
            overflow = math.inf if (replica(), iter_num) == (1, 10) else 1.0
            scaler.scale(loss / 2 * overflow).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        outcome.losses.append(loss.item())
        iter_num += 1
    assert scaler.get_scale() == 2.0 ** (16 - replica()), "a step of replica 1 was skipped"
    engine.finish()
    return outcome.after(engine)


def nanochat(out_dir: Path, resume_from: int | None) -> Outcome:
    """nanochat's base_train.

    A model that is made without memory and then initialised, with embeddings in bfloat16, Muon beside AdamW, and a
    last pass of the loop that only evaluates.
    """
    outcome, data, step = Outcome(), torch.Generator().manual_seed(replica()), 0
    torch.manual_seed(42)
    with torch.device("meta"):
        model: Any = GPT(num_layers=2)
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        nn.init.ones_(parameter) if ".norm" in name or "ln_f" in name else nn.init.normal_(parameter, std=0.1)
    model.transformer["wte"].to(torch.bfloat16)
    orig_model = model
    model = torch.compile(model, backend="eager", dynamic=False)
    matrices = [p for p in orig_model.transformer["h"].parameters() if p.ndim == 2]
    others = [p for p in orig_model.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers = [torch.optim.AdamW(others, lr=1e-2), torch.optim.Muon(matrices, lr=2e-2)]
    engine = diloco.StreamingDiLoCo(orig_model, **TIMING, exchange=diloco.connect())
    engine.attach(optimizers[-1])
    if resume_from is not None:
        saved = torch.load(out_dir / f"{resume_from}.pt", weights_only=True)
        engine.load_state_dict(saved["engine"])
        orig_model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        data.set_state(saved["data"])
        step = resume_from
    before, batch = data.get_state(), text(data)

    while True:
        last_step = step == 24
        if last_step:
            engine.finish()
        if last_step or step % 10 == 0:
            with engine.outer_parameters_applied():
                outcome.common.append(estimate_loss(orig_model))
        if step % 10 == 0 and not last_step and step != resume_from:
            saved = {
                "model": orig_model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "engine": engine.state_dict(),
                "data": before,
            }
            torch.save(saved, out_dir / f"{step}.pt")
        if last_step:
            break
        for _ in range(2):
            _, loss = model(*batch)
            (loss / 2).backward()
            before, batch = data.get_state(), text(data)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 0.95
            optimizer.step()
        model.zero_grad(set_to_none=True)
        outcome.losses.append(loss.item())
        step += 1
    return outcome.after(engine)


class RNN(nn.Module):
    """An LSTM between an embedding and a head tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(output), hidden


def word_language_model(out_dir: Path, resume_from: int | None) -> Outcome:
    """word_language_model of pytorch/examples.

    No optimizer, a hidden state that is carried on, texts of different lengths, a learning rate that falls where
    the held-out loss does not, and a whole model that is saved and loaded.
    """
    outcome = Outcome()
    torch.manual_seed(1111)
    model = RNN()
    engine = diloco.StreamingDiLoCo(model, fragments="whole", **TIMING, exchange=diloco.connect())
    corpus = torch.cat(text(torch.Generator().manual_seed(replica()), 8, 70 + 20 * replica())).T
    held_out = torch.cat(text(torch.Generator().manual_seed(99), 8, 20)).T
    lr, best_val_loss = 2.0, math.inf

    def batches(source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(0, len(source) - 1, 7):
            stop = min(i + 7, len(source) - 1)
            yield source[i:stop], source[i + 1 : stop + 1]

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        total, hidden = 0.0, None
        for tokens, targets in batches(held_out):
            output, hidden = model(tokens, hidden)
            total += len(tokens) * F.cross_entropy(output.flatten(0, 1), targets.flatten()).item()
        return total / len(held_out)

    for _ in range(4):
        model.train()
        hidden = None
        for tokens, targets in itertools.islice(batches(corpus), 9):
            hidden = None if hidden is None else tuple(state.detach() for state in hidden)
            model.zero_grad()
            output, hidden = model(tokens, hidden)
            loss = F.cross_entropy(output.flatten(0, 1), targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-lr)
            engine.step()
            outcome.losses.append(loss.item())
        with engine.outer_parameters_applied():
            outcome.common.append(val_loss := evaluate())
            if val_loss < best_val_loss:
                torch.save(model, out_dir / "model.pt")
                best_val_loss = val_loss
            else:
                lr /= 4
    engine.finish()
    model = torch.load(out_dir / "model.pt", weights_only=False)
    model.rnn.flatten_parameters()
    outcome.common.append(evaluate())
    return outcome.after(engine)


class LoRA(nn.Module):
    """A linear map that is frozen, and a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(4, base.in_features) / 4)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T


def lora(out_dir: Path, resume_from: int | None) -> Outcome:
    """A loop over adapters, as scripts with peft have it.

    The pretrained model is frozen, epochs have a scheduler and a dataloader, checkpoints hold the adapters alone,
    and at the end these are merged into the model.
    """
    outcome = Outcome()
    torch.manual_seed(0)
    model = GPT().requires_grad_(False)
    for block in model.transformer["h"]:
        for name in ("attend", "project", "expand", "contract"):
            setattr(block, name, LoRA(getattr(block, name)))
    model.lm_head = LoRA(model.lm_head)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, 24)
    engine = diloco.StreamingDiLoCo(model, **TIMING, exchange=diloco.connect())
    engine.attach(optimizer)

    def adapters() -> dict[str, Tensor]:
        return {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}

    first_epoch = 0
    if resume_from is not None:
        saved = torch.load(out_dir / f"epoch-{resume_from}.pt", weights_only=True)
        engine.load_state_dict(saved["engine"])
        model.load_state_dict(saved["adapters"], strict=False)
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        first_epoch = resume_from + 1
    dataset = torch.utils.data.TensorDataset(*text(torch.Generator().manual_seed(replica()), 64))
    for epoch in range(first_epoch, 3):
        order = torch.Generator().manual_seed(epoch)
        for tokens, targets in torch.utils.data.DataLoader(dataset, 8, shuffle=True, generator=order):
            _, loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            outcome.losses.append(loss.item())
        saved = {"adapters": adapters(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save(saved | {"engine": engine.state_dict()}, out_dir / f"epoch-{epoch}.pt")
    engine.finish()
    engine.copy_outer_to_model()
    before = estimate_loss(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoRA):
                child.base.weight += child.lora_B.detach() @ child.lora_A.detach()
                setattr(parent, name, child.base)
    outcome.common += [before, round(estimate_loss(model) - before, 5)]
    return outcome.after(engine)
