"""One replica of `links.py`, in a namespace of its own: it does what it reads, a JSON line each.

    {"measure": "link"}                               what the link carries
    {"method": "streaming", "num_steps": 90, …}       train so many steps from the same initial parameters

It answers each with a JSON line on standard output.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from diloco.data.shards import open_split
from diloco.exchange.control import share
from diloco.measure.link import measure_link
from diloco.outer.digest import parameters_hash
from diloco.training.config import DilocoConfig, TrainConfig
from diloco.training.loop import open_batches
from diloco.training.state import TrainState, initial_state
from diloco.training.step import gradients, inner_step, learning_rate
from diloco.training.summary import evaluate
from diloco.training.traits import from_json
from diloco.training.world import World, join

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ENGINE = {
    "diloco": {"overlap_steps": 0, "fragments": "whole", "mixing": 0.0, "wire": "fp32"},
    "streaming": {"overlap_steps": 0, "fragments": "strided", "mixing": 0.0, "wire": "fp32"},
    "streaming_overlapped": {"overlap_steps": 1, "fragments": "strided", "mixing": 0.5, "wire": "fp32"},
    "streaming_overlapped_fp4": {"overlap_steps": 1, "fragments": "strided", "mixing": 0.5, "wire": "e3m0"},
}
"""What the engine is told for each method; a method may end in `:τ`."""


def main() -> None:
    torch.set_num_threads(1)
    config = from_json(TrainConfig, json.loads(Path(sys.argv[1]).read_text()))
    with join(config) as world:
        for line in sys.stdin:
            asked = json.loads(line)
            if asked.get("measure") == "link":
                gbit_s, latency_seconds = measure_link(world.exchange)
                answer = {"link_gbit_s": gbit_s, "latency_seconds": latency_seconds}
            elif asked.get("measure") == "all_reduce":
                answer = all_reduce_beside_training(config, world, asked["wire"], asked["num_rounds"])
            elif asked.get("measure") == "payload":
                answer = exchange_payload(world, asked["num_bytes"], asked["round"])
            else:
                answer = train(config, world, asked)
            print(json.dumps(answer), flush=True)


def exchange_payload(world: World, num_bytes: int, round: int) -> dict:
    """One payload each way, at once."""
    payload = torch.zeros(num_bytes, dtype=torch.uint8)
    others = {replica: payload for replica in range(world.num_replicas) if replica != world.replica}
    share(world.exchange, "ready")
    sent, start = _bytes_on_interface(), time.perf_counter()
    world.exchange.start(others, 0, round).wait()
    wall_seconds = time.perf_counter() - start
    time.sleep(0.5)  # the other's last acknowledgements are on their way
    return {
        "wall_seconds": wall_seconds,
        "interface_bytes": _bytes_on_interface() - sent,
        "payload_bytes": num_bytes * len(others),
    }


def all_reduce_beside_training(config: TrainConfig, world: World, wire: str, num_rounds: int) -> dict:
    """What torch's all-reduce of the gradients takes, alone and while a replica trains, and a step meanwhile."""
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

    share(world.exchange, "ready")
    quiet_seconds, step_seconds = reduce(), []
    with ThreadPoolExecutor(1) as beside:
        for step in count(1):
            start = time.perf_counter()
            inner_step(state, batches.batch(step), config, world, learning_rate(config, step))
            if step == 2:  # the first allocate
                share(world.exchange, "ready")
                reduced = beside.submit(reduce)
            elif step > 2:
                if reduced.done():
                    break
                step_seconds.append(time.perf_counter() - start)
    told = {"quiet_seconds": quiet_seconds, "seconds": reduced.result()}
    return told | {"step_seconds": statistics.mean(step_seconds)}


class Alone:
    """Nothing is exchanged: what the inner steps take while all replicas compute."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.forward, self.bytes_sent = model, model, 0
        self.last_gradient = 0.0
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, _: Tensor) -> None:
        self.last_gradient = time.perf_counter()

    def passes(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self) -> tuple[()]:
        return ()

    def finish(self) -> tuple[()]:
        return ()

    def outer_parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def outer_hash(self) -> str:
        return parameters_hash(self.outer_parameters())


class DDP(Alone):
    """torch's DistributedDataParallel, as its documentation would have it."""

    def __init__(self, model: nn.Module, options: str) -> None:
        super().__init__(model)
        bucket_mb, *hook = options.split(",")
        self.forward = DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=float(bucket_mb)
        )
        if hook:
            # By another name, since torch refuses the hook's own on gloo, which can add up in bf16 all the same.
            self.forward.register_comm_hook(dist.group.WORLD, _compress_to_bf16)


def _compress_to_bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return bf16_compress_hook(group, bucket)


