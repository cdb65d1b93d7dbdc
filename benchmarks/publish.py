"""Bytes of a published version of bfloat16 weights after a step of AdamW, and the time to make and to apply it.

    python benchmarks/publish.py --text BOOKS.jsonl --tokenizer T --states FOLDER --output FOLDER

A decoder is trained with FP32 parameters for a moment, then for a few steps at each learning rate; its parameters
after the last two of these are kept in FOLDER as bfloat16, so that a second call only measures. Compared are the
difference, and the sizes after zstd (level 3) of the whole weights, of their XOR with those of the step before,
and of the changed places and values (as in PULSE, arXiv 2602.03839). Times are processor seconds of one thread,
the best of the repeats, beside a copy of the weights in the same turns.
"""

import argparse
import csv
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import zstandard
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from diloco.data.tokenizers import load_tokenizer
from diloco.models.decoder import Decoder
from diloco.models.decoder_config import DecoderConfig
from diloco.publishing.differences import apply_to, content_digest, difference_of
from diloco.training.hardware import chosen_precision

STEPS = 4
"""Steps at each learning rate; the parameters after the last two are kept."""
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One learning rate."""

    learning_rate: str
    parameters: int
    changed: float
    """The part of the cells that changed."""
    whole_bytes: int
    difference_bytes: int
    whole_zstd_bytes: int
    xor_zstd_bytes: int
    places_zstd_bytes: int
    copy_seconds: float
    encode_seconds: float
    apply_seconds: float
    digest_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a .jsonl with a field `text`")
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--states", type=Path, required=True, help="the folder of the trained parameters")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--learning-rates", nargs="+", default=["1e-6", "1e-5", "1e-4", "1e-3"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--warm-up", type=int, default=50, help="steps before, up to the learning rate 6e-4")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    train(arguments)
    torch.set_num_threads(1)
    rows = [measure(arguments.states / rate, arguments.repeats) for rate in arguments.learning_rates]
    arguments.output.mkdir(parents=True, exist_ok=True)
    with (arguments.output / "publish.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    print("| learning rate | changed | bytes | part | zstd whole | XOR | places | encode | apply | digest |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        shares = [row.difference_bytes, row.whole_zstd_bytes, row.xor_zstd_bytes, row.places_zstd_bytes]
        parts = " | ".join(f"{share / row.whole_bytes:.2%}" for share in shares)
        times = row.encode_seconds, row.apply_seconds, row.digest_seconds
        speeds = " | ".join(f"{row.copy_seconds / seconds:.2f}" for seconds in times)
        print(f"| {row.learning_rate} | {row.changed:.2%} | {row.difference_bytes:,} | {parts} | {speeds} |")


def train(arguments: argparse.Namespace) -> None:
    """Train and keep what is not yet in the folder."""
    wanted = [rate for rate in arguments.learning_rates if not last_of(arguments.states / rate).exists()]
    if not wanted:
        return
    tokens = tokens_of(arguments.text, arguments.tokenizer)
    config = DecoderConfig(
        num_layers=arguments.layers,
        num_heads=arguments.heads,
        width=arguments.width,
        vocab_size=load_tokenizer(arguments.tokenizer).vocab_size,
    )
    model = config.build(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    warm = arguments.states / "warm.pt"
    arguments.states.mkdir(parents=True, exist_ok=True)
    if not warm.exists():
        for step in range(arguments.warm_up):
            take_step(model, optimizer, tokens, step, 6e-4 * min(1, (step + 1) / 20))
        torch.save([model.state_dict(), optimizer.state_dict()], warm.with_suffix(".part"))
        warm.with_suffix(".part").rename(warm)
    for rate in wanted:
        for target, state in zip((model, optimizer), torch.load(warm, weights_only=True), strict=True):
            target.load_state_dict(state)
        (arguments.states / rate).mkdir(exist_ok=True)
        for step in range(1, STEPS + 1):
            take_step(model, optimizer, tokens, arguments.warm_up + step, float(rate))
            path = arguments.states / rate / f"{step}.safetensors"
            halves = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
            if step > STEPS - 2:
                save_file(halves, path.with_suffix(".part"))
                path.with_suffix(".part").rename(path)


def last_of(folder: Path) -> Path:
    return folder / f"{STEPS}.safetensors"


def tokens_of(path: Path, tokenizer: str, most: int = 400_000) -> Tensor:
    encode, tokens = load_tokenizer(tokenizer).encode, list[np.ndarray]()
    with path.open() as lines:
        for line in lines:
            tokens += [np.asarray(ids, np.int64) for ids in encode([json.loads(line)["text"]])]
            if sum(map(len, tokens)) > most:
                break
    return torch.from_numpy(np.concatenate(tokens))


def take_step(model: Decoder, optimizer: torch.optim.Optimizer, tokens: Tensor, step: int, rate: float) -> None:
    """One step on two windows of 256 tokens."""
    generator, length = torch.Generator().manual_seed(step), min(256, len(tokens) - 2)
    starts = torch.randint(len(tokens) - length - 1, (2,), generator=generator).tolist()
    window = torch.stack([tokens[start : start + length + 1] for start in starts])
    with torch.autocast("cpu", torch.bfloat16, enabled=chosen_precision("auto", torch.device("cpu")) == "bf16"):
        logits = model(window[:, :-1])
    model.loss(logits, window[:, 1:], 1e-4)[1].backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()


def measure(folder: Path, repeats: int) -> Row:
    old, new = (load_file(folder / f"{step}.safetensors") for step in (STEPS - 1, STEPS))
    state, best = {name: tensor.clone() for name, tensor in old.items()}, dict[str, float]()

    def measured(name: str, work: Callable[[], T]) -> T:
        start = time.thread_time()
        result = work()
        best[name] = min(best.get(name, float("inf")), time.thread_time() - start)
        return result

    def copy() -> None:
        for name, tensor in old.items():
            state[name].copy_(tensor)

    body, num_changed = memoryview(b""), 0
    for _ in range(repeats):
        measured("copy", copy)
        body = memoryview(b"")  # whose memory is taken again, as a publisher does
        body = measured("encode", partial(difference_of, old, new))
        num_changed = measured("apply", partial(apply_to, state, body, source="the difference"))
        assert measured("digest", partial(content_digest, state)) == content_digest(new)
    cells_N, others_N = (
        np.concatenate([t.view(torch.int16).numpy().ravel() for t in s.values()]) for s in (new, old)
    )
    places = np.flatnonzero(cells_N != others_N)
    gaps = np.diff(places, prepend=-1).astype(np.int32)
    return Row(
        learning_rate=folder.name,
        parameters=len(cells_N),
        changed=num_changed / len(cells_N),
        whole_bytes=cells_N.nbytes,
        difference_bytes=len(body),
        whole_zstd_bytes=zstd(cells_N),
        xor_zstd_bytes=zstd(cells_N ^ others_N),
        places_zstd_bytes=zstd(gaps) + zstd(cells_N[places]),
        **{f"{name}_seconds": round(seconds, 5) for name, seconds in best.items()},
    )


def zstd(array: np.ndarray) -> int:
    return len(zstandard.ZstdCompressor(level=3).compress(array.tobytes()))


if __name__ == "__main__":
    main()
