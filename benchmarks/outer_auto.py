"""Held-out loss over the outer learning rate and momentum, for runs of 10 to 1,000 outer steps per fragment.

    python benchmarks/outer_auto.py --train BOOKS.jsonl --held-out HELD_OUT.jsonl --output DIR
    python benchmarks/outer_auto.py --mode lora --base DIR/base.pt --train ARTICLES.jsonl ...

All runs of a cell (one number of outer steps, one number of replicas) are trained at once in one process: the
decoder of the package, vectorised over runs and replicas, and Algorithm 1 on their parameters side by side. With
`--check` one run is trained by the engine, too, on real processes. A cell in DIR/outer_auto.csv is not run again.

Shapes: R = points · seeds · M replicas, N parameters of one replica, B sequences, S tokens of each.
"""

import argparse
import csv
import itertools
import json
import math
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import diloco
from diloco.auto import chosen
from diloco.models.decoder_config import DecoderConfig

POINTS = (
    *("auto", "0.5,0", "0.7,0", "1,0", "1.3,0", "0.5,0.3", "0.7,0.3", "1,0.3"),
    *("0.3,0.6", "0.4,0.6", "0.55,0.6", "0.7,0.6", "1,0.6"),
    *("0.2,0.8", "0.4,0.8", "0.7,0.8", "0.2,0.9", "0.4,0.9"),
)
"""η and μ: gains η / (1 − μ) from 0.5 to 4, several with each momentum."""
CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz0123456789.,;:!?'\"-()&*"
"""The tokens, beside one for all other characters; letters are in lower case."""
BATCH, SEQUENCE = 4, 64
MODEL = DecoderConfig(num_layers=1, width=32, num_heads=2, vocab_size=len(CHARACTERS) + 1)
EVALUATED = 128
"""Held-out sequences."""
RANK, LORA_SCALE = 4, 2.0
"""The rank of each adapter B A, and its factor."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The runs that are trained at once."""

    mode: str
    """full or lora."""
    num_outer_steps: int
    """R, of each fragment."""
    sync_every: int
    """H."""
    num_replicas: int
    """M."""
    learning_rate: float
    """The inner optimizer's peak."""
    points: tuple[tuple[float, float], ...]
    """η and μ."""
    seeds: tuple[int, ...]
    overlap_steps: int = 1
    """τ."""
    mixing: float = 0.5
    """α."""


