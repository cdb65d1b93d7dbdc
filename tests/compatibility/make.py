"""Writes what later releases must read, in a folder of the release: a run, a store and published weights.

    python -m tests.compatibility.make

writes them anew, the same but for times and nonces: when a format changes, and before a major release. Payloads of
every codec stand in tests/wire/vectors.json.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from safetensors.torch import load_file
from torch import Tensor, nn

import diloco
from diloco.cli.main import main
from diloco.outer.step import parameters_hash
from diloco.training.records.checkpoints import finished, remove

RELEASE = "1.0"
"""The folder that is written; those of earlier releases stay as long as they are to be read."""
STEPS = 12
ROUNDS = 6


def key_in(folder: Path) -> Path:
    """The file of the key that signs the store and the weights."""
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    path = folder / "key"
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    path.chmod(0o600)
    return path


def model() -> nn.Sequential:
    """Two blocks whose parameters are the same on every torch."""
    made = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    state = {
        name: torch.arange(value.numel()).reshape(value.shape) / 64 for name, value in made.state_dict().items()
    }
    made.load_state_dict(state)
    return made


def engine_of(url: str, key: Path, **settings: Any) -> tuple[diloco.StreamingDiLoCo, diloco.StoreRendezvous, Any]:
    """An engine that joins the run of a store, and its optimizer."""
    made = model()
    rendezvous = diloco.StoreRendezvous(url, key=str(key), step_tokens=8, timeout_seconds=60, **settings)
    engine = diloco.StreamingDiLoCo(
        made,
        fragments=diloco.sequential(made, layers_per_fragment=1, blocks=""),
        sync_every=4,
        overlap_steps=1,
        wire="e3m0",
        rendezvous=rendezvous,
    )
    return engine, rendezvous, torch.optim.SGD(made.parameters(), lr=1 / 64)


def take_steps(engine: diloco.StreamingDiLoCo, optimizer: torch.optim.SGD, num_steps: int) -> None:
    """Inner steps whose gradients grow, slow enough for the store to follow."""
    for step in range(num_steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, (step + 1) / 8)
        optimizer.step()
        engine.step(tokens=8)
        time.sleep(0.1)


def write_run(folder: Path) -> None:
    """A run of two replicas as a kill leaves it: its last checkpoint has a fragment in flight."""
    text = folder / "text.jsonl"
    rows = ({"text": f"the number {number} is {number * number} squared."} for number in range(400))
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = folder / "text"
    main(["data", "prepare", "--train", str(text), "--output", str(prepared), "--held-out-fraction", "0.1"])
    flags = ["--name", "run", "--runs", str(folder), "--data.prepared", str(prepared), "--trackers"]
    small = {"model.width": 8, "model.num-layers": 2, "diloco.sync-every": 4, "diloco.layers-per-fragment": 1}
    small |= {"num-tokens": STEPS * 8 * 64, "checkpoint.every-steps": 5, "diloco.overlap-steps": 2}
    for name, value in small.items():
        flags += [f"--{name}", str(value)]
    main(["train", "tiny", *flags])
    run = folder / "run"
    for name in ("summary.json", "samples.json", "outer.safetensors", "running"):
        (run / name).unlink(missing_ok=True)
    for replica in (run / "checkpoints").iterdir():
        for step in set(finished(replica)) - {10}:
            remove(replica / f"step-{step:08d}")
    text.unlink()


def write_store(folder: Path, key: Path) -> str:
    """A run in a store that one replica has left; returns the hash of Θ."""
    engine, rendezvous, optimizer = engine_of(str(folder / "store"), key, name="first", snapshot_rounds=2)
    take_steps(engine, optimizer, 4 * ROUNDS)
    engine.finish()
    rendezvous.leave()
    return engine.outer_hash()


def write_weights(folder: Path, key: Path) -> str:
    """Three versions, the last of which is a difference; returns the digest of its content."""
    with diloco.Publisher(str(folder / "weights"), key=str(key), whole_every=2) as publisher:
        versions = [
            publisher.publish(
                {"a": torch.arange(64.0) + step / 8, "b": torch.ones(3)}, step=step, facts={"of": step}
            )
            for step in range(4)
        ]
    assert versions[-1].difference is not None
    return versions[-1].digest


def hashes_of(run: Path) -> dict[str, str]:
    """SHA-256 over the tensors of each replica's checkpoint."""
    files = sorted(run.glob("checkpoints/*/step-*/shard-0.safetensors"))
    return {file.parts[-3]: parameters_hash(_sorted(load_file(file).items())) for file in files}


def _sorted(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return dict(sorted(tensors))


def write(folder: Path) -> None:
    key = key_in(folder)
    write_run(folder)
    expected = {
        "release": diloco.__version__,
        "public_key": Ed25519PrivateKey.from_private_bytes(bytes(range(32))).public_key().public_bytes_raw().hex(),
        "checkpoints": hashes_of(folder / "run"),
        "store": write_store(folder, key),
        "weights": write_weights(folder, key),
    }
    key.unlink()
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        write(Path(name))
        target = Path(__file__).with_name(RELEASE)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(name, target)
