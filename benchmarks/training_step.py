"""A training step of our decoder beside that of a plain GPT of the same size, in turns on one thread.

    python benchmarks/training_step.py

The plain one is what a tutorial has: learned positions, LayerNorm, torch's attention, `F.cross_entropy`. Ours adds
QK-LayerNorm, RoPE and z-loss. Both train in bfloat16 autocast, or in FP32 where the processor has no instructions
for it, with clipping and the fused AdamW, in turns. Times are the thread's processor time, and each figure is a
median.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diloco.models.decoder import Decoder
from diloco.models.decoder_config import DecoderConfig
from diloco.training.hardware import chosen_precision

SIZES = {
    "1M": DecoderConfig(num_layers=6, num_heads=2, width=128, vocab_size=257),
    "5M": DecoderConfig(num_layers=6, num_heads=4, width=256, vocab_size=1024),
    "20M": DecoderConfig(num_layers=8, num_heads=8, width=448, vocab_size=1024),
}
Z_LOSS = 1e-4
IS_HALF = chosen_precision("auto", torch.device("cpu")) == "bf16"


class PlainBlock(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, self.num_heads = config.width, config.num_heads
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv, self.out = (nn.Linear(width, n * width, bias=False) for n in (3, 1))
        self.mlp_in, self.mlp_out = (
            nn.Linear(n, m, bias=False) for n, m in ((width, 4 * width), (4 * width, width))
        )

    def forward(self, x_BxTxD: Tensor) -> Tensor:
        parts = self.qkv(self.attention_norm(x_BxTxD)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BxTxD = x_BxTxD + self.out(y.transpose(1, 2).flatten(-2))
        return x_BxTxD + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x_BxTxD))))


class Plain(nn.Module):
    def __init__(self, config: DecoderConfig, num_tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(num_tokens, config.width)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BxT: Tensor) -> Tensor:
        x_BxTxD = self.embedding(tokens_BxT) + self.positions.weight[: tokens_BxT.shape[1]]
        for block in self.blocks:
            x_BxTxD = block(x_BxTxD)
        return F.linear(self.norm(x_BxTxD), self.embedding.weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--steps", type=int, default=40, help="of each; the first five are not counted")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="in a sequence")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| parameters | plain, tokens/s | ours, tokens/s | ours / plain |\n|---|---|---|---|")
    for name in arguments.sizes:
        config, shape = SIZES[name], (arguments.sequences, arguments.tokens)
        ours, plain = our_step(config.build(seed=0)), plain_step(Plain(config, arguments.tokens))
        times: list[tuple[float, float]] = []
        for step in range(arguments.steps):
            window = torch.randint(0, config.vocab_size, (shape[0], shape[1] + 1))
            order = (plain, ours) if step % 2 else (ours, plain)
            taken = {run: seconds(run, window) for run in order}
            times.append((taken[plain], taken[ours]))
        tokens = shape[0] * shape[1]
        plain_s, ours_s = (statistics.median(column) for column in zip(*times[5:], strict=True))
        ratio = statistics.median(p / o for p, o in times[5:])
        num_params = config.num_matrix_params
        print(f"| {num_params:,} | {tokens / plain_s:,.0f} | {tokens / ours_s:,.0f} | {ratio:.3f} |", flush=True)


def our_step(model: Decoder) -> Callable[[Tensor], None]:
    def objective(window: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=IS_HALF):
            logits = model(window[:, :-1])
        return model.loss(logits, window[:, 1:], Z_LOSS)[1]

    return step_of(model, objective)


def plain_step(model: Plain) -> Callable[[Tensor], None]:
    def objective(window: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=IS_HALF):
            logits = model(window[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())

    return step_of(model, objective)


def step_of(model: nn.Module, objective: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(window: Tensor) -> None:
        objective(window).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Callable[[Tensor], None], window: Tensor) -> float:
    start = time.thread_time()
    step(window)
    return time.thread_time() - start


if __name__ == "__main__":
    main()