class Model:
    """Flat parameters (N) and the loss of one replica; columns of a fragment lie side by side."""

    def __init__(self, mode: str, base: Mapping[str, Tensor] | None) -> None:
        self.module = MODEL.build(seed=0)
        self.mode, self.base = mode, base
        if mode == "full":
            self.shapes = {name: theta.shape for name, theta in self.module.named_parameters()}
        else:
            assert base is not None, "a model to fine-tune"
            matrices = [name for name in base if base[name].dim() == 2 and name.startswith("blocks.")]
            self.shapes = {}
            for name in matrices:
                self.shapes[f"{name}.a"] = torch.Size([RANK, base[name].shape[1]])
                self.shapes[f"{name}.b"] = torch.Size([base[name].shape[0], RANK])
        self.shapes = dict(sorted(self.shapes.items(), key=lambda item: self._fragment(item[0])))
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        fragments = [self._fragment(name) for name in self.shapes]
        self.widths = [
            sum(n for n, f in zip(self.sizes, fragments, strict=True) if f == p) for p in sorted(set(fragments))
        ]

    def _fragment(self, name: str) -> int:
        """A fragment per block; what is in none is the last."""
        return int(name.split(".")[1]) if name.startswith("blocks.") else MODEL.num_layers

    def initial(self, seed: int) -> Tensor:
        """θ at the start (N)."""
        if self.mode == "full":
            state = dict(MODEL.build(seed=seed).named_parameters())
            return torch.cat([state[name].detach().flatten() for name in self.shapes])
        generator = torch.Generator().manual_seed(seed)
        parts = []
        for name, shape in self.shapes.items():
            drawn = torch.randn(shape, generator=generator) / math.sqrt(shape[1])
            parts.append((drawn if name.endswith(".a") else torch.zeros(shape)).flatten())
        return torch.cat(parts)

    def parameters(self, theta_N: Tensor) -> dict[str, Tensor]:
        """The decoder's parameters by name."""
        parts = theta_N.split(self.sizes)
        named = {name: part.view(self.shapes[name]) for name, part in zip(self.shapes, parts, strict=True)}
        if self.base is None:
            return named
        changed = {
            name: weight + LORA_SCALE * (named[f"{name}.b"] @ named[f"{name}.a"])
            for name, weight in self.base.items()
            if f"{name}.a" in named
        }
        return dict(self.base) | changed

    def losses(self, theta_RxN: Tensor, batch_RxBxS: Tensor) -> Tensor:
        """The cross-entropy of each of R replicas."""
        with sdpa_kernel(SDPBackend.MATH):  # the others are called once per replica
            return torch.func.vmap(self._loss, randomness="error")(theta_RxN, batch_RxBxS)

    def _loss(self, theta_N: Tensor, batch_BxS: Tensor) -> Tensor:
        logits = torch.func.functional_call(self.module, self.parameters(theta_N), (batch_BxS[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1), batch_BxS[:, 1:].flatten())


def train(cell: Cell, model: Model, train_tokens: Tensor, held_out: Tensor) -> list[dict[str, float]]:
    """The rows of a cell's runs."""
    num_points, num_seeds, M, H = len(cell.points), len(cell.seeds), cell.num_replicas, cell.sync_every
    T = last_step(cell)
    start = torch.stack([model.initial(seed) for seed in cell.seeds])
    theta_RxN = nn.Parameter(start[None, :, None].repeat(num_points, 1, M, 1).flatten(0, 2))
    outer_GxN = start[None].repeat(num_points, 1, 1).flatten(0, 1)
    velocity_GxN = torch.zeros_like(outer_GxN)
    eta_Gx1, mu_Gx1 = (
        torch.tensor([point[i] for point in cell.points]).repeat_interleave(num_seeds)[:, None] for i in (0, 1)
    )
    optimizer = torch.optim.AdamW(
        [theta_RxN], lr=cell.learning_rate, betas=(0.9, 0.99), weight_decay=1 / T, fused=True
    )
    batches = [draw_batches(train_tokens, seed, M) for seed in cell.seeds]
    columns = [slice(sum(model.widths[:p]), sum(model.widths[: p + 1])) for p in range(len(model.widths))]
    sent: dict[tuple[int, int], Tensor] = {}
    previous: dict[int, Tensor] = {}
    rhos = [[] for _ in columns]
    for t in range(1, T + cell.overlap_steps + 1):
        if t <= T:
            batch_SxMxBxL = torch.stack([next(batch) for batch in batches])
            batch_RxBxL = batch_SxMxBxL[None].expand(num_points, -1, -1, -1, -1).flatten(0, 2)
            inner_step(model, theta_RxN, optimizer, batch_RxBxL, rate(t, T) * cell.learning_rate)
        with torch.no_grad():
            own_GxMxN = theta_RxN.view(-1, M, theta_RxN.shape[1])
            for p, c in enumerate(columns):
                if t <= T and t >= H and (t - p * H // len(columns)) % H == 0:
                    sent[t, p] = outer_GxN[:, None, c] - own_GxMxN[:, :, c]
            for p, c in enumerate(columns):
                if (deltas := sent.pop((t - cell.overlap_steps, p), None)) is None:
                    continue
                delta_GxN = deltas.sum(1) / M
                if p in previous:
                    rhos[p].append(F.cosine_similarity(delta_GxN, previous[p], dim=1))
                previous[p] = delta_GxN
                velocity_GxN[:, c] = mu_Gx1 * velocity_GxN[:, c] + delta_GxN
                outer_GxN[:, c] -= eta_Gx1 * (delta_GxN + mu_Gx1 * velocity_GxN[:, c])
                own_GxMxN[:, :, c] = cell.mixing * own_GxMxN[:, :, c] + (1 - cell.mixing) * outer_GxN[:, None, c]
    losses_G = evaluated(model, outer_GxN, held_out)
    rho_G = torch.stack([torch.stack(of_fragment).mean(0) for of_fragment in rhos]).mean(0)
    rows = []
    for g, ((eta, mu), seed) in enumerate((point, seed) for point in cell.points for seed in cell.seeds):
        rows.append({"eta": eta, "mu": mu, "seed": seed, "loss": losses_G[g].item(), "rho": rho_G[g].item()})
    return rows


def last_step(cell: Cell) -> int:
    """The steps in which every fragment is sent so many times, with H or more steps before the first."""
    return (cell.num_outer_steps + 1) * cell.sync_every - 1


def inner_step(
    model: Model, theta_RxN: nn.Parameter, optimizer: torch.optim.AdamW, batch_RxBxL: Tensor, rate: float
) -> None:
    """AdamW after a clip of each replica's gradient to 1."""
    theta_RxN.grad = None
    model.losses(theta_RxN, batch_RxBxL).sum().backward()
    gradient_RxN = theta_RxN.grad
    assert gradient_RxN is not None, "after backward"
    gradient_RxN.mul_((1 / gradient_RxN.norm(dim=1, keepdim=True)).clamp(max=1.0))
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()


def rate(t: int, T: int) -> float:
    """Warm-up of a tenth, then a cosine to 5 %; times the peak."""
    warm = max(1, T // 10)
    if t <= warm:
        return t / warm
    return 0.05 + 0.95 * (1 + math.cos(math.pi * (t - warm) / (T - warm))) / 2


def draw_batches(train_tokens: Tensor, seed: int, M: int) -> Iterator[Tensor]:
    """Batches (M, B / M, S + 1) without end, each replica's from its own part of the text."""
    random = np.random.default_rng(seed)
    part = len(train_tokens) // M
    offsets = torch.arange(SEQUENCE + 1)
    while True:
        starts = torch.from_numpy(random.integers(0, part - SEQUENCE - 1, (M, BATCH // M)))
        starts += part * torch.arange(M)[:, None]
        yield train_tokens[starts[..., None] + offsets].long()


@torch.no_grad()
def evaluated(model: Model, outer_GxN: Tensor, held_out: Tensor) -> Tensor:
    """The held-out loss of each run, by its outer parameters."""
    return torch.cat([model.losses(one[None], held_out[None]) for one in outer_GxN])


def held_out_sequences(path: Path) -> Tensor:
    """Sequences that lie evenly over the text."""
    tokens = read(path)
    starts = torch.linspace(0, len(tokens) - SEQUENCE - 2, EVALUATED).long()
    return tokens[starts[:, None] + torch.arange(SEQUENCE + 1)].long()


def read(path: Path) -> Tensor:
    """The characters of a .jsonl's texts."""
    with path.open() as lines:
        joined = "\n\n".join(json.loads(line)["text"] for line in lines).lower()
    tokens = np.full(128, len(CHARACTERS), dtype=np.uint8)
    tokens[[ord(character) for character in CHARACTERS]] = range(len(CHARACTERS))
    return torch.from_numpy(tokens[np.frombuffer(joined.encode("ascii", "replace"), dtype=np.uint8)])


def pretrain(model: Model, train_tokens: Tensor, steps: int, learning_rate: float) -> dict[str, Tensor]:
    """A model of one text, from which adapters are trained on another."""
    theta = nn.Parameter(model.initial(0)[None])
    optimizer = torch.optim.AdamW([theta], lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    batches = draw_batches(train_tokens, 99, 1)
    for t in range(1, steps + 1):
        batch = torch.cat([next(batches) for _ in range(4)], dim=1)
        inner_step(model, theta, optimizer, batch, rate(t, steps) * learning_rate)
    return {name: value.detach().clone() for name, value in model.parameters(theta[0]).items()}


def check(cell: Cell, model: Model, train_tokens: Tensor, held_out: Tensor) -> None:
    """Print the loss of one run with the engine on real processes beside that of `train`."""
    (row,) = train(cell, model, train_tokens, held_out)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    arguments = [(cell, m, port, train_tokens, held_out) for m in range(cell.num_replicas)]
    with get_context("fork").Pool(cell.num_replicas) as pool:
        losses = pool.starmap(train_by_engine, arguments, chunksize=1)
    print(
        f"{cell}\nvectorised {row['loss']:.6f}, rho {row['rho']:.4f}; engine: (loss, rho) of each replica {losses}"
    )


def train_by_engine(cell: Cell, m: int, port: int, train_tokens: Tensor, held_out: Tensor) -> tuple[float, float]:
    """The loss of the outer parameters, and the mean ρ, of one replica of a run."""
    torch.set_num_threads(1)
    M, H, ((eta, mu),), (seed,) = cell.num_replicas, cell.sync_every, cell.points, cell.seeds
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=m, world_size=M)
    module = MODEL.build(seed=seed)
    engine = diloco.StreamingDiLoCo(
        module,
        fragments=diloco.strided(module, layers_per_fragment=1),
        sync_every=H,
        overlap_steps=cell.overlap_steps,
        mixing=cell.mixing,
        wire="fp32",
        outer=diloco.Nesterov(lr=eta, momentum=mu),
        exchange=diloco.ProcessGroupExchange(),
    )
    T = last_step(cell)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1.0, betas=(0.9, 0.99), weight_decay=1 / T)
    batches, rhos = draw_batches(train_tokens, seed, M), []
    for t in range(1, T + 1):
        batch = next(batches)[m]
        optimizer.zero_grad()
        F.cross_entropy(module(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate(t, T) * cell.learning_rate
        optimizer.step()
        rhos += [outer_step.successive_cosine() for outer_step in engine.step()]
    rhos += [outer_step.successive_cosine() for outer_step in engine.finish()]
    with engine.outer_parameters_applied(), torch.no_grad():
        loss = F.cross_entropy(module(held_out[:, :-1]).flatten(0, 1), held_out[:, 1:].flatten()).item()
    return loss, statistics.mean(rho for rho in rhos if rho is not None)


FIELDS = (
    *("mode", "num_outer_steps", "sync_every", "num_replicas", "learning_rate", "overlap_steps", "mixing"),
    *("eta", "mu", "seed", "loss", "rho"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--train", "--held-out", "--output"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--mode", choices=("full", "lora"), default="full")
    parser.add_argument("--base", type=Path, help="the model to fine-tune; pretrained on --pretrain if absent")
    parser.add_argument("--pretrain", type=Path)
    parser.add_argument("--pretrain-steps", type=int, default=800)
    parser.add_argument("--outer-steps", type=int, nargs="+", default=[10, 17, 30, 100, 300])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sync-every", type=int, default=10)
    parser.add_argument("--mixing", type=float, default=0.5)
    parser.add_argument("--overlap-steps", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--points", nargs="+", default=POINTS, help="η,μ … or auto")
    parser.add_argument(
        "--check", action="store_true", help="train one run with the engine, too, and write no row"
    )
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "outer_auto.csv"
    train_tokens, held_out = read(arguments.train), held_out_sequences(arguments.held_out)
    model = Model(arguments.mode, None if arguments.mode == "full" else pretrained(arguments))
    for cell in cells(arguments):
        facts = {name: getattr(cell, name) for name in FIELDS if hasattr(cell, name)}
        if arguments.check:
            check(cell, model, train_tokens, held_out)
        elif missing(path, cell, facts):
            begin = time.perf_counter()
            rows = train(cell, model, train_tokens, held_out)
            append(path, [facts | row for row in rows])
            best = min(rows, key=lambda row: row["loss"])
            print(f"{time.perf_counter() - begin:6.1f} s {facts}: best {best}", flush=True)


def cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    """The cells that the arguments name."""
    for num_outer_steps, M in itertools.product(arguments.outer_steps, arguments.replicas):
        auto = chosen(num_outer_steps, M, arguments.sync_every, arguments.mixing)
        points = [point.split(",") for point in arguments.points]
        yield Cell(
            mode=arguments.mode,
            num_outer_steps=num_outer_steps,
            sync_every=arguments.sync_every,
            mixing=arguments.mixing,
            overlap_steps=arguments.overlap_steps,
            num_replicas=M,
            learning_rate=arguments.learning_rate,
            points=tuple(auto if point == ["auto"] else (float(point[0]), float(point[1])) for point in points),
            seeds=tuple(arguments.seeds),
        )


def pretrained(arguments: argparse.Namespace) -> dict[str, Tensor]:
    """The model to fine-tune, which is pretrained if there is none."""
    if not arguments.base.exists():
        model, tokens = Model("full", None), read(arguments.pretrain)
        torch.save(pretrain(model, tokens, arguments.pretrain_steps, 0.01), arguments.base)
    return torch.load(arguments.base, weights_only=True)


def missing(path: Path, cell: Cell, facts: Mapping[str, object]) -> bool:
    """True if a run of the cell has no row."""
    if not path.exists():
        return True
    with path.open() as lines:
        rows = [row for row in csv.DictReader(lines) if all(row[name] == str(facts[name]) for name in facts)]
    there = {(float(row["eta"]), float(row["mu"]), int(row["seed"])) for row in rows}
    return any((*point, seed) not in there for point in cell.points for seed in cell.seeds)


def append(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Add rows to the CSV."""
    is_new = not path.exists()
    with path.open("a") as lines:
        writer = csv.DictWriter(lines, FIELDS)
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
