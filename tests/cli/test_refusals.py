"""Command lines that can't work: each ends in one sentence that names the flag at fault, and writes nothing."""

import shutil

import pytest
from tests.cli.commands import refusal
from tests.rendezvous.handwritten import Handwritten

from diloco.rendezvous.log.keys import write_key

WORDS = {
    "SIZE": "--num-params 1e9 --num-layers 24 --step-seconds 0.1",
    "OVERLAPPED": "--method streaming_overlapped",
    "WALL_CLOCK": "wall-clock --num-params 1e9 --num-tokens 2e10 --batch-tokens 1e6 --num-chips 64",
    "KEY": "a" * 64,
    "TEXT": "--data.train text.jsonl --data.held-out-fraction 0.1",
}
REFUSALS = """
trian                                              => there is no command 'trian': did you mean train?
--versoin                                          => unknown flag --versoin: the command comes first
bench                                              => diloco bench needs one of wire
eval                                               => diloco eval needs RUN
train --seed 3                                     => diloco train --seed: name one of laptop, tiny, 35m
simulate published --json                          => unknown flag --json (diloco simulate published --help
train tiny --learning-rate 1                       => unknown flag --learning-rate: did you mean --optimizer
train tiny --max-steps 9                           => unknown flag --max-steps: did you mean --num-tokens?
train tiny --optimizer.beta1 x                     => --optimizer.beta1 takes a number, not 'x'
train tiny --diloco.overlap-steps x                => --diloco.overlap-steps takes a whole number, not 'x'
train tiny --seed                                  => --seed needs a value

train tiny --num-tokens 7                          => than half a step of --global-batch·--sequence-length=512
train tiny TEXT --diloco.freeze --diloco.fragments whole => --diloco.freeze
train tiny --model.num-heads 3                     => --model.width=32 must be a multiple of twice --model.num-h
sweep tiny --optimizer.learning-rate nan           => --optimizer.learning-rate must be above 0 and finite
plan --measure tiny --evaluation.num-tokens 0      => --evaluation.num-tokens must be at least 1, not 0
sweep tiny --num-replicas 3                        => --global-batch=8 must be a multiple of --num-replicas=3
train tiny --num-tokens 1MB                        => --num-tokens=1MB is no number of tokens
train tiny --num-tokens 1M --epochs 2              => --num-tokens=1M and --epochs=2 are two budgets
train tiny --num-tokens                            => --num-tokens needs a value
train tiny --epochs two                            => --epochs takes a number, not 'two'
train tiny --resume a --config b.toml              => --resume goes on with the run's own settings: leave
train tiny --config b.toml                         => b.toml can't be read
data prepare --output new --cache old              => --prepared and --cache mean nothing here
bench wire --values 0                              => --values=0 must be at least 1
bench wire --wires fp8                             => --wires=fp8: 'fp8' is not a codec
bench wire --gradient nowhere.safetensors          => nowhere.safetensors is no safetensors file

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
store status x --every-seconds 1e9                 => --every-seconds=1000000000.0 must be above 0 and at
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

simulate bandwidth SIZE OVERLAPPED --num-params -1 --preset PRESET  => --num-params must be above 0 and finite
simulate bandwidth SIZE OVERLAPPED --targets 1.5 --preset PRESET    => --targets must be above 0 and at most 1
simulate bandwidth SIZE OVERLAPPED --targets half --preset PRESET   => --targets: 'half' is no number
simulate bandwidth SIZE OVERLAPPED --num-layers 100000000 --preset PRESET => 100,000,000 must be at most 10,000
simulate bandwidth SIZE OVERLAPPED --seed -1 --preset PRESET        => --seed=-1 must be at least 0
simulate bandwidth SIZE OVERLAPPED --num-steps 0 --preset PRESET    => --num-steps must be at least 1, not 0
simulate bandwidth SIZE --method diloco --num-steps 90 --preset PRESET => --num-steps=90 with --sync-every=100
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
generate RUN --top-k 0                             => --top-k=0 must be at least 1
chat RUN --max-tokens 0                            => --max-tokens=0 must be at least 1
eval RUN --data nowhere.jsonl                      => nowhere.jsonl can't be read: No such file
"""
OF_A_STORE = """
store status RUN --every-seconds 0                 => --every-seconds=0.0 must be above 0
store verify RUN --initial nowhere                 => --initial=nowhere can't be read as safetensors
eval RUN                                           => the run is a program's own, and does not describe its model
eval RUN --parameters average                      => the run is a program's own
export RUN --to hf --output x                      => the run is a program's own
"""


def rows(table: str) -> list[list[str]]:
    """Each command and its sentence's key words; a line with PRESET stands for two."""
    lines = [line for line in table.splitlines() if line]
    lines = [line.replace("PRESET", preset) for line in lines for preset in ("physical", "paper")]
    return [[part.strip() for part in line.split(" => ")] for line in dict.fromkeys(lines)]


@pytest.mark.parametrize(("command", "words"), rows(REFUSALS))
def test_a_mistake_is_one_sentence(command, words, small_corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DILOCO_KEY", "key")
    write_key(tmp_path / "key")
    shutil.copy(small_corpus, "text.jsonl")
    for name, text in WORDS.items():
        command = command.replace(name, text)
    assert words in refusal(capsys, *command.split())
    assert {path.name for path in tmp_path.iterdir()} <= {"key", "text.jsonl", "data"}


@pytest.mark.parametrize(("command", "words"), rows(OF_A_RUN))
def test_a_mistake_about_a_finished_run(command, words, finished_run, capsys):
    assert words in refusal(capsys, *command.replace("RUN", str(finished_run)).split())


@pytest.mark.parametrize(("command", "words"), rows(OF_A_STORE))
def test_a_mistake_about_a_run_in_a_store(command, words, tmp_path, capsys):
    run = Handwritten(tmp_path / "run")
    run.train(4, snapshots_after=(2,))
    assert words in refusal(capsys, *command.replace("RUN", str(run.directory)).split())
