"""One replica of fault_storm.py: a small model of bytes that trains until SIGTERM, and writes what it does.

    python benchmarks/fault_storm_replica.py --url s3://runs/x --name a --out a.jsonl

A line of the output is JSON: `steps` and `seconds` so far, the part of them inside `engine.step()`, its longest
call, and for each fragment its round and the XXH3-64 of Θ. The last line of a replica that ended well has `end`.
"""

import argparse
import json
import signal
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import diloco
from diloco.models.decoder import Decoder
from diloco.models.decoder_config import DecoderConfig

SEQUENCE, BATCH = 64, 4
NUM_HELD_OUT = 1 << 14
"""Bytes at the end of the text."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--text", type=Path, help="a file; without it, synthetic sentences")
    parser.add_argument("--step-seconds", type=float, default=0.1, help="the least time of an inner step")
    parser.add_argument("--sync-every", type=int, default=20)
    parser.add_argument("--overlap-steps", type=int, default=6)
    parser.add_argument("--wire", default="e3m0")
    arguments = parser.parse_args()
    ended = False

    def end(*_: object) -> None:
        nonlocal ended
        ended = True

    signal.signal(signal.SIGTERM, end)
    torch.set_num_threads(1)
    model = new_model()
    started = time.monotonic()
    exchange = diloco.StoreRendezvous(arguments.url, name=arguments.name, poll_seconds=0.1, timeout_seconds=120)
    engine = new_engine(model, exchange, arguments.sync_every, arguments.overlap_steps, arguments.wire)
    with arguments.out.open("a") as out:
        report = Report(out, engine, exchange.replica, joined_seconds=time.monotonic() - started)
        train(
            model, engine, exchange, training_text(arguments.text), arguments.step_seconds, report, lambda: ended
        )
        engine.finish(flush=True)
        exchange.leave()
        report.write(end=True)


def new_model() -> Decoder:
    """The same on every replica."""
    return Decoder(DecoderConfig(num_layers=3, num_heads=2, width=64, vocab_size=256), seed=0)


def new_engine(
    model: Decoder, exchange: diloco.StoreRendezvous, sync_every: int, overlap_steps: int, wire: str
) -> diloco.StreamingDiLoCo:
    fragments = diloco.strided(model, layers_per_fragment=1)
    schedule = diloco.Schedule(sync_every=sync_every, num_fragments=len(fragments), overlap_steps=overlap_steps)
    return diloco.StreamingDiLoCo(model, fragments=fragments, schedule=schedule, wire=wire, exchange=exchange)


def whole_text(path: Path | None) -> np.ndarray:
    """Bytes; those of a file of JSON lines are the texts in it."""
    if path is None:
        words = "the a cat dog bird man sees hears likes small old quick and or of in river field".split()  # noqa: SIM905
        drawn = np.random.default_rng(0).choice(words, 1 << 17)
        return np.frombuffer(" ".join(drawn).encode(), np.uint8)
    text = path.read_text()
    if path.suffix == ".jsonl":
        text = "\n".join(json.loads(line)["text"] for line in text.splitlines())
    return np.frombuffer(text.encode(), np.uint8)


def training_text(path: Path | None) -> np.ndarray:
    return whole_text(path)[:-NUM_HELD_OUT]


def held_out_loss(model: Decoder, path: Path | None) -> float:
    """The mean loss of the last bytes of the text."""
    windows = torch.from_numpy(whole_text(path)[-NUM_HELD_OUT:].astype(np.int64)).view(-1, SEQUENCE)
    with torch.no_grad():
        logits = model(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()


def train(model, engine, exchange, text, step_seconds, report, is_ended) -> None:  # noqa: ANN001
    """Inner steps on this replica's part of the text, each at least so long."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    part = len(text) // exchange.state.rules.num_slots
    slot_text = torch.from_numpy(text[exchange.slot * part :][:part].astype(np.int64))
    tokens = SEQUENCE * BATCH
    while not is_ended():
        start = time.perf_counter()
        position = (exchange.start + engine.tokens) % (part - tokens - BATCH)
        windows = slot_text[position : position + tokens + BATCH].view(BATCH, SEQUENCE + 1)
        logits = model(windows[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(max(0.0, step_seconds - (time.perf_counter() - start)))
        before = time.perf_counter()
        engine.step(tokens=tokens)
        report.stepped(time.perf_counter() - before)


class Report:
    """The lines that a replica writes, about one a second."""

    def __init__(self, out, engine, replica: int, *, joined_seconds: float) -> None:  # noqa: ANN001
        self.out, self.engine, self.replica, self.joined_seconds = out, engine, replica, joined_seconds
        self.started = self.written = time.monotonic()
        self.in_step_seconds = self.longest_seconds = 0.0

    def stepped(self, seconds: float) -> None:
        self.in_step_seconds += seconds
        self.longest_seconds = max(self.longest_seconds, seconds)
        if time.monotonic() > self.written + 1:
            self.write(end=False)

    def write(self, *, end: bool) -> None:
        self.written, rounds = time.monotonic(), self.engine._rounds
        line = {
            "replica": self.replica,
            "end": end,
            "joined_seconds": self.joined_seconds,
            "seconds": self.written - self.started,
            "steps": self.engine.num_steps,
            "in_step_seconds": self.in_step_seconds,
            "longest_seconds": self.longest_seconds,
            "told_steps": [steps for _, steps in rounds.told],
            "rounds": list(rounds.rounds),
            "outer": [f"{base:016x}" for base in rounds.bases],
        }
        self.out.write(json.dumps(line) + "\n")
        self.out.flush()


if __name__ == "__main__":
    main()
