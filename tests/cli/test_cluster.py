"""The paper tier's commands: parsed by the real command line, beside the papers' own settings."""

import ast
import itertools
import math
import re
import shlex
from dataclasses import dataclass, replace
from functools import wraps

import pytest

from diloco.cli import data as cli_data
from diloco.cli import train
from diloco.cli._command import parsed
from diloco.cli._recipe import followed
from diloco.cli.main import main
from diloco.data.config import DataConfig
from diloco.experiments.papers import EXPERIMENTS, experiment
from diloco.experiments.papers.tiers import TIERS, with_vocabulary
from diloco.experiments.runner.grid import run_name
from diloco.training.config.config import OptimizerConfig, TrainConfig
from diloco.training.config.forecast import device_bytes
from diloco.training.config.recipes import recipe

# Table 3 of each paper: layers, width, tokens.
STREAMING = {
    "35M": (6, 512, 700e6),
    "100M": (9, 768, 1.5e9),
    "200M": (12, 1024, 3.5e9),
    "300M": (15, 1280, 6e9),
    "500M": (18, 1536, 11e9),
    "1B": (24, 2048, 25e9),
    "4B": (36, 3072, 83e9),
}
LAWS = {
    "35M": (6, 512, 700e6),  # printed as 70M
    "90M": (9, 768, 1.8e9),
    "180M": (12, 1024, 3.6e9),
    "330M": (15, 1280, 6.6e9),
    "550M": (18, 1536, 11e9),
    "1.3B": (24, 2048, 26e9),
    "2.4B": (30, 2560, 48e9),
    "4B": (36, 3072, 80e9),
    "10B": (48, 4096, 200e9),
}
# Tables 8 to 10 of arXiv 2503.09799: learning rate and batch in sequences of 2,048, by M; None is the joint law.
RATE = {
    0: (16319.2, -0.819),
    1: (74620.6, -0.945),
    2: (3978.82, -0.780),
    4: (4512.99, -0.789),
    8: (618986, -1.102),
}
BATCH = {0: (0.22592, 0.281), 1: (0.01361, 0.435), 2: (0.00769, 0.479), 4: (0.00535, 0.510), 8: (0.01859, 0.455)}


def law(table, num_params, replicas, fit):
    if fit == "joint":
        factor, alpha, beta = (22256, -0.8827, 0.2929) if table is RATE else (0.00709, 0.4695, 0.3399)
        return factor * num_params**alpha * replicas**beta
    factor, alpha = table[replicas]
    return factor * num_params**alpha


