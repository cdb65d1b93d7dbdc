"""Command lines that can't work: each ends in one sentence that names the flag at fault, and writes nothing."""

import html
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

from diloco.cli.main import main
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
eval                                               => diloco eval needs RUN
train --seed 3                                     => diloco train --seed: name one of laptop, tiny, 35m
simulate published --json                          => unknown flag --json (diloco simulate published --help
train tiny --max-steps 9                           => unknown flag --max-steps: did you mean --num-tokens?
train tiny --training.steps 9                      => unknown flag --training.steps: did you mean --num-tokens?
train tiny --per_device_train_batch_size 4         => did you mean --micro-batch?
train gpt2                                         => diloco train has no 'gpt2': choose one of laptop, tiny, 35m
train tiny --device gpu                            => --device takes one of 'auto', 'cpu', 'cuda', not 'gpu'
simulate bandwith                                  => diloco simulate has no 'bandwith': did you mean bandwidth?
generate run Hello                                 => 'Hello' is not expected here: a value stands after its flag
generate run --max_new_tokens 9                    => unknown flag --max_new_tokens: did you mean --max-tokens?
export run --to gguf --output new                  => --to takes one of 'safetensors', 'hf', not 'gguf'
export run --to hf                                 => diloco export needs --output
plan --num-params 1e9                              => diloco plan needs --num-layers
plan --num-params 1B --num-layers 24               => --num-params takes a number, not '1B'
simulate bandwidth SIZE                            => diloco simulate bandwidth needs --method
train tiny --optimizer.beta1 x                     => --optimizer.beta1 takes a number, not 'x'
train tiny --diloco.overlap-steps x                => --diloco.overlap-steps takes a whole number, not 'x'
train tiny --seed                                  => --seed needs a value
generate --max-tokens 5 runs/x --temperature abc   => --temperature takes a number, not 'abc'

train tiny --num-tokens 7                          => than half a step of --global-batch·--sequence-length=512
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
train tiny --epochs two                            => --epochs takes a number, not 'two'
train tiny --resume a --config b.toml              => --resume goes on with the run's own settings: leave
train tiny --config b.toml                         => b.toml can't be read
train TEXT --config out.toml                       => --name='../out' must be 1 to 64 letters
data prepare --output new --cache old              => --prepared and --cache mean nothing here
bench wire --values 0                              => --values=0 must be at least 1
bench wire --wires fp8                             => --wires=fp8: 'fp8' is not a codec
bench wire --gradient nowhere.safetensors          => nowhere.safetensors can't be read: No such file

eval run --limit 0                                 => --limit=0 must be at least 1
eval nowhere --limit 5                             => --limit=5 means nothing without --tasks or --data
eval nowhere                                       => nowhere holds no run
export nowhere --to hf --output x                  => nowhere holds no run
generate nowhere                                   => nowhere holds no run: nowhere/config.json is missing
chat                                               => diloco chat needs RUN (diloco chat --help)
report nowhere                                     => nowhere holds no run
report results.csv                                 => results.csv is neither a run's directory nor an exp
report                                             => name a run's directory, or an experiment's CSV
watch                                              => name a run's directory, a directory of runs, or a store
watch nowhere                                      => nowhere holds no run: nowhere/config.json is missing
watch x --every-seconds 0                          => --every-seconds=0.0 must be above 0
watch x --every-seconds inf                        => --every-seconds=inf must be above 0 and at most 86400
watch x --port 8080                                => --port=8080 means nothing without --serve
watch x --serve --port 99999                       => --port=99999 can't be used
store check ftp://host/run                         => ftp://host/run: give a directory, or s3://bucket/prefix
store check /none/run                              => /none does not exist: make it, or mount it, first
store check . --racers 1                           => --racers=1 must be at least 2
store check . --rounds 0                           => --rounds=0 must be at least 1
store status nowhere                               => nowhere holds no run: log/0000000000 is missing
store verify nowhere                               => nowhere holds no run: log/0000000000 is missing
keys allow .                                       => name at least one public key
keys allow . abc                                   => 'abc' is no public key of 64 hexadecimal digits
keys allow . KEY                                   => holds no run
keys allow ftp://x/y KEY                           => ftp://x/y: give a directory, or s3://bucket/prefix
keys show nowhere                                  => the key nowhere can't be read: No such file

plan --num-params 1 --num-layers 1 --link-gbit-s 1 --step-seconds -1 => --step-seconds must be above 0
plan SIZE --link-gbit-s 1 --batch-tokens 0         => --batch-tokens must be above 0 and finite, not 0.0
plan SIZE --link-gbit-s 1 --batch-tokens 1e-300    => --batch-tokens=1e-300 is too small for --num-tokens=2e+10
plan SIZE --link-gbit-s 1 --num-tokens -1e10       => --num-tokens must be above 0 and finite
plan SIZE --link-gbit-s 1 --num-tokens 2e7         => --num-tokens=20000000, --batch-tokens=2097152 make
plan --measure=tiny --target 2                     => --target must be above 0 and below 1, not 2.0
plan --measure tiny --diloco.wire int8             => --diloco.wire=int8: the plan chooses it
plan --measure tiny --diloco.offsets 1 2           => --diloco.offsets=(1, 2): the plan chooses it
plan --measure tiny --num-replicas 1               => --num-replicas=1, but a link has two ends
plan --measure tiny --method diloco                => --method=diloco: the plan chooses it
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
sweep tiny --axis seed=0 --plan --runs bar         => --runs=bar: a sweep keeps them below --output: set
sweep tiny --axis seed=0 --plan --rendezvous st    => --rendezvous=st: all of a sweep would meet in
sweep tiny --axis seed=0 --plan --prometheus-port 9 => --prometheus-port=9: all of a sweep would take

scaling fit --sync-every 30                        => --sync-every=30 chooses among the runs of --data
scaling predict --num-params 1e9 --num-replicas 0 --fit joint       => for Data-Parallel, M = 0, set
scaling predict --num-params 1e9 --num-replicas 3 --fit independent => there are those for M = 0, 1, 2, 4, 8
scaling predict --num-params 1e9 --num-replicas -1 => must be at least 1, or 0 for Data-Parallel, not -1
scaling predict --num-params 1e9 --overtraining 0  => =0 must be above 0
scaling predict --num-params 0.001                 => =0.001 must be from 1 to 1e15, a count such as 1.3e9
scaling predict --num-params 1e308                 => must be from 1 to 1e15
scaling predict --num-params 1e9 --sync-every 30   => --sync-every=30 chooses among the runs of --data
scaling predict --num-params 1e9 --data none.csv   => none.csv can't be read: No such file

simulate bandwidth SIZE OVERLAPPED --num-params -1  => --num-params must be above 0 and finite
simulate bandwidth SIZE OVERLAPPED --targets 1.5    => --targets must be above 0 and at most 1
simulate bandwidth SIZE OVERLAPPED --targets half   => --targets: 'half' is no number
simulate bandwidth SIZE OVERLAPPED --num-layers 100000000 => 100,000,000 must be at most 10,000
simulate bandwidth SIZE OVERLAPPED --seed -1        => --seed=-1 must be at least 0
simulate bandwidth SIZE OVERLAPPED --num-steps 0    => --num-steps must be at least 1, not 0
simulate bandwidth SIZE --method diloco --num-steps 90 => --num-steps=90 with --sync-every=100
simulate bandwidth SIZE OVERLAPPED --latency-seconds                => --latency-seconds=() must be one number
simulate bandwidth SIZE OVERLAPPED --num-replicas 100000            => --num-replicas must be from 1 to 256
simulate bandwidth SIZE OVERLAPPED --seed 3                         => leave it out, or set --step-variation or
simulate bandwidth SIZE OVERLAPPED --preset paper --width 9         => --width=9 means nothing to --preset=paper
simulate bandwidth SIZE OVERLAPPED --preset paper --wire fp32       => --wire=fp32 means nothing to
simulate bandwidth SIZE OVERLAPPED --preset paper --seed 3          => --seed=3 means nothing to
simulate bandwidth SIZE OVERLAPPED --preset paper --step-variation 0.1 => --step-variation=0.1 means nothing to
simulate bandwidth SIZE OVERLAPPED --preset paper --offsets 0 1     => --offsets=(0, 1) means nothing to
simulate bandwidth SIZE OVERLAPPED --preset paper --num-replicas 2  => --num-replicas=2 means nothing to
simulate utilization SIZE OVERLAPPED --preset paper --link-gbit-s 1 2 => --link-gbit-s=(1.0, 2.0) with --preset
simulate timeline --preset paper --step-seconds 1 2 => which has one replica: give one number
simulate timeline --num-steps 0                    => --num-steps must be from 1 to 1000 in a timeline, not 0
simulate timeline --step-variation 1               => a timeline has steps of one duration
simulate timeline --link-gbit-s -1                 => --link-gbit-s must be above 0 and finite, not -1.0
simulate timeline --preset paper --link-gbit-s nan => --link-gbit-s must be above 0 and finite
simulate timeline --method data_parallel           => --method=data_parallel has a timeline with --preset=paper
simulate pictures --figures loss                   => 'loss' is not a figure: choose from fragment_patterns
simulate WALL_CLOCK --overlap-steps 5              => --overlap-steps=5, but --num-replicas=0 is Data-Parallel
simulate WALL_CLOCK --batch-tokens 1e-308 --json   => the result is no finite number
simulate step-seconds --num-params 0 --batch-tokens 1e6 --num-chips 64 --flops-per-chip 4e14 --mfu 1 => above 0
"""
OF_A_RUN = """
train laptop --resume RUN                          => was started with recipe=tiny, and now laptop is asked for
export RUN --to hf --output x --push-to-hub me/it  => --push-to-hub=me/it, but HF_HUB_OFFLINE forbids to ask
generate RUN --top-k 0                             => --top-k=0 must be at least 1
chat RUN --max-tokens 0                            => --max-tokens=0 must be at least 1
eval RUN --data nowhere.jsonl                      => nowhere.jsonl can't be read: No such file
"""
OF_A_STORE = """
store verify RUN --initial nowhere                 => --initial=nowhere can't be read: No such file
eval RUN                                           => the run is a program's own, and does not describe its model
eval RUN --parameters average                      => the run is a program's own
export RUN --to hf --output x                      => the run is a program's own
"""


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "mistakes.md"
TRAINED = ("--name hot", "--rendezvous store")
"""Words of the mistakes of the page that come to light in a process that trains."""


def rows(table: str) -> list[list[str]]:
    """Each command and its sentence's key words."""
    return [[part.strip() for part in line.split(" => ")] for line in table.splitlines() if line]


def rows_of_the_page() -> list[Any]:
    """The typed line and the whole sentence of each mistake that the documentation shows."""
    cells = r"^\| `(.*?)`(?:<br>[^|]*)? \| (?:`(.*?)`|<code>(.*?)</code>) \|$"
    return [
        pytest.param(
            *(typed, plain or html.unescape(escaped)),
            marks=[pytest.mark.slow] * any(words in typed for words in TRAINED),
        )
        for typed, plain, escaped in re.findall(cells, PAGE.read_text(), re.MULTILINE)
    ]


def write_files(folder: Path, corpus: Path) -> None:
    """Write a text as it should be, and files whose names say what is wrong with them."""
    shutil.copy(corpus, folder / "text.jsonl")
    (folder / "short.txt").write_text("Hello.\n")
    (folder / "chats.jsonl").write_text('{"content": "Hello."}\n')
    (folder / "out.toml").write_text('recipe = "tiny"\nname = "../out"\n')
    (folder / "typo.toml").write_text('recipe = "tiny"\n[diloco]\nsync_evry = 10\n')
    write_key(folder / "key")


@pytest.mark.parametrize(("command", "words"), rows(REFUSALS))
def test_a_mistake_is_one_sentence(command, words, small_corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DILOCO_KEY", "key")
    write_files(tmp_path, small_corpus)
    before = {path.name for path in tmp_path.iterdir()}
    for name, text in WORDS.items():
        command = command.replace(name, text)
    assert words in refusal(capsys, *command.split())
    assert {path.name for path in tmp_path.iterdir()} <= before | {"data"}


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
