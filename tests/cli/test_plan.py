import json
import math
import re
import sys
from pathlib import Path

import pytest
from tests.processes import run_main

from diloco.cli.main import main
from diloco.presets import METHODS
from diloco.training import measure
from diloco.training.config.recipes import recipe

RUN = ["--num-params", "1e9", "--num-layers", "24", "--step-seconds", "0.1"]
PLAN = ["plan", *RUN, "--latency-seconds", "0.01", "--batch-tokens", "2_097_152", "--link"]


def printed(capsys, *arguments: str) -> str:
    main(arguments)
    return capsys.readouterr().out


def test_a_plan_is_an_object(capsys):
    output = json.loads(printed(capsys, *PLAN, "1Gbit", "--json"))
    assert output["target"] == 0.95 and "remedy" not in output
    first = output["plans"][0]
    assert first["compute_utilization"] >= 0.95
    assert f"--diloco.sync-every {first['sync_every']} " in first["flags"]
    assert first["flags"] in printed(capsys, *PLAN, "1Gbit")
    assert first["command"] == f"diloco train RECIPE {first['flags']}"
    assert "The plan holds for 2,097,152 tokens per step: set --global-batch" in printed(capsys, *PLAN, "1Gbit")
    assert output["num_steps"] == round(20e9 / 2**21) and output["most_utilization"] == 1
    assert output["replicas"] == [{"step_seconds": 0.1, "gbit_s": 1.0, "latency_seconds": 0.01}] * 2


def test_a_plan_that_cannot_be_says_what_would_make_it_one(capsys):
    sentence = printed(capsys, *PLAN, "1Mbit")
    assert "No setting reaches a compute utilization of 0.95 here." in sentence
    assert "links of" in sentence and "a target of 0." in sentence
    output = json.loads(printed(capsys, *PLAN, "1Mbit", "--json"))
    assert output["plans"] == [] and output["remedy"]["link_gbit_s"] > 0.001


