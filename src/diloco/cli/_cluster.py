"""The commands by which a cluster makes the runs of experiments: text once, then each run, and their cost."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from diloco.cli._command import changes, flags
from diloco.data.config import DataConfig
from diloco.experiments.papers.experiment import Experiment
from diloco.experiments.papers.tiers import DOLMA, num_params, with_vocabulary
from diloco.experiments.runner.grid import make_job, text_name
from diloco.training.config.config import TrainConfig, differences
from diloco.training.config.forecast import fitted

_GPUS_PER_NODE = 8
_H100_FLOPS, _MFU = 989e12, 0.4
"""Dense bfloat16 operations per second of an H100 SXM, and the part of them that training reaches."""


def cluster_lines(
    experiments: Sequence[Experiment], output: Path, *, gpu_bytes: float | None, sites: int = 1
) -> Iterator[str]:
    """The command of each different run once, under all its labels; before them the text's, after them the cost.

    Args:
        experiments: whose runs are made.
        output: directory of the runs, and of the text.
        gpu_bytes: memory of each GPU; None leaves shards and micro-batches as they are.
        sites: among which the replicas of a run are divided, if they can be.
    """
    different: dict[str, tuple[TrainConfig, list[str]]] = {}
    costs: dict[str, dict[str, float]] = {}
    for one in experiments:
        for run in one.runs:
            config = make_job(run.config, output / "runs").config
            different.setdefault(config.name, (config, []))[1].append(f"{one.name}: {run.labels}")
            costs.setdefault(one.name, {})[config.name] = 6.0 * num_params(config) * config.num_tokens
    texts = {
        config.data: (output / "text" / text_name(config.data)).absolute() for config, _ in different.values()
    }
    for data, directory in texts.items():
        yield from _text_lines(data, directory)
    for config, labels in different.values():
        yield from (f"# {label}" for label in labels)
        directory = texts[config.data]
        config = config if gpu_bytes is None else _on_gpus(config, gpu_bytes)
        yield _command(replace(config, data=DataConfig(prepared=directory)), sites)
    for name, flops in costs.items():
        yield _cost_line(name, flops)
    if len(costs) > 1:
        yield _cost_line("together", {run: flops for each in costs.values() for run, flops in each.items()})


def _text_lines(data: DataConfig, directory: Path) -> Iterator[str]:
    """The command that prepares a text; Dolma is loaded by a script, so that its files come first."""
    yield f"# text: {' '.join(data.train)}"
    if data.train == DOLMA:
        files = directory.parent / "dolma"
        # One eighth of the list's files holds more tokens than the longest run reads.
        one = f'curl -sfL {{}} -o {shlex.quote(str(files))}/"$(basename {{}} .json.gz)".jsonl.gz'
        yield (
            f"mkdir -p {shlex.quote(str(files))} && curl -sfL {_DOLMA_FILES} | awk 'NR % 8 == 1' | "
            f"xargs -P 16 -I{{}} sh -c {shlex.quote(one)}"
        )
        data = replace(data, train=(f"{files}/*.jsonl.gz",))
    data = replace(data, cache=DataConfig.cache)
    words = flags({name: value for name, (_, value) in differences(DataConfig(), data).items()})
    flat = [word for each in words.values() for word in each]
    yield shlex.join(["diloco", "data", "prepare", "--output", str(directory), *flat])


_DOLMA_FILES = "https://huggingface.co/datasets/allenai/dolma/resolve/main/urls/v1_7.txt"


def _on_gpus(config: TrainConfig, gpu_bytes: float) -> TrainConfig:
    """The same run, under the same name, in shards and passes that fit into the memory of each GPU."""
    chosen = fitted(with_vocabulary(config), gpu_bytes)
    return replace(config, micro_batch=chosen.micro_batch, shards_per_replica=chosen.shards_per_replica)


def _command(config: TrainConfig, sites: int) -> str:
    """The command of a run for each of its machines: NODE counts them from 0, site by site, HOST is the first."""
    is_divided = config.method != "data_parallel" and config.num_replicas % sites == 0
    per_site = config.num_processes // (sites if is_divided else 1)
    per_node = max(number for number in range(1, _GPUS_PER_NODE + 1) if per_site % number == 0)
    nodes = config.num_processes // per_node
    launch = ["torchrun", "--nproc-per-node", str(per_node)]
    several = f" --nnodes {nodes} --node-rank $NODE --master-addr $HOST --master-port 29500" if nodes > 1 else ""
    words = (word for each in changes(config).values() for word in each)
    train = shlex.join(["-m", "diloco", "train", config.recipe, *words])
    return f"{shlex.join(launch)}{several} {train}"


def _cost_line(name: str, flops: dict[str, float]) -> str:
    days = sum(flops.values()) / (_MFU * _H100_FLOPS * 86_400)
    return f"# {name}: {len(flops)} runs, {days:,.0f} H100-days at {_MFU:.0%} MFU"
