"""Command lines that can't work: each ends in one sentence that names the flag at fault, and writes nothing."""

import csv
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.cli.commands import refusal
from tests.processes import run_main
from tests.rendezvous.handwritten import Handwritten

from diloco.cli import _foreign, chat, export, generate, plan, train
from diloco.cli._command import field_of, fields_of
from diloco.cli.main import main, verbs
from diloco.rendezvous.log.keys import write_key

WORDS = {
    "SIZE": "--num-params 1e9 --num-layers 24 --step-seconds 0.1",
    "OVERLAPPED": "--method streaming_overlapped",
    "WALL_CLOCK": "wall-clock --num-params 1e9 --num-tokens 2e10 --batch-tokens 1e6 --num-chips 64",
    "KEY": "a" * 64,
    "TEXT": "--data.train text.jsonl --data.held-out-fraction 0.1",
}
REFUSALS = """
--versoin                                          => unknown flag --versoin: the command comes first
bench                                              => diloco bench needs one of wire
bridge nowhere                                     => diloco bridge needs two stores, first the region's and then
bridge nowhere outer                               => there is no directory nowhere
eval                                               => diloco eval needs RUN
train --seed 3                                     => diloco train --seed: name one of laptop, tiny, 35m
simulate published --json                          => unknown flag --json (diloco simulate published --help
train tiny --max-steps 9                           => in tokens: --num-tokens 4608
train tiny --training.steps 9                      => unknown flag --training.steps: the length of a run
train tiny --per_device_train_batch_size 4         => did you mean --micro-batch?
train gpt2                                         => diloco train has no 'gpt2': choose one of laptop, tiny, 35m
train tiny --data.train text.jsonl --data.train short.txt => after one: --data.train text.jsonl short.txt
follow place --to x --notify=vllm:http://a --notify vllm:http://b => --notify stands twice: write its values after
train tiny --device gpu                            => --device takes one of 'auto', 'cpu', 'cuda', 'mps', not 'gpu'
simulate bandwith                                  => diloco simulate has no 'bandwith': did you mean bandwidth?
generate run Hello                                 => 'Hello' is not expected here: type --prompt Hello
generate run --max_new_tokens 9                    => unknown flag --max_new_tokens: did you mean --max-tokens?
export run --to gguf --output new                  => --to takes one of 'safetensors', 'hf', not 'gguf'
export run --to hf                                 => diloco export needs --output
plan                                               => diloco plan needs a model, a speed and a link
plan --num-params 1e9                              => diloco plan needs --link
plan --fleet                                       => --fleet needs a value
plan --fleet short.txt                             => short.txt can't be read
plan --fleet fleet.toml --budget-dollars 0         => --budget-dollars must be above 0, not 0.0
plan --fleet fleet.toml --prices fleet.toml        => fleet.toml can't be read
plan --fleet fleet.toml --link 20Mbit              => unknown flag --link
plan --num-params 124M --link 20Mbit               => the speed of a replica once: --step-seconds, such as
plan --num-params 124Q --link 20Mbit               => takes a number such as 124M, 1.3B or 1e9, not '124Q'
plan --num-params 124M --link 20                   => --link takes a rate with its unit, such as 20Mbit, 1Gbit
plan SIZE --link 1Gbit --num-replicas 2.5          => --num-replicas takes a whole number, not '2.5'
plan SIZE --link 1Gbit --num-replicas 1            => --num-replicas=1, but a link has two ends
plan --num-params 1B --link 1Gbit --flops-per-second 30 => computer's 1G: did you mean 30T?
plan --num-params 1B --link 20MB --flops-per-second 30T => such as 20Mbit, 1Gbit or 2.5MB/s, not '20MB'
train tiny --data.prepared nodir                   => there is no directory
plan --num-params 1B --link 1Gbit --flops-per-second 0 => --flops-per-second must be above 0 and finite, not 0.0
plan --measure tiny --link 1Gbit 1Gbit 1Gbit       => or one for each of 2 replicas
plan --num-params 0,124B --link 1Gbit --flops-per-second 1T => a number such as 124M, 1.3B or 1e9, not '0,124B'
plan --num-params 1B --link 0,125Gbit --flops-per-second 1T => a rate with its unit, such as 20Mbit, 1Gbit or
simulate bandwidth SIZE                            => diloco simulate bandwidth needs --method
train tiny --optimizer.beta1 x                     => --optimizer.beta1 takes a number, not 'x'
generate --max-tokens 5 runs/x --temperature abc   => --temperature takes a number, not 'abc'

train tiny --num-tokens 7                          => than half a step of --global-batch·--sequence-length=512
train tiny TEXT --model.width 1099511627776 => --model.vocab-size=257: the parameters alone take 2
train tiny TEXT --diloco.freeze --diloco.fragments whole => --diloco.freeze
train tiny --data.train short.txt --data.held-out-fraction 0.5 => holds 5 tokens, and a sequence of --seq
train tiny --data.train text.jsonl --data.held-out short.txt => the held-out text holds 8 tokens, and a
train tiny --data.train text.jsonl --data.held-out-fraction 0.9999 => 0.9999 leaves nothing to train on
train tiny --data.train text.jsonl --data.tokenizer short.txt => --data.tokenizer=short.txt is neither bytes
train tiny --method data_parallel --diloco.sync-every 20 => --diloco.sync-every means nothing to data_parallel
train tiny --diloco.wire int8:blok=128             => --diloco.wire=int8:blok=128: 'blok=128' is not an option
sweep tiny --num-replicas 3                        => --global-batch=8 must be a multiple of --num-replicas=3
train tiny --num-tokens 1M --epochs 2              => --num-tokens=1M and --epochs=2 are two budgets
train tiny --num-tokens                            => --num-tokens needs a value
train tiny --resume a --config b.toml              => --resume goes on with the run's own settings: leave
train tiny --config b.toml                         => b.toml can't be read
train TEXT --config out.toml                       => --name='../out' must be 1 to 64 letters
data prepare --output new --cache old              => --prepared, --cache and --max-train-tokens mean nothing here
bench wire --values 0                              => --values=0 must be at least 1
bench wire --wires fp8                             => --wires=fp8: 'fp8' is not a codec
bench wire --gradient nowhere.safetensors          => nowhere.safetensors can't be read: No such file

eval run --limit 0                                 => --limit=0 must be at least 1
eval nowhere --limit 5                             => --limit=5 means nothing without --tasks or --data
eval nowhere                                       => nowhere holds no run
generate nowhere                                   => nowhere holds no run: nowhere/config.json is missing
chat                                               => needs RUN: a run's directory, such as runs/first, or the URL
report results.csv                                 => results.csv is neither a run's directory nor an exp
report                                             => name a run's directory, or an experiment's CSV
watch                                              => name a run's directory, a directory of runs, or a store
watch nowhere                                      => nowhere holds no run: nowhere/config.json is missing
watch x --every-seconds inf                        => --every-seconds=inf must be above 0 and at most 86400
watch x --port 8080                                => --port=8080 means nothing without --serve
store check ftp://host/run                         => ftp://host/run: give a directory, or s3://bucket/prefix
store check /none/run                              => /none does not exist: make it, or mount it, first
store check . --racers 1                           => --racers=1 must be at least 2
store status nowhere                               => there is no directory nowhere
store verify .                                     => holds no run: log/0000000000 is missing
store check host:29500                             => host:29500 is a host: machines that reach each other are
store status [::1]:29500                           => [::1]:29500 is a host
train tiny --rendezvous 10.0.0.5:29500 --name a    => joined by torchrun --master-addr or diloco.connect; a
keys allow .                                       => name at least one public key
keys allow . abc                                   => 'abc' is no public key of 64 hexadecimal digits
keys allow . KEY                                   => holds no run
keys show nowhere                                  => the key nowhere can't be read: No such file

plan --num-params 1 --num-layers 1 --link 1Gbit --step-seconds -1 => --step-seconds must be above 0
plan SIZE --link 1Gbit --batch-tokens 1e-300    => --batch-tokens=1e-300 is too small for --num-tokens=2e+10
plan SIZE --link 1Gbit --num-tokens 2e6            => --num-tokens=2000000, --batch-tokens=262144 make
plan --measure=tiny --target 2                     => --target must be above 0 and below 1, not 2.0
plan --measure tiny --diloco.wire int8             => --diloco.wire=int8: the plan chooses it
plan --measure tiny --num-replicas 1               => --num-replicas=1, but a link has two ends
plan --measure tiny --num-tokens 5120              => --num-tokens=5120, --global-batch=8, --sequence-length=64
experiment freezing --commands --tabulate          => --commands prints what to run, and --tabulate
experiment freezing --tabulate                     => no run of freezing is over in
experiment freezing --corpus missing.txt           => source 'missing.txt' matches no file
experiment                                         => name an experiment, or all: scaling, overtraining
sweep tiny --axis learning_rate=high               => --axis 'learning_rate=high' is not of the form NAME=NUMBER
sweep tiny --axis seed=0 --axis seed=1             => --axis seed is given twice
sweep tiny TEXT --axis seed=0 --then outer_mixing=0 => --then 'outer_mixing' is unknown: choose
sweep tiny                                         => names nothing to vary
sweep tiny TEXT --axis seed=0 --cores 1 --ray auto => --ray=auto has its own
sweep tiny --axis seed=0 --num-tokens 5120         => leave out --num-tokens
sweep tiny --axis seed=0 --plan --cores 0          => --cores=0 must be at least 1
sweep tiny --axis seed=0 --plan --name foo         => --name=foo: a sweep names each run by its settings
sweep tiny --axis seed=0 --plan --rendezvous st    => --rendezvous=st: all of a sweep would meet in

scaling fit --sync-every 30                        => --sync-every=30 chooses among the runs of --data
scaling predict --num-params 1e9 --num-replicas 0 --fit joint       => for Data-Parallel, M = 0, set
scaling predict --num-params 1e9 --num-replicas 3 --fit independent => there are those for M = 0, 1, 2, 4, 8
scaling predict --num-params 1e9 --num-replicas -1 => must be at least 1, or 0 for Data-Parallel, not -1
scaling predict --num-params 1e9 --overtraining 0  => =0 must be above 0
scaling predict --num-params 0.001                 => =0.001 must be from 1 to 1e15, a count such as 1.3e9
scaling predict --num-params 1e9 --data none.csv   => none.csv can't be read: No such file

simulate bandwidth SIZE OVERLAPPED --num-params -1  => --num-params must be above 0 and finite
simulate bandwidth SIZE OVERLAPPED --targets 1.5    => --targets must be above 0 and at most 1
simulate bandwidth SIZE OVERLAPPED --targets half   => --targets: 'half' is no number
simulate bandwidth SIZE OVERLAPPED --num-layers 100000000 => 100,000,000 must be at most 10,000
simulate bandwidth SIZE OVERLAPPED --num-steps 0    => --num-steps must be at least 1, not 0
simulate bandwidth SIZE --method diloco --num-steps 90 => --num-steps=90 with --sync-every=100
simulate bandwidth SIZE OVERLAPPED --latency-seconds                => --latency-seconds=() must be one number
simulate bandwidth SIZE OVERLAPPED --num-replicas 100000            => --num-replicas must be from 1 to 256
simulate bandwidth SIZE OVERLAPPED --seed 3                         => leave it out, or set --step-variation or
simulate bandwidth SIZE OVERLAPPED --preset paper --width 9         => --width=9 means nothing to --preset=paper
simulate bandwidth SIZE OVERLAPPED --preset paper --num-replicas 2  => --num-replicas=2 means nothing to
simulate utilization SIZE OVERLAPPED --preset paper --link 1Gbit 2Gbit => --link with --preset=paper, which has one
simulate timeline --preset paper --step-seconds 1 2 => which has one replica: give one number
simulate timeline --num-steps 0                    => --num-steps must be from 1 to 1000 in a timeline, not 0
simulate timeline --step-variation 1               => a timeline has steps of one duration
simulate timeline --link 0Mbit                     => --link must be above 0 and finite, not 0.0
simulate timeline --preset paper --link -1Gbit     => --link takes a rate with its unit, such as 20Mbit
simulate timeline --method data_parallel           => --method=data_parallel has a timeline with --preset=paper
simulate pictures --figures loss                   => 'loss' is not a figure: choose from fragment_patterns
simulate WALL_CLOCK --overlap-steps 5              => --overlap-steps=5, but --num-replicas=0 is Data-Parallel
simulate WALL_CLOCK --batch-tokens 1e-308 --json   => the result is no finite number
simulate step-seconds --num-params 0 --batch-tokens 1e6 --num-chips 64 --flops-per-chip 4e14 --mfu 1 => above 0
"""
FOREIGN = r"""
run tiny                              => there is no command 'run': type diloco train tiny (
tiny --seed 3                         => type diloco train tiny --seed 3 (
'train tiny'                          => type it without quotes, diloco train tiny
diloco train tiny                     => type diloco train tiny (
torchrun --nproc-per-node 2           => type diloco train RECIPE, or torchrun … -m diloco train RECIPE
stop                                  => type Ctrl-C in the terminal of the run; diloco train --resume RUN
ls                                    => type diloco watch runs, or diloco watch runs --serve for a page
join s3://bucket/run                  => type diloco train --rendezvous s3://bucket/run --name NAME
help train                            => type diloco train --help
text.jsonl                            => a command comes before a file, as in diloco watch text.jsonl
-v                                    => unknown flag -v: did you mean --version?
train ./text.jsonl                    => type diloco train laptop --data.train ./text.jsonl
train 124M                            => the sizes about it are 90m and 180m; a model of transformers is named
train 35M                             => did you mean 35m?
train --recipe tiny                   => begins with a recipe, not '--recipe': type diloco train tiny
train --config tiny                   => --config=tiny is a recipe, which stands alone: type diloco train tiny
train lr=1e-3                         => type diloco train laptop --optimizer.learning-rate 1e-3
train config/gpt2.py                  => type diloco train --config FILE, a .toml file or
train tiny ++diloco.sync_every=5      => a setting is a flag: --diloco.sync-every 5
train tiny max_steps=5                => in tokens: --num-tokens 2560
train tiny --set x=1                  => each setting has a flag of its own, such as --diloco.sync-every 5
train tiny —seed 3                    => a flag begins with two hyphens: --seed
train tiny -- --seed 3                => leave out the -- before --seed
train tiny -num-replicas 2            => did you mean --num-replicas?
train tiny --global-batch 64 --gradient-accumulation-steps 4 => --micro-batch 8 (
train tiny --grad_accum_steps=3       => --micro-batch 2 (
train tiny --gradient-accumulation-steps many => not the passes: --micro-batch MICRO_BATCH
train tiny --warmup_ratio 0.1         => the warm-up is given in steps: --optimizer.warmup-steps 6
train tiny --sync-every 500           => unknown flag --sync-every: did you mean --diloco.sync-every?
train tiny --diloco.H 10              => did you mean --diloco.sync-every?
train tiny --alpha 0.5                => did you mean --diloco.mixing?
train tiny --output_dir out           => did you mean --runs?
train tiny --compile=True             => --compile takes no value: leave 'True' out, or type --no-compile
train tiny --device cuda:0            => not 'cuda:0': did you mean cuda?
train tiny --method local_sgd         => type --method diloco --diloco.outer-learning-rate 1 --diloco.outer-m
train tiny --method FedAvg            => type --method diloco --diloco.outer-learning-rate 1 --diloco.outer-m
train tiny --method fsdp              => type --shards-per-replica 2 to shard each replica
simulate bandwidth SIZE --method fedavg => 'streaming_overlapped_fp4', not 'fedavg' (
train tiny --diloco.wire fp4          => 'fp4' is not a codec: did you mean e3m0?
train tiny --wandb                    => type --trackers wandb
train tiny --nnodes 2                 => torchrun takes these flags: torchrun … -m diloco train …; or each machine
watch runs --host 0.0.0.0               => unknown flag --host: did you mean --address?
train tiny --bogus                    => unknown flag --bogus (diloco train tiny --help
train tiny --rendezvous bucket/run    => does not exist: make it, or mount it, first; a bucket is s3://bucket/prefix
train tiny --rendezvous s3:/bucket/x  => a bucket's URL has two slashes: s3://bucket/prefix
train tiny --data.train wikitext      => or hf:wikitext for that data set of the Hugging Face Hub
eval runs/a piqa                      => 'piqa' is not expected here: type --tasks piqa
eval --model runs/a                   => RUN stands without a flag: diloco eval runs/a
export runs/a --to gguf               => type --to hf, from which llama.cpp's convert_hf_to_gguf.py makes GGUF
store ls                              => diloco store has no 'ls': did you mean status?
plan 124M                             => diloco plan needs --num-params: type --num-params 124M
plan tiny                             => a recipe is measured: type diloco plan --measure tiny --link 20Mbit
plan SIZE --link 1Gbit --rtt 50        => half of the round trip is given, in seconds: --latency-seconds
train tiny --target-param-data-ratio 8 => in tokens, the ratio times N: --num-tokens
"""
"""Habits of users of nanochat, nanoGPT, torchtune, transformers, torchtitan, Lightning, Hydra and torchft."""
OF_A_RUN = """
train laptop --resume RUN                          => was started with recipe=tiny, and now laptop is asked for
export RUN --to hf --output x --push-to-hub me/it  => --push-to-hub=me/it, but HF_HUB_OFFLINE forbids to ask
generate RUN --top-k 0                             => --top-k=0 must be at least 1
watch RUN --serve --port 99999                     => --port=99999 can't be used
watch RUN --serve --address 192.0.2.7 --port 8080  => --port=8080 of --address=192.0.2.7 can't be used
chat RUN --max-tokens 0                            => --max-tokens=0 must be at least 1
chat RUN --port 8765                               => --port=8765 means nothing without --serve
chat RUN --serve --max-tokens 2000                 => --max-tokens=2000 must be at most 1000 on a page
chat RUN --serve --top-k 0                         => --top-k=0 must be at least 1
store verify RUN                                   => is a run's directory; a store is the directory or URL that
eval RUN --data nowhere.jsonl                      => nowhere.jsonl can't be read: No such file
"""
OF_A_STORE = """
store verify RUN --initial nowhere                 => --initial=nowhere can't be read: No such file
eval RUN                                           => the run is a program's own, and does not describe its model
eval RUN --parameters average                      => the run is a program's own
export RUN --to hf --output x                      => the run is a program's own
chat RUN                                           => the run is a program's own
chat RUN --serve                                   => the run is a program's own
generate RUN                                       => the run is a program's own
"""


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "mistakes.csv"
TRAINED = ("--name hot", "--rendezvous store")
"""Words of the mistakes of the page that come to light in a process that trains."""


