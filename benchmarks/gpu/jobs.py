"""Whole jobs: the trainer's runs, also killed and resumed, in a store and evaluated; loops of other frameworks."""

import json
import re
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path

from gpu.place import Job, Measurements, OutOfTimeError, Place, Row, killed, started

SNIPPETS = Path(__file__).parents[2] / "docs" / "snippets"
_CPU_ONLY = re.compile(r"use_cpu=True,|cpu=True, |accelerator=\"cpu\",")
_SECONDS = 150.0
_SHORT = ["--num-tokens", "10240"]
_DEVICES = {
    "transformers_trainer": "model.device",
    "accelerate_loop": "accelerator.device",
    "lightning_autoencoder": "trainer.strategy.root_device",
}
"""The snippets, and where the device that they train on stands."""


def measurements(place: Place) -> Measurements:
    frameworks = {"Accelerate": "accelerate_loop"}
    more = {} if place.dry else {"transformers": "transformers_trainer", "Lightning": "lightning_autoencoder"}
    return {
        "train and eval": partial(_train, place),
        "train, killed and resumed": partial(_resumed, place),
        "train, replicas in a store": partial(_store, place),
        **{name: partial(_framework, place, snippet) for name, snippet in (frameworks | more).items()},
    }


def _train(place: Place) -> Row:
    """Two replicas of the recipe tiny, which share a GPU, and the held-out loss of their Θ."""
    row = _ended(place, _diloco(place, "train", *_recipe(place, "whole"), *place.size([], _SHORT)))
    return _ended(place, _diloco(place, "eval", str(place.folder / "whole"))) if row["ok"] else row


def _resumed(place: Place) -> Row:
    """The same run, killed after a checkpoint; it ends with the tokens that were asked for."""
    num_tokens, run = place.size(30720, 20480), place.folder / "killed"
    process = _diloco(place, "train", *_recipe(place, run.name), "--num-tokens", str(num_tokens))
    end = min(time.monotonic() + _SECONDS, place.deadline)
    while process.poll() is None and not any(run.rglob("*.sha256")) and time.monotonic() < end:
        time.sleep(0.05)
    was_alive = killed(process)
    row = _ended(place, _diloco(place, "train", "--resume", str(run)))
    summary = json.loads((run / "summary.json").read_text()) if row["ok"] else {}
    return row | {"ok": was_alive and summary.get("num_tokens") == num_tokens}


def _store(place: Place) -> Row:
    """Two jobs that meet in a directory."""
    store = place.folder / "store"
    shutil.rmtree(store, ignore_errors=True)
    jobs = [
        _diloco(place, "train", *_recipe(place, name, "--rendezvous", str(store)), *place.size([], _SHORT))
        for name in ("first", "second")
    ]
    return _ended(place, *jobs)


def _framework(place: Place, snippet: str) -> Row:
    """Two replicas, as the documentation has them, with the GPU of the framework's choice."""
    code = (SNIPPETS / f"{snippet}.py").read_text()
    script = place.folder / f"{snippet}.py"
    code = code if place.dry else _CPU_ONLY.sub("", code)
    script.write_text(f"{code}\nprint({_DEVICES[snippet]}, outer_hash)\n")
    address = f"127.0.0.1:{20_000 + time.time_ns() % 10_000}"
    jobs = []
    for replica in (0, 1):
        where = {"DILOCO_ADDRESS": address, "DILOCO_REPLICA": str(replica), "DILOCO_NUM_REPLICAS": "2"}
        jobs.append(_started(place, [str(script)], **where))
    row = _ended(place, *jobs)
    lines = {_log(place, job).splitlines()[-1] for job in jobs} if row["ok"] else set()
    is_alike = len(lines) == 1 and next(iter(lines)).startswith(place.device.type)
    return row | {"ok": is_alike, "device_and_hash": sorted(lines)}


def _recipe(place: Place, name: str, *meet: str) -> list[str]:
    """The flags of a run that begins anew: a measurement that was cut off has left one of its name."""
    shutil.rmtree(place.folder / name, ignore_errors=True)
    text = place.folder / "text.jsonl"
    if not text.exists():
        text.write_text("".join(json.dumps({"text": f"line {i} of a text. " * 9}) + "\n" for i in range(200)))
    data = ["--data.train", str(text), "--data.held-out-fraction", "0.1"]
    run = ["--name", name, "--runs", str(place.folder), "--device", place.device.type, "--trackers"]
    return ["tiny", *data, *run, *(meet or ("--num-replicas", "2"))]


def _diloco(place: Place, *arguments: str) -> Job:
    return _started(place, ["-m", "diloco", *arguments])


def _started(place: Place, arguments: list[str], **environment: str) -> Job:
    """A process with its output in a file of its number."""
    log = place.folder / "new.log"
    process = started(arguments, place, log, **environment)
    log.rename(place.folder / f"{process.pid}.log")
    return process


def _ended(place: Place, *processes: Job) -> Row:
    """`ok`, True if all ended well, and the end of the output of those that did not."""
    end = time.monotonic() + _SECONDS
    try:
        for process in processes:
            process.wait(max(1.0, min(end, place.deadline) - time.monotonic()))
    except subprocess.TimeoutExpired:
        if place.deadline < end:
            raise OutOfTimeError("the job was ended") from None
    finally:
        for process in processes:
            killed(process)
    failed = [process for process in processes if process.returncode]
    return {"ok": not failed} | ({"output": [_log(place, process)[-600:] for process in failed]} if failed else {})


def _log(place: Place, process: Job) -> str:
    return (place.folder / f"{process.pid}.log").read_text()
