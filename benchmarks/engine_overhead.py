"""The time of `engine.step()` on a step without a sync, beside the training step of a 5M-parameter model.

    python benchmarks/engine_overhead.py

Prints the ratio of the medians, measured in turns within one process.
"""

import argparse
import statistics
import time

import torch

import diloco
from diloco.models.decoder_config import DecoderConfig
from diloco.training.hardware import chosen_precision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="the first five are not counted")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = DecoderConfig(num_layers=6, num_heads=4, width=256, vocab_size=1024).build(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    fragments = diloco.strided(model, layers_per_fragment=3)
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=fragments,
        schedule=diloco.Schedule(sync_every=10**6, num_fragments=len(fragments), overlap_steps=1),
        exchange=diloco.LoopbackExchange(),
    )
    is_half = chosen_precision("auto", torch.device("cpu")) == "bf16"
    window = torch.randint(0, 1024, (2, 257), generator=torch.Generator().manual_seed(0))
    training, engine_alone = [], []
    for _ in range(arguments.steps):
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            logits = model(window[:, :-1])
        model.loss(logits, window[:, 1:], 1e-4)[1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        trained = time.perf_counter()
        engine.step()
        training.append(trained - start)
        engine_alone.append(time.perf_counter() - trained)
    engine.finish()
    step, overhead = statistics.median(training[5:]), statistics.median(engine_alone[5:])
    num_params = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_params:,} parameters, 2 sequences of 256 tokens, {'bf16' if is_half else 'fp32'}, one thread")
    print(f"training step {1e3 * step:.2f} ms, engine.step() {1e3 * overhead:.4f} ms: {overhead / step:.4%}")


if __name__ == "__main__":
    main()
