"""The mistakes that docs/mistakes.py makes, and the files that they are made with."""

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from diloco.training.records.runs import running

PORT, OTHER_PORT = 8899, 8898
"""Two, since the process of another mistake may keep one open for a while."""
TRAIN = "diloco train tiny --data.train text.jsonl"
PREPARED = (
    f"{TRAIN} --num-tokens 10240 --name first",
    f"{TRAIN} --num-tokens 10240 --rendezvous store --name a",
    "diloco data prepare --train stdlib --max-train-bytes 100000 --output prepared",
)
"""The runs that are there before a mistake is made."""
_A_KEY = "0" * 62 + "ff"


@dataclass(frozen=True)
class Mistake:
    """A command line, and what goes on while it is typed."""

    typed: str
    """The line as one types it in a shell, of which `NAME=value`, `ulimit -f N;` and `> FILE` are understood."""
    remark: str = ""
    """Words for what the command line does not show."""
    during: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context in the folder of the command."""
    has_report: bool = False
    """Another program adds lines to the first."""


def write_files() -> None:
    """Write the files with which the mistakes are made into the working directory."""
    subjects, verbs = ("the cat", "a ship", "my aunt"), ("sees", "carries", "forgets")
    sentences = [
        f"{s} {v} {o}, {i}." for i in range(40) for s in subjects for v in verbs for o in ("rain", "salt")
    ]
    rows = [{"text": " ".join(sentences[i : i + 30])} for i in range(0, len(sentences), 5)]
    texts = {
        "text.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "empty.txt": "",
        "notes/README.md": "",
        "chats.jsonl": json.dumps({"content": "Hello."}) + "\n",
        "table.csv": "number,body\n1,Hello.\n",
        "short.txt": "Hello.\n",
        "notes.json": '{"a": 1}\n',
        "broken.toml": 'recipe = "tiny"\n[diloco\nsync_every = 10\n',
        "typo.toml": 'recipe = "tiny"\n[diloco]\nsync_evry = 10\n',
        "section.toml": 'recipe = "tiny"\nsync_every = 10\n',
        "gpt2.json": '{"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 257}',
        "old/model.safetensors": "",
        "tables/overlap.csv": "tier,seed,run,eval_loss\nsmall,0,run-0123456789ab,1.7\n",
    }
    for name, text in texts.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    Path("photo.txt").write_bytes(b"\x89PNG\r\n\x1a\n")
    Path("photo.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    Path("notes.json").chmod(0o644)
    for path in Path().rglob("*.*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))  # the names of prepared directories depend on them


@contextmanager
def _busy(port: int) -> Iterator[None]:
    with socket.socket() as other:
        with suppress(OSError):  # then it is in use by somebody else
            other.bind(("127.0.0.1", port))
            other.listen()
        yield


@contextmanager
def _a_run_that_goes_on() -> Iterator[None]:
    with running(Path("runs/first").absolute()):
        yield


@contextmanager
def _moved_data() -> Iterator[None]:
    shutil.move("data", "elsewhere")
    yield


@contextmanager
def _checkpoints_elsewhere() -> Iterator[None]:
    shutil.rmtree("runs/first/checkpoints/replica-1")
    yield


_COMMANDS = (
    Mistake("diloco trian laptop"),
    Mistake("diloco --num-tokens 1M"),
    Mistake("diloco train --num-tokens 1M"),
    Mistake("diloco train laptpo"),
    Mistake("diloco train gpt2"),
    Mistake("diloco train tiny --metod diloco"),
    Mistake("diloco train tiny --num-replicas two"),
    Mistake("diloco train tiny text.jsonl"),
    Mistake("diloco train tiny --depth 8", "as with nanochat"),
    Mistake("diloco train tiny --training.steps 1000", "as with torchtitan"),
    Mistake("diloco train tiny --learning_rate 1e-3", "as with transformers"),
    Mistake("diloco train tiny --per_device_train_batch_size 4", "as with transformers"),
    Mistake("diloco train tiny --output_dir out", "as with transformers"),
    Mistake("diloco train tiny --model.hf gpt2.json --model.width 4", "a config of transformers"),
    Mistake("diloco store stauts store"),
    Mistake("diloco simulate published > /dev/full", "the disk of the output is full"),
)
_TEXT = (
    Mistake("diloco train tiny --data.train missing.txt"),
    Mistake("diloco train tiny --data.train https://host/text.jsonl"),
    Mistake("diloco train tiny --data.train empty.txt"),
    Mistake("diloco train tiny --data.train notes", "a directory without texts"),
    Mistake("diloco train tiny --data.train chats.jsonl", "the text is in another field"),
    Mistake("diloco train tiny --data.train table.csv", "the text is in another column"),
    Mistake("diloco train tiny --data.train photo.txt", "no text, by the name of one"),
    Mistake("diloco train tiny --data.train photo.png"),
    Mistake("diloco train tiny --data.train short.txt"),
    Mistake("diloco train tiny --data.train short.txt --data.held-out-fraction 0.5"),
    Mistake("diloco train tiny --data.train text.jsonl --data.held-out short.txt"),
    Mistake("diloco train tiny --data.train text.jsonl --data.held-out-fraction 0.9999"),
    Mistake("diloco train tiny --data.train text.jsonl --data.held-out-fraction 2"),
    Mistake(f"{TRAIN} --data.held-out text.jsonl"),
    Mistake(f"HF_HUB_OFFLINE=1 {TRAIN} --data.tokenizer gpt2"),
    Mistake(f"{TRAIN} --data.tokenizer notes.json", "JSON, but no tokenizer"),
    Mistake(f"{TRAIN} --data.tokenizer bpe:32k"),
    Mistake("diloco train 35m --data.train text.jsonl", "it needs a tokenizer of its size"),
    Mistake(f"{TRAIN} --data.prepared prepared", "a directory of other text"),
)
_SETTINGS = (
    Mistake("diloco train tiny --num-tokens 1GB"),
    Mistake("diloco train tiny --num-tokens 0"),
    Mistake("diloco train tiny --num-tokens 1M --epochs 2"),
    Mistake("diloco train tiny --num-replicas 3"),
    Mistake("diloco train tiny --device gpu"),
    Mistake("CUDA_VISIBLE_DEVICES= diloco train tiny --device cuda", "a machine without a GPU"),
    Mistake("diloco train --config typo.toml", "it has `sync_evry = 10`"),
    Mistake("diloco train --config section.toml", "it has `sync_every = 10` outside `[diloco]`"),
    Mistake("diloco train --config broken.toml", "it has `[diloco`"),
    Mistake("diloco train --config missing.toml"),
    Mistake("diloco train tiny --config run.yaml"),
)
_OUTER = (
    Mistake("diloco train tiny --diloco.layers-per-fragment 9"),
    Mistake("diloco train tiny --diloco.overlap-steps 10"),
    Mistake("diloco train tiny --diloco.overlap-steps 1 2 3"),
    Mistake(f"{TRAIN} --diloco.sync-every 100"),
    Mistake("diloco train tiny --diloco.wire int9"),
    Mistake("diloco train tiny --diloco.wire int8:blok=128"),
    Mistake("diloco train tiny --diloco.combine all_reduce"),
    Mistake("diloco train tiny --method data_parallel --diloco.sync-every 20"),
)
_RUNS = (
    Mistake(f"{TRAIN} --name first", "the name of a finished run"),
    Mistake(f"{TRAIN} --name first", "the name of a run that goes on", _a_run_that_goes_on),
    Mistake("diloco train --resume runs/fist"),
    Mistake("diloco train --resume store"),
    Mistake("diloco train --resume runs/first --model.width 64"),
    Mistake("diloco train laptop --resume runs/first"),
    Mistake("diloco train --resume runs/first", "its data was moved", _moved_data),
    Mistake(f"{TRAIN} --num-replicas 1 --name hot --optimizer.learning-rate 1e9"),
    Mistake(
        f"ulimit -f 1000; {TRAIN} --num-replicas 1 --num-tokens 10240 --name big",
        "a file may have 1,000 KiB; a full disk is alike",
    ),
    Mistake(f"{TRAIN} --prometheus-port {PORT}", "the port is in use", partial(_busy, PORT)),
    Mistake("torchrun --nproc-per-node 1 -m diloco train tiny --data.train text.jsonl --name x", has_report=True),
)
_STORE = (
    Mistake(f"{TRAIN} --rendezvous ftp://host/run --name b"),
    Mistake(f"{TRAIN} --rendezvous s3:/bucket/run --name b"),
    Mistake(f"{TRAIN} --rendezvous az://container/run --name b", "no credentials"),
    Mistake(f"{TRAIN} --rendezvous missing/run --name b"),
    Mistake(f"{TRAIN} --rendezvous store --name a", "a replica is started again, with another budget"),
    Mistake(f"{TRAIN} --rendezvous other --name a", "the name of a replica of another store"),
    Mistake(f"{TRAIN} --rendezvous store --name b", "the run has another budget"),
    Mistake(f"{TRAIN} --num-tokens 10240 --rendezvous store --name b", "the run is over"),
    Mistake("diloco store status s3://bucket/run", "no credentials"),
    Mistake("AWS_ENDPOINT_URL=r2.example.com diloco store status s3://bucket/run"),
    Mistake("AWS_ENDPOINT_URL=https://r2.example.com/bucket diloco store check s3://bucket/run"),
    Mistake("diloco store status missing"),
    Mistake("diloco store verify runs/first", "a run's directory, and no store"),
    Mistake("diloco keys show missing.key"),
    Mistake("diloco keys show notes.json"),
    Mistake("diloco keys allow store abc"),
    Mistake(f"diloco keys allow store {_A_KEY}"),
)
_FINISHED = (
    Mistake("diloco generate runs/fist"),
    Mistake("diloco generate first"),
    Mistake("diloco generate runs"),
    Mistake("diloco generate runs/first Hello"),
    Mistake("diloco generate runs/first --temperature -1"),
    Mistake("diloco generate runs/first --max_new_tokens 9", "as with transformers"),
    Mistake("diloco generate runs/first", "its data was moved", _moved_data),
    Mistake("diloco chat missing"),
    Mistake("diloco eval missing"),
    Mistake("diloco eval runs/first --data missing.jsonl"),
    Mistake("diloco eval runs/first --data text.jsonl", "a file without questions"),
    Mistake("diloco eval runs/first --tasks piqa --data text.jsonl"),
    Mistake("diloco eval runs/first --at-step 7"),
    Mistake(
        "diloco eval runs/first --parameters average", "a replica was on another machine", _checkpoints_elsewhere
    ),
    Mistake("HF_ENDPOINT=http://127.0.0.1:9 diloco eval runs/first --tasks hellaswag"),
    Mistake("diloco export runs/first --to gguf --output new"),
    Mistake("diloco export runs/first --to hf"),
    Mistake("diloco export runs/first --to hf --output old", "a directory that is not empty"),
    Mistake("HF_HUB_OFFLINE=1 diloco export runs/first --to hf --output new --push-to-hub me/model"),
    Mistake("diloco report notes", "a directory without runs"),
    Mistake("diloco report table.csv", "a table that no experiment wrote"),
    Mistake(
        f"diloco watch runs/first --serve --port {OTHER_PORT}", "the port is in use", partial(_busy, OTHER_PORT)
    ),
)
_PLANS = (
    Mistake("diloco plan --num-params 1e9"),
    Mistake("diloco plan --num-params 1B --num-layers 24 --step-seconds 1 --link-gbit-s 1"),
    Mistake("diloco plan --num-params 1e9 --num-layers 24 --step-seconds 1 --link-gbit-s 1 --num-tokens 1e6"),
    Mistake("diloco plan --measure tiny --diloco.wire int8"),
    Mistake("diloco simulate bandwith"),
    Mistake("diloco simulate bandwidth --num-params 1e9 --num-layers 24 --step-seconds 1"),
    Mistake(
        "diloco simulate utilization --num-params 1e9 --num-layers 24 --step-seconds 1 --method diloco "
        "--link-gbit-s 0"
    ),
    Mistake("diloco sweep tiny"),
    Mistake("diloco sweep tiny --axis learning_rate=high"),
    Mistake("diloco sweep tiny --data.train text.jsonl --axis depth=2,4"),
    Mistake("diloco experiment"),
    Mistake("diloco experiment frezing"),
    Mistake("diloco experiment freezing --corpus missing.txt"),
    Mistake("diloco experiment freezing --tabulate"),
    Mistake("diloco experiment overlap --tabulate --output tables", "with a table of another corpus"),
)

SECTIONS: dict[str, tuple[Mistake, ...]] = {
    "Commands, recipes, flags": _COMMANDS,
    "Text and tokenizer": _TEXT,
    "Budget, batch, device, config file": _SETTINGS,
    "Fragments, syncs, wire": _OUTER,
    "Runs": _RUNS,
    "Stores and keys": _STORE,
    "What a run has left": _FINISHED,
    "Plans, sweeps, experiments": _PLANS,
}