class Torchft(Alone):
    """torchft's streaming DiLoCo; the same fragments as the engine's, at most one of them in flight."""

    def __init__(self, state: TrainState, settings: DilocoConfig, world: World, lighthouse: str) -> None:
        from torchft import Manager, ProcessGroupGloo
        from torchft.local_sgd import DiLoCo

        super().__init__(state.model)
        model, hour = state.model, timedelta(hours=1)
        num_blocks = len(model.blocks) // settings.layers_per_fragment
        parts = [nn.ModuleList(model.blocks[b::num_blocks]) for b in range(num_blocks)]
        self.parts = [*parts, nn.ModuleList([model.embedding, model.norm])]
        address = os.environ["REPLICA_ADDRESS"]
        self.store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self.group = ProcessGroupGloo(timeout=hour)
        self.manager = Manager(
            pg=self.group,
            load_state_dict=lambda _: None,
            state_dict=dict,
            min_replica_size=world.num_replicas,
            use_async_quorum=False,
            timeout=hour,
            quorum_timeout=hour,
            connect_timeout=timedelta(seconds=60),
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=self.store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica{world.replica}",
            hostname=address,
            heartbeat_interval=timedelta(seconds=1),
            init_sync=False,
            max_retries=0,
        )
        lr, momentum = settings.outer_learning_rate, settings.outer_momentum
        self.diloco = DiLoCo(
            self.manager,
            self.parts,
            state.optimizer,
            [torch.optim.SGD(part.parameters(), lr=lr, momentum=momentum, nesterov=True) for part in self.parts],
            sync_every=settings.sync_every,
            use_bucketization=True,
            should_quantize=False,
            fragment_sync_delay=settings.sync_every // len(self.parts) - 1,
            fragment_update_alpha=0.5,
        )
        self.manager.start_quorum()  # the others are there, and the connections made, before the clock starts
        self.diloco.__enter__()

    def outer_parameters(self) -> dict[str, Tensor]:
        """What torchft calls its original parameters: the outer ones."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        found: dict[str, Tensor] = {}
        for part, fragment in zip(self.parts, self.diloco._fragments, strict=True):
            for name, parameter in part.named_parameters():
                found[names[id(parameter)]] = fragment.original_parameters[name]
        return found

    def close(self) -> None:
        self.diloco.__exit__(None, None, None)
        self.manager.shutdown(wait=False)
        self.group.shutdown()


def train(config: TrainConfig, world: World, asked: dict) -> dict:
    """A run of so many steps, when each ended, and what it came to."""
    assert config.data.prepared is not None, "the config is resolved"
    state = _begin(asked, config, world)
    batches = open_batches(config, world, open_split(config.data.prepared, "train"))
    for _ in range(2):  # the first passes allocate, and DDP builds its buckets
        gradients(state, batches.batch(1), config, world)
        state.optimizer.zero_grad()
    ends, after_seconds, num_outer_steps = [], [], 0
    share(world.exchange, "ready")
    sent, start = _bytes_on_interface(), time.perf_counter()
    for step in range(1, asked["num_steps"] + 1):
        inner_step(state, batches.batch(step), config, world, learning_rate(config, step))
        state.step = step
        num_outer_steps += len(state.sync.step())
        ends.append(time.perf_counter() - start)
        after_seconds.append(ends[-1] + start - getattr(state.sync, "last_gradient", ends[-1] + start))
    num_outer_steps += len(state.sync.finish())
    share(world.exchange, "done")
    answer = {
        "ends": ends,
        "after_seconds": statistics.median(after_seconds),
        "num_outer_steps": num_outer_steps,
        "interface_bytes": _bytes_on_interface() - sent,
        "payload_bytes": state.sync.bytes_sent,
        "outer_hash": state.sync.outer_hash(),
    }
    if asked.get("evaluate"):
        held_out = open_split(config.data.prepared, "held_out")
        answer["eval_loss"] = evaluate(state, config, world, held_out, together=True).loss
    if isinstance(state.sync, Torchft):
        state.sync.close()
    return answer


def _begin(asked: dict, config: TrainConfig, world: World) -> TrainState:
    name, _, option = asked["method"].partition(":")
    told = ENGINE.get(name, ENGINE["diloco"])
    if option and name in ENGINE:
        told = told | {"overlap_steps": int(option)}
    state = initial_state(replace(config, method="streaming", diloco=replace(config.diloco, **told)), world)
    if name in ENGINE:
        return state
    if name == "alone":
        sync = Alone(state.model)
    elif name == "torchft_diloco":
        sync = Torchft(state, config.diloco, world, asked["lighthouse"])
    else:
        sync = DDP(state.model, option)
    state.sync, state.forward, state.passes = sync, sync.forward, sync.passes
    return state


def _bytes_on_interface() -> int:
    """What the kernel counted of what left this namespace."""
    command = ["tc", "-s", "-j", "qdisc", "show", "dev", os.environ["GLOO_SOCKET_IFNAME"]]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)[0]["bytes"]


if __name__ == "__main__":
    main()