@dataclass(frozen=True)
class Printed:
    """A printed command: its words after `train`, its labels, and the numbers of its run."""

    launch: str
    words: tuple[str, ...]
    labels: tuple[tuple[str, dict], ...]

    @property
    def flags(self):
        return dict(itertools.pairwise(self.words))

    @property
    def config(self) -> TrainConfig:
        """The numbers of the run, read from the words without a parser."""
        base, flags = recipe(self.words[0], **followed(self.words)), self.flags
        number = {
            name: int(flags.get(f"--{name}", 0)) for name in ("num-tokens", "global-batch", "sequence-length")
        }
        rate = float(flags.get("--optimizer.learning-rate", base.optimizer.learning_rate))
        return replace(
            base,
            num_tokens=number["num-tokens"] or base.num_tokens,
            global_batch=number["global-batch"] or base.global_batch,
            sequence_length=number["sequence-length"] or base.sequence_length,
            optimizer=OptimizerConfig(learning_rate=rate),
        )


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The lines of `diloco experiment all --tier paper --commands`, and its commands of runs."""
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lambda text: lines.extend(text.splitlines()))
        main(
            ["experiment", "all", "--tier", "paper", "--commands", "--output", str(tmp_path_factory.mktemp("out"))]
        )
    commands, labels = [], []
    for line in lines:
        name, _, rest = line.removeprefix("# ").partition(": ")
        if line.startswith("# ") and rest.startswith("{"):
            labels.append((name, ast.literal_eval(rest)))
        elif line.startswith("torchrun "):
            launch, _, words = line.partition(" -m diloco train ")
            commands.append(Printed(launch, tuple(shlex.split(words)), tuple(labels)))
            labels = []
    return lines, commands


@pytest.mark.slow
def test_all_commands_are_those_of_the_papers_by_the_real_command_line(printed):
    _, commands = printed
    runs = {run_name(run.config): run for name in EXPERIMENTS for run in experiment(name, TIERS["paper"]()).runs}
    assert len(commands) == len(runs) > 900
    new, covering = set(), []
    for command in commands:
        asked = runs[command.flags["--name"]].config
        ours = command.config
        assert (ours.num_tokens, ours.global_batch) == (asked.num_tokens, asked.global_batch)
        assert ours.sequence_length == asked.sequence_length
        assert ours.optimizer.learning_rate == asked.optimizer.learning_rate
        # A parse takes a tenth of a second: that of each recipe, each flag, and each value that is a word.
        words = (re.sub(r"=[\d.]+", "=", word) for word in command.words)
        parts = {word for word in words if re.fullmatch(r"(--)?[a-z][\w.:=-]*|[\d.]+b|\d+m", word)}
        parts.discard(command.flags["--name"])
        if not parts <= new:
            covering.append(command)
            new |= parts
    for command in covering:
        config, budget = train._parsed(command.words)
        asked = runs[command.flags["--name"]].config
        made = replace(asked, name=config.config.name, runs=config.config.runs, data=config.config.data)
        made = replace(
            made, micro_batch=config.config.micro_batch, shards_per_replica=config.config.shards_per_replica
        )
        # The budget is read apart from the config.
        assert budget is not None and budget.num_tokens(made, None) == asked.num_tokens
        assert replace(config.config, num_tokens=asked.num_tokens) == made
        assert made.compile and made.evaluation.num_tokens >= 5e6
        _check_launch(command.launch, config.config)
    check_against_the_papers(commands)


def _check_launch(launch, config):
    """Shards and passes fit into GPUs of 80 GB, eight or fewer on each machine."""
    flags = dict(itertools.pairwise(shlex.split(launch)))
    per_node, nodes = int(flags["--nproc-per-node"]), int(flags.get("--nnodes", 1))
    assert per_node <= 8 and per_node * nodes == config.num_processes
    assert (nodes > 1) == ("--node-rank" in flags and "--master-addr" in flags)
    tokenizer = replace(config, data=DataConfig(tokenizer="bpe:32000"))
    assert device_bytes(with_vocabulary(tokenizer)) <= 72e9


def check_against_the_papers(commands):
    """Each size, method and M: ours beside the papers'."""
    for command in commands:
        compared = [one for one in command.labels if one[0] in ("scaling", "single_replica", "extrapolation")]
        if not compared:
            continue
        config, (name, labels) = command.config, compared[0]
        table = STREAMING if name == "scaling" else LAWS
        layers, width, tokens = table[labels["size"]]
        words = 32_000 if table is STREAMING else 32_768
        num_params = 12 * layers * width**2 + words * width
        replicas = 0 if config.method == "data_parallel" else config.num_replicas
        fit = labels.get("fit")
        rate, batch = (law(one, num_params, replicas, fit) for one in (RATE, BATCH))
        if table is STREAMING:  # one batch for all methods
            batch = law(BATCH, num_params, 0, None)
        assert abs(config.num_tokens - tokens) <= config.tokens_per_step, "within one step"
        assert config.optimizer.learning_rate == pytest.approx(rate, rel=0.01)
        assert abs(math.log2(config.tokens_per_step / (2048 * batch))) <= 0.5
        assert config.sequence_length == (1024 if table is STREAMING else 2048)


