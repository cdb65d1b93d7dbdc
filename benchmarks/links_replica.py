"""One replica of `links.py`, in a namespace of its own: it reads questions, a JSON line each, and answers them.

    {"measure": "link", "seconds": 2}                 bandwidth and latency of the link
    {"method": "streaming", "num_steps": 90, …}       train so many steps from the same initial parameters

Each answer is a JSON line on standard output.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from link_study.methods import PEER
from link_study.synchronizers import DDP, Alone, Torchft

from diloco.data.shards import open_split
from diloco.exchange.transport import Channel, Tag, barrier
from diloco.presets import PRESETS, own_settings
from diloco.training.config.config import TrainConfig, from_json
from diloco.training.loop import gradients, inner_step, open_batches
from diloco.training.measure import measure_link
from diloco.training.optimizer import learning_rate
from diloco.training.records.summary import evaluate, open_held_out
from diloco.training.state import TrainState, initial_state
from diloco.training.world import World, join

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Question = dict[str, Any]
Answer = dict[str, Any]


def main() -> None:
    torch.set_num_threads(1)
    config = from_json(TrainConfig, json.loads(Path(sys.argv[1]).read_text()))
    with join(config) as world:
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line), config, world)), flush=True)


def answer(question: Question, config: TrainConfig, world: World) -> Answer:
    match question.get("measure"):
        case "link":
            gbit_s, latency_seconds = measure_link(world.exchange, seconds=question["seconds"])
            return {"link_gbit_s": gbit_s, "latency_seconds": latency_seconds}
        case "payload":
            return exchange_payload(world, question["num_bytes"], question["round"])
        case "all_reduce":
            return all_reduce_beside_training(config, world, question["wire"], question["num_rounds"])
        case _:
            return train(config, world, question)


def exchange_payload(world: World, num_bytes: int, round: int) -> Answer:
    """One payload each way, at once."""
    payload = torch.zeros(num_bytes, dtype=torch.uint8)
    others = {replica: payload for replica in range(world.num_replicas) if replica != world.replica}
    barrier(world.exchange)
    sent, start = _bytes_on_interface(), time.perf_counter()
    world.exchange.start(others, Tag(Channel.PROBE, round=round)).wait()
    wall_seconds = time.perf_counter() - start
    time.sleep(0.5)  # the other's last acknowledgements are on their way
    return {
        "wall_seconds": wall_seconds,
        "interface_bytes": _bytes_on_interface() - sent,
        "payload_bytes": num_bytes * len(others),
    }


def all_reduce_beside_training(config: TrainConfig, world: World, wire: str, num_rounds: int) -> Answer:
    """Seconds of torch's all-reduce of the gradients, alone and beside training, and of a step beside it."""
    assert config.data.prepared is not None, "the config is resolved"
    state = _begin({"method": "alone"}, config, world)
    batches = open_batches(config, world, open_split(config.data.prepared, "train"))
    gradients_N = torch.zeros(sum(parameter.numel() for parameter in state.model.parameters()))

    def reduce() -> float:
        start = time.perf_counter()
        for _ in range(num_rounds):
            sent_N = gradients_N.to(DTYPES[wire]).div_(world.num_replicas)
            dist.all_reduce(sent_N)
            gradients_N.copy_(sent_N)
        return (time.perf_counter() - start) / num_rounds

    def train_step(step: int) -> float:
        start = time.perf_counter()
        rate = learning_rate(config.optimizer, step, num_steps=config.num_steps)
        inner_step(state, batches.batch(step), world, rate)
        return time.perf_counter() - start

    barrier(world.exchange)
    quiet_seconds, step_seconds = reduce(), []
    for step in (1, 2):  # the first steps allocate
        train_step(step)
    with ThreadPoolExecutor(1) as beside:
        barrier(world.exchange)
        reduced = beside.submit(reduce)
        for step in count(3):
            step_seconds.append(train_step(step))
            if reduced.done():
                break
    whole_steps = step_seconds[:-1] or step_seconds  # the last one was only partly beside the all-reduce
    return {
        "quiet_seconds": quiet_seconds,
        "seconds": reduced.result(),
        "step_seconds": statistics.mean(whole_steps),
    }


def train(config: TrainConfig, world: World, question: Question) -> Answer:
    """Train; answer with the end of each step, the bytes sent, and the outer parameters' hash."""
    assert config.data.prepared is not None, "the config is resolved"
    state = _begin(question, config, world)
    batches = open_batches(config, world, open_split(config.data.prepared, "train"))
    for _ in range(2):  # the first passes allocate, and DDP builds its buckets
        gradients(state, batches.batch(1), world)
        state.optimizer.zero_grad()
    ends, after_seconds, num_outer_steps = [], [], 0
    barrier(world.exchange)
    sent, start = _bytes_on_interface(), time.perf_counter()
    for step in range(1, question["num_steps"] + 1):
        rate = learning_rate(config.optimizer, step, num_steps=config.num_steps)
        inner_step(state, batches.batch(step), world, rate)
        state.step = step
        num_outer_steps += len(state.synchronizer.step())
        ends.append(time.perf_counter() - start)
        after_seconds.append(ends[-1] + start - getattr(state.synchronizer, "last_gradient", ends[-1] + start))
    num_outer_steps += len(state.synchronizer.finish())
    barrier(world.exchange)
    answer = {
        "ends": ends,
        "after_seconds": statistics.median(after_seconds),
        "num_outer_steps": num_outer_steps,
        "interface_bytes": _bytes_on_interface() - sent,
        "payload_bytes": state.synchronizer.bytes_sent,
        "outer_hash": state.synchronizer.outer_hash(),
    }
    if question.get("evaluate"):
        answer["eval_loss"] = evaluate(state, world, open_held_out(config), together=True).loss
    if isinstance(state.synchronizer, Alone):
        state.synchronizer.close()
    return answer


def _begin(question: Question, config: TrainConfig, world: World) -> TrainState:
    """The state before the first step, with the method's synchronizer in it."""
    name, _, option = question["method"].partition(":")
    method = name if name in PRESETS else "diloco"
    settings: dict[str, Any] = own_settings(method)
    if option and name in PRESETS:
        settings |= {"overlap_steps": int(option)}
    state = initial_state(replace(config, method=method, diloco=replace(config.diloco, **settings)), world)
    if name in PRESETS:
        return state
    if name == "alone":
        sync = Alone(state.model)
    elif name == PEER:
        sync = Torchft(state, config.diloco, world, question["lighthouse"])
    else:
        sync = DDP(state.model, option)
    # pyrefly: ignore[bad-argument-type]  # these have no snapshots
    return replace(state, synchronizer=sync, forward=sync.forward, passes=sync.passes)


def _bytes_on_interface() -> int:
    """Bytes that left this namespace, as the kernel counts them."""
    command = ["tc", "-s", "-j", "qdisc", "show", "dev", os.environ["GLOO_SOCKET_IFNAME"]]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)[0]["bytes"]


if __name__ == "__main__":
    main()
