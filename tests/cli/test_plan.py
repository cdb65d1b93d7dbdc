import json
import re

import pytest
from tests.processes import run_main

from diloco.cli.main import main
from diloco.training import measure

RUN = ["--num-params", "1e9", "--num-layers", "24", "--step-seconds", "0.1"]
PLAN = ["plan", *RUN, "--latency-seconds", "0.01", "--link-gbit-s"]


def printed(capsys, *arguments: str) -> str:
    main(arguments)
    return capsys.readouterr().out


def test_a_plan_is_an_object(capsys):
    output = json.loads(printed(capsys, *PLAN, "1", "--json"))
    assert output["target"] == 0.95 and "remedy" not in output
    first = output["plans"][0]
    assert first["compute_utilization"] >= 0.95
    assert f"--diloco.sync-every {first['sync_every']} " in first["flags"]
    assert first["flags"] in printed(capsys, *PLAN, "1")
    assert first["command"] == f"diloco train RECIPE {first['flags']}"
    assert output["num_steps"] == round(20e9 / 2**21) and output["most_utilization"] == 1
    assert output["replicas"] == [{"step_seconds": 0.1, "gbit_s": 1.0, "latency_seconds": 0.01}] * 2


def test_a_plan_that_cannot_be_says_what_would_make_it_one(capsys):
    sentence = printed(capsys, *PLAN, "0.001")
    assert "No setting reaches a compute utilization of 0.95 here." in sentence
    assert "links of" in sentence and "a target of 0." in sentence
    output = json.loads(printed(capsys, *PLAN, "0.001", "--json"))
    assert output["plans"] == [] and output["remedy"]["link_gbit_s"] > 0.001


def test_a_plan_says_what_a_bucket_costs(capsys):
    arguments = ["plan", "--num-params", "1e9", "--num-layers", "4", "--step-seconds", "1", "--link-gbit-s", "2"]
    arguments += ["--num-replicas", "3"]
    plans = json.loads(printed(capsys, *arguments, "--json", "--store"))["plans"]
    # Of an outer step of three: payloads, or shares and their averages, that are downloaded; creates; reads.
    numbers = {"gather": (6, 3 + 1, 3 + 6), "reduce_scatter": (4, 3 + 1 + 3 * 4, 3 + 6 + 3 * 4)}
    assert {plan["combine"] for plan in plans} == set(numbers)
    for plan in plans:
        num_down, num_creates, num_gets = numbers[plan["combine"]]
        bill, rounds = plan["store_a_day"], 86400 * plan["compute_utilization"] / plan["sync_every"]
        outer_steps = rounds * (-(-4 // plan["layers_per_fragment"]) + 1)
        bits = {"e3m0": 4 + 8 / 256, "int8": 8 + 32 / 256, "bf16": 16, "fp32": 32}[plan["wire"]]
        assert bill["terabytes_down"] == pytest.approx(num_down * 1e9 * bits / 8 * rounds / 1e12, rel=1e-4)
        creates, gets = outer_steps * num_creates, outer_steps * num_gets + 9 * 86400 / 0.5
        assert bill["requests"] == pytest.approx(creates + gets)
        assert bill["dollars"]["S3"] == pytest.approx(
            (creates * 5 + gets * 0.4) / 1e6 + bill["terabytes_down"] * 90, abs=1e-6
        )
    first, sentence = plans[0], printed(capsys, *arguments, "--store")
    bill = f"{first['store_a_day']['terabytes_down']:.3g} TB a day out of it, in "
    bill += f"{first['store_a_day']['requests']:,.0f} requests"
    assert f"H = {first['sync_every']}, {first['wire']} and {first['combine']} move {bill}" in sentence
    assert "out of it" not in printed(capsys, *arguments)
    soon = r"about ([\d.]+) s after the send, so choose a τ of at least (\d+)"
    ((seconds, steps),) = re.findall(soon, sentence)
    assert float(seconds) > 1.0 and int(steps) == pytest.approx(float(seconds) + 0.5, abs=0.6)


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
    assert "replica 1: " in process.stdout and " Gbit/s, latency " in process.stdout
    last = process.stdout.rstrip().splitlines()[-1]
    parts = (
        *("diloco train tiny ", "--global-batch 16", "--shards-per-replica 2"),
        *("--diloco.outer-learning-rate 0.7 --log-layer-cosine", "--num-replicas 2 --diloco.sync-every "),
    )
    assert all(part in last for part in parts)