def test_a_plan_says_what_a_bucket_costs(capsys):
    arguments = ["plan", "--num-params", "1e9", "--num-layers", "4", "--step-seconds", "1", "--link", "2Gbit"]
    arguments += ["--num-replicas", "3"]
    plans = json.loads(printed(capsys, *arguments, "--json", "--store"))["plans"]
    # Of an outer step of three: payloads, or shares and their averages, that are downloaded; creates; reads, of
    # averages also in vain.
    numbers = {"gather": (6, 3 + 1, 4 + 6), "reduce_scatter": (4, 3 + 1 + 3 * 4, 4 + 6 + 3 * 2 + 1.75 * 3 * 2)}
    assert {plan["combine"] for plan in plans} == set(numbers)
    for plan in plans:
        num_down, num_creates, num_gets = numbers[plan["combine"]]
        bill, rounds = plan["store_a_day"], 86400 * plan["compute_utilization"] / plan["sync_every"]
        num_fragments = -(-4 // plan["layers_per_fragment"]) + 1
        outer_steps = rounds * num_fragments
        bits = {"e3m0": 4 + 8 / 256, "int8": 8 + 32 / 256, "bf16": 16, "fp32": 32}[plan["wire"]]
        assert bill["terabytes_down"] == pytest.approx(num_down * 1e9 * bits / 8 * rounds / 1e12, rel=1e-4)
        ratio = max(1, round(min(plan["overlap_steps"] / 8, 30) / 0.5))  # between two looks for another's payload
        doubled = 3 * outer_steps * (math.log2(ratio) - 1 + 1 / ratio)
        events = 3 + 1 + 1 / 8  # payloads and entries of an outer step; every eighth with a snapshot
        again = outer_steps * (events / (1 - math.exp(-events / ratio)) - ratio - 0.5)
        polls = 3 * (86400 / 0.5 * (1 + 1 / 60) + again) + 2 * (3 * 86400 / 0.5 / ratio + doubled)
        creates = outer_steps * (num_creates + (2 + 5 / num_fragments) / 8)
        gets = outer_steps * (num_gets + 4 / 8) + polls
        assert bill["requests"] == pytest.approx(creates + gets)
        assert bill["dollars"]["S3"] == pytest.approx(
            (creates * 5 + gets * 0.4) / 1e6 + bill["terabytes_down"] * 90, abs=1e-5
        )
    first, sentence = plans[0], printed(capsys, *arguments, "--store")
    bill = f"{first['store_a_day']['terabytes_down']:.3g} TB a day out of it, in "
    bill += f"{first['store_a_day']['requests']:,.0f} requests"
    assert f"H = {first['sync_every']}, {first['wire']} and {first['combine']} move {bill}" in sentence
    soon = r"about ([\d.]+) s after the send, so choose a τ of at least (\d+)"
    ((seconds, steps),) = re.findall(soon, sentence)
    assert float(seconds) > 1.0 and int(steps) == pytest.approx(float(seconds) + 0.5, abs=0.6)
    assert "too." not in sentence


def test_a_plan_says_which_period_a_slow_uplink_to_a_bucket_needs(capsys):
    arguments = ["plan", "--num-params", "124M", "--step-seconds", "1.625", "--store"]
    # Each of two sends 4.03 bits per parameter, and half of the snapshots, 64 bits every eighth round: 4 bits.
    sentence = printed(capsys, *arguments, "--link", "20Mbit")
    load = 124e6 * (4.03125 + 4) / 20 / 1.625 / 20e6
    assert "with H = 20," in sentence and f"busy {load:.0%} of the time" in sentence
    assert f"an H of at least {math.ceil(20 * load / 0.8)}, too." in sentence


def plan_of_few_steps(words: list[str]) -> None:
    """Plan by the times of fewer steps, also in the replicas, which are forked from this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_MOST_STEPS", 5)
        patch.setattr(measure.measure_link, "__kwdefaults__", {"seconds": 0.1, "beside": None})
        main(words)


@pytest.mark.slow
def test_a_plan_measures_this_machine_on_request(tmp_path):
    flags = ["--global-batch", "16", "--diloco.outer-learning-rate", "0.7", "--log-layer-cosine"]
    flags += ["--shards-per-replica", "2"]
    command = ["plan", "--measure", "tiny", "--target", "0.2", *flags]
    process = run_main(plan_of_few_steps, command, folder=tmp_path, timeout_seconds=200)
    assert process.returncode == 0, process.stderr
    pattern = r"^step    .* s on each of 2 replicas \(measured\)$\nlink    .*bit/s, latency .* ms \(measured\)$"
    assert re.search(pattern, process.stdout, re.MULTILINE)
    last = process.stdout.rstrip().splitlines()[-1]
    parts = (
        *("diloco train tiny ", "--global-batch 16", "--shards-per-replica 2"),
        *("--diloco.outer-learning-rate 0.7 --log-layer-cosine", "--num-replicas 2 --diloco.sync-every "),
    )
    assert all(part in last for part in parts)


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "slow-links.md"


def test_the_page_says_whether_a_run_fits_two_homes(capsys):
    ((command, shown),) = re.findall(
        r"```\ndiloco (plan --num-params 124M .*)\n```\n+```text[^\n]*\n(.*?)```", PAGE.read_text(), re.S
    )
    lines = (line.strip() for line in printed(capsys, *command.split()).splitlines())
    # In their order, with others between them where the page has an ellipsis.
    assert all(line.strip() in lines for line in shown.splitlines() if line.strip() not in ("", "…"))
    assert "Data-Parallel" in shown and "streaming_overlapped_fp4" in shown


def test_what_is_assumed_is_named(capsys):
    size = ["plan", "--num-params", "124M"]
    text = printed(capsys, *size, "--step-seconds", "2", "3", "--link", "20Mbit", "1Gbit")
    facts = dict(line.split(None, 1) for line in text.splitlines()[2:8])
    assert "out of it" not in text, "a link has no bucket"
    assert facts["model"] == "124M parameters, 9 layers"
    assert facts["tokens"] == "2.48B (20 per parameter)" and facts["steps"] == f"{2.48e9 / 2**17:,.0f}"
    # 0.00709·N^0.4695·M^0.3399 sequences of 2,048 tokens are 115,900 tokens.
    assert facts["batch"].startswith("131,072 tokens a step over all replicas (the law of arXiv 2503.09799 for M")
    assert facts["step"] == "2 s and 3 s on each of 2 replicas (as given)"
    assert facts["link"] == "20 Mbit/s, latency 0 ms and 1 Gbit/s, latency 0 ms (as given)"
    text = printed(capsys, *size, "--flops-per-second", "30T", "--link", "20Mbit")
    seconds = 6 * 124e6 * 2**16 / 30e12
    assert f"{seconds:.4g} s on each of 2 replicas (6·N·B/M operations at 30T a second)" in text
    assert "H: inner steps between two syncs of a fragment; τ: " in text
    assert "RECIPE: 90m and 180m are the recipes next to 124M parameters; any recipe " in text


def test_the_methods_stand_beside_each_other(capsys):
    """Data-Parallel sends 4 bytes of each parameter at M = 2, at every step, on a link that carries 20 Mbit/s."""
    words = ["plan", "--num-params", "124M", "--step-seconds", "1.6", "--link", "20Mbit", "--json"]
    rows = {row["method"]: row for row in json.loads(printed(capsys, *words))["methods"]}
    assert [*rows] == [*METHODS]
    first = rows["data_parallel"]
    assert first["compute_utilization"] == pytest.approx(1.6 / (124e6 * 32 / 20e6), rel=0.01)
    assert first["hours"] == pytest.approx(2.48e9 / 2**17 * 124e6 * 32 / 20e6 / 3600, rel=0.01)
    needed = [row["needed_gbit_s"] for row in rows.values()]
    assert needed == sorted(needed, reverse=True) and needed[0] > 1 > 0.1 > needed[-1] > 0.02


def test_asked_for_nothing_it_asks_for_a_link_and_measures_this_machine(monkeypatch, capsys):
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: " 20Mbit ")
    monkeypatch.setattr(measure, "measure_alone", lambda config: 0.25)
    text = printed(capsys, "plan")
    assert text.startswith("This times a step of the recipe laptop on this machine")
    assert "step    0.25 s on each of 2 replicas (measured: the recipe's step on this machine" in text
    assert "link    20 Mbit/s, latency 0 ms (as given)" in text and "diloco train laptop --method" in text


@pytest.mark.slow
def test_one_replica_is_timed_alone():
    assert 0 < measure.measure_alone(measure.measurable(recipe("tiny"))) < 30


def test_help_may_stand_behind_a_rate(capsys):
    with pytest.raises(SystemExit) as end:
        main(["plan", "--link", "20Mbit", "-h"])
    assert not end.value.code and "--flops-per-second" in capsys.readouterr().out