@pytest.mark.slow
def test_overtraining_has_the_batches_and_tokens_of_tables_2_and_8(printed):
    _, commands = printed
    of_1b = {
        (labels["method"], labels["multiple"]): command.config
        for command in commands
        for name, labels in command.labels
        if name == "overtraining" and labels["size"] == "1B"
    }
    for (method, multiple), config in of_1b.items():
        batch = 1024 if method == "Streaming, M=4" else 512
        assert (config.global_batch, config.sequence_length) == (batch, 2048)
        assert round(config.num_tokens / 1e9) == {1: 25, 4: 100, 10: 250}[multiple]
        hours = config.num_tokens / config.tokens_per_step * 0.1 / 3600  # a step takes 0.1 s in the paper
        if batch == 512:
            assert hours == pytest.approx({1: 0.67, 4: 2.7, 10: 6.75}[multiple], rel=0.02)


@pytest.mark.slow
def test_one_text_serves_all_sizes_and_dolma_comes_from_its_list(printed):
    lines, commands = printed
    prepared = [
        shlex.split(line.removesuffix(" &&"))[3:] for line in lines if line.startswith("diloco data prepare ")
    ]

    @wraps(cli_data._prepare)
    def asked(output, data=DataConfig()):  # noqa: B008
        return output, data

    texts = dict(parsed(asked, words, prog="diloco data prepare") for words in prepared)
    (of_c4, c4), (tokenizer, beginning), (of_dolma, dolma) = texts.items()
    assert c4.train == ("hf:allenai/c4:en:train",) and c4.tokenizer == "bpe:32000"
    assert beginning == replace(c4, max_train_bytes=2**27), "all text of which C4's tokenizer is made"
    assert dolma.tokenizer == str(tokenizer)
    assert dolma.train[0].endswith("/dolma/*.jsonl.gz"), "a script of Dolma's own would be refused"
    assert c4.held_out == dolma.held_out == ("hf:allenai/c4:en:validation",)
    used = {command.flags["--data.prepared"] for command in commands}
    assert used == {str(of_c4), str(of_dolma)}
    assert "--data.train" not in {word for command in commands for word in command.words}
    (download,) = (line for line in lines if "dolma/resolve" in line)
    place = lines.index(download)
    assert all(line.endswith(" &&") for line in lines[place : place + 2]), "none is begun without those before"
    assert "dolma/*" in lines[place + 2]
    assert lines[0].startswith("# NODE: ") and "; HOST: " in lines[0]


@pytest.mark.slow
def test_the_commands_end_with_their_cost(printed):
    lines, commands = printed
    total = sum(
        6.0
        * with_vocabulary(replace(c.config, data=DataConfig(tokenizer="bpe:32000"))).model.num_matrix_params
        * c.config.num_tokens
        for c in commands
    )
    days = total / (0.4 * 989e12 * 86400)
    name, runs, cost = lines[-1].replace(",", "").split(" ")[1], *lines[-1].replace(",", "").split(" ")[2:5:2]
    assert (name, int(runs)) == ("together:", len(commands)) and int(cost) == pytest.approx(days, rel=0.02)
    assert [line.split(":")[0] for line in lines[-1 - len(EXPERIMENTS) : -1]] == [
        f"# {name}" for name in EXPERIMENTS
    ]


def test_the_replicas_of_a_run_are_divided_among_sites(capsys, tmp_path):
    arguments = ["experiment", "scaling", "--tier", "paper", "--commands", "--output", str(tmp_path)]
    main([*arguments, "--sites", "2"])
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("torchrun "):
            flags = dict(itertools.pairwise(shlex.split(line)))
            nodes, per_node = int(flags.get("--nnodes", 1)), int(flags["--nproc-per-node"])
            is_baseline = flags.get("--method") == "data_parallel"
            shards = int(flags.get("--shards-per-replica", 1))
            assert nodes == (1 if is_baseline else 2)
            assert nodes * per_node == int(flags.get("--num-replicas", 2)) * shards
    with pytest.raises(SystemExit, match="2"):
        main([*arguments[:2], "--sites", "2"])
    assert "--sites=2 must be at least 1, and is for --commands alone" in capsys.readouterr().err