def rows(table: str) -> list[list[str]]:
    """Each command and its sentence's key words."""
    return [[part.strip() for part in line.split(" => ")] for line in table.splitlines() if line]


def rows_of_the_page() -> list[Any]:
    """The typed line and the whole sentence of each mistake that the documentation shows."""
    return [
        pytest.param(row["typed"], row["said"], marks=[pytest.mark.slow] * any(w in row["typed"] for w in TRAINED))
        for row in csv.DictReader(PAGE.read_text().splitlines())
    ]


def write_files(folder: Path, corpus: Path) -> None:
    """Write a text as it should be, and files whose names say what is wrong with them."""
    shutil.copy(corpus, folder / "text.jsonl")
    (folder / "short.txt").write_text("Hello.\n")
    shutil.copy(Path(__file__).parents[2] / "docs" / "snippets" / "fleet_homes.toml", folder / "fleet.toml")
    (folder / "chats.jsonl").write_text('{"content": "Hello."}\n')
    (folder / "out.toml").write_text('recipe = "tiny"\nname = "../out"\n')
    (folder / "typo.toml").write_text('recipe = "tiny"\n[diloco]\nsync_evry = 10\n')
    write_key(folder / "key")


@pytest.mark.parametrize(("command", "words"), rows(REFUSALS + FOREIGN))
def test_a_mistake_is_one_sentence(command, words, small_corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DILOCO_KEY", "key")
    write_files(tmp_path, small_corpus)
    before = {path.name for path in tmp_path.iterdir()}
    for name, text in WORDS.items():
        command = command.replace(name, text)
    assert words in refusal(capsys, *shlex.split(command))
    assert {path.name for path in tmp_path.iterdir()} <= before | {"data"}


def test_what_stands_in_the_place_of_foreign_words_exists():
    """Each setting has a flag of a verb, and each flag and verb in a sentence is one."""
    commands = (train.Command, chat._chat, plan._plan_described, generate._generate, export._export)
    fields = {name for command in commands for name in fields_of(command)}
    assert {*_foreign.NAMES} | {*_foreign.VALUES} <= fields
    values = (text for table in _foreign.VALUES.values() for text in table.values())
    for text in (*_foreign.SENTENCES.values(), *_foreign.COMMANDS.values(), *values):
        names = {field_of(name) for name in re.findall(r"--[a-z][a-z.-]*", text)}
        assert names <= fields | {"help", "version", "serve", "to", "train", "output"}, text
        assert {*re.findall(r"diloco ([a-z]+)", text)} <= {*verbs()}, text


@pytest.mark.parametrize(("typed", "sentence"), rows_of_the_page())
def test_a_mistake_of_the_page_ends_with_its_sentence(
    typed, sentence, finished_run, small_corpus, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    write_files(tmp_path, small_corpus)
    shutil.copytree(finished_run, tmp_path / "runs" / "first", ignore=shutil.ignore_patterns("checkpoints"))
    words = shlex.split(typed.removeprefix("CUDA_VISIBLE_DEVICES= "))[1:]
    if not any(one in typed for one in TRAINED):
        assert refusal(capsys, *words) == sentence
        return
    if "--rendezvous" in words:
        flags = ["--num-tokens", "10240", "--rendezvous", "store", "--name", "a"]
        first = run_main(main, [*words[:4], *flags], folder=tmp_path, timeout_seconds=100)
        assert first.returncode == 0, first.stderr
    process = run_main(main, words, folder=tmp_path, timeout_seconds=100)
    assert (process.returncode, process.stderr) == (2, f"diloco: {sentence}\n")


def test_the_page_shows_twenty():
    assert len(rows_of_the_page()) == 20


@pytest.mark.parametrize(("command", "words"), rows(OF_A_RUN))
def test_a_mistake_about_a_finished_run(command, words, finished_run, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert words in refusal(capsys, *command.replace("RUN", str(finished_run)).split())


@pytest.mark.parametrize(("command", "words"), rows(OF_A_STORE))
def test_a_mistake_about_a_run_in_a_store(command, words, tmp_path, capsys):
    run = Handwritten(tmp_path / "run")
    run.train(4, snapshots_after=(2,))
    assert words in refusal(capsys, *command.replace("RUN", str(run.directory)).split())
