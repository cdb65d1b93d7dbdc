import json
import subprocess
import sys

import numpy as np
import pytest
from tests.cli.test_main import LOADED, python

from diloco.cli.main import main
from diloco.simulator.bandwidth import GBIT_S

RUN = ["--num-params", "1e9", "--num-layers", "24", "--step-seconds", "0.1"]
PLAN = ["plan", *RUN, "--latency-seconds", "0.01", "--link-gbit-s"]


def told(capsys, *arguments: str) -> str:
    main(arguments)
    return capsys.readouterr().out


def bandwidth(capsys, *arguments: str) -> dict:
    return json.loads(told(capsys, "simulate", "bandwidth", *RUN, "--json", *arguments))


def test_bandwidths_are_points_of_the_grid_under_the_targets_as_typed(capsys):
    found = bandwidth(capsys, "--method", "diloco", "--preset", "paper", "--targets", "0.50,.8, 0.99999")
    assert list(found) == ["gbit_s"] and list(found["gbit_s"]) == ["0.50", ".8", "0.99999"]
    assert found["gbit_s"]["0.50"] == GBIT_S[14] and found["gbit_s"][".8"] == GBIT_S[22]
    assert found["gbit_s"]["0.99999"] == "1000+"


def test_the_preset_is_not_the_default(capsys):
    """A run's own volume, that of another way to combine, and the latency that no bandwidth makes up for."""
    method = ["--method", "diloco", "--targets", "0.9,0.99"]
    paper = bandwidth(capsys, *method, "--preset", "paper")["gbit_s"]
    two = bandwidth(capsys, *method)["gbit_s"]
    eight = bandwidth(capsys, *method, "--num-replicas", "8")["gbit_s"]
    shared = bandwidth(capsys, *method, "--num-replicas", "8", "--combine", "reduce_scatter")["gbit_s"]
    far = bandwidth(capsys, *method, "--latency-seconds", "1", "0")["gbit_s"]
    assert paper["0.9"] < two["0.9"] < shared["0.9"] < eight["0.9"]
    assert far["0.99"] == "1000+" != two["0.99"]


def test_a_finite_run_begins_without_anything_to_wait_for(capsys):
    method = ["--method", "streaming_overlapped_fp4", "--targets", "0.9"]
    steady, short = bandwidth(capsys, *method), bandwidth(capsys, *method, "--num-steps", "150")
    assert short["gbit_s"]["0.9"] < steady["gbit_s"]["0.9"]


def utilization(capsys, *arguments: str) -> float:
    command = ["simulate", "utilization", *RUN, "--method", "streaming_overlapped_fp4", "--json", *arguments]
    return json.loads(told(capsys, *command))["compute_utilization"]


def test_links_give_a_utilization(capsys):
    """The other way round: at the bandwidth that a target needs, it is reached, and not at the point before."""
    needed = bandwidth(capsys, "--method", "streaming_overlapped_fp4", "--targets", "0.9")["gbit_s"]["0.9"]
    before = GBIT_S[np.flatnonzero(needed == GBIT_S)[0] - 1]
    for more in ([], ["--num-replicas", "3"]):
        assert 0 < utilization(capsys, "--link-gbit-s", "0.001", *more) < 0.5
    assert utilization(capsys, "--link-gbit-s", str(needed)) >= 0.9
    assert utilization(capsys, "--link-gbit-s", str(before)) < 0.9
    assert utilization(capsys, "--link-gbit-s", str(before), str(needed)) < 0.9
    assert utilization(capsys, "--link-gbit-s", "1e5") == 1
    assert 0 < utilization(capsys, "--link-gbit-s", "1", "--preset", "paper") < 1
    shown = told(capsys, *("simulate", "utilization", *RUN, "--method", "diloco", "--link-gbit-s", "1e4"))
    assert shown == "compute utilization 99.97%\n"


def test_the_ends_of_the_grid_are_marked(capsys):
    slow = ["--method", "diloco", "--sync-every", "50000", "--num-params", "1e7", "--targets", "0.5,1"]
    table = told(capsys, "simulate", "bandwidth", *RUN, *slow)
    assert "≤ 0.1" in table and "1000+" in table


def test_all_of_compute_is_all_but_for_rounding(capsys):
    for size in (["--num-params", "7e9", "--num-layers", "32", "--step-seconds", "2.3"], RUN):
        method = ["--method", "streaming_overlapped_fp4", "--targets", "0.99,0.999999999,1", "--json"]
        found = json.loads(told(capsys, "simulate", "bandwidth", *size, *method))["gbit_s"]
        assert found["1"] == found["0.999999999"] < 1000


def test_replicas_are_as_many_as_there_are_overlaps(capsys):
    overlaps = ["--method", "streaming_overlapped", "--targets", "0.5", "--overlap-steps", "1", "2", "3"]
    two = bandwidth(capsys, *overlaps[:-1])["gbit_s"]["0.5"]
    assert two < bandwidth(capsys, *overlaps)["gbit_s"]["0.5"]


def test_tables_are_for_people(capsys):
    table = told(capsys, "simulate", "bandwidth", *RUN, "--method", "data_parallel", "--step-variation", "0.2")
    assert "compute utilization" in table and "Gbit/s" in table


def test_the_published_tables_are_shown_cell_by_cell(capsys):
    table = told(capsys, "simulate", "published")
    assert "48 of 50 are exact (=), none is further off than 1" in table
    assert "86.8 · 86.85 =" in table and "1.7 · 1.389 -1" in table
    assert "504 · 695" in table and "(+38%)" in table


def test_wall_clock_is_told_in_parts(capsys):
    arguments = ["--num-params", "1e9", "--num-tokens", "2e10", "--batch-tokens", "1e6", "--num-chips", "64"]
    found = json.loads(told(capsys, "simulate", "wall-clock", *arguments, "--num-replicas", "2", "--json"))
    assert found.pop("seconds") == pytest.approx(sum(found.values()))
    assert found["compute_seconds"] == pytest.approx(6250)
    assert "outer gradients" in told(capsys, "simulate", "wall-clock", *arguments)


@pytest.mark.parametrize("preset", ["physical", "paper"])
def test_a_timeline_is_drawn(preset, capsys, tmp_path):
    shown = told(capsys, "simulate", "timeline", "--preset", preset, "--output", str(tmp_path))
    svg, png = (tmp_path / "timeline.svg"), (tmp_path / "timeline.png")
    assert shown.split() == [str(svg), str(png)]
    assert png.read_bytes().startswith(b"\x89PNG") and "<svg" in (first := svg.read_text())
    told(capsys, "simulate", "timeline", "--preset", preset, "--output", str(tmp_path))
    assert svg.read_text() == first


def test_every_figure_is_drawn(capsys, tmp_path):
    from diloco.report.figures.simulator import FIGURES

    told(capsys, "simulate", "curves", "--output", str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {f"{n}.{end}" for n in FIGURES for end in ("svg", "png")}


def test_a_plan_is_an_object(capsys):
    found = json.loads(told(capsys, *PLAN, "1", "--json"))
    assert found["target"] == 0.95 and "remedy" not in found
    first = found["plans"][0]
    assert first["compute_utilization"] >= 0.95
    assert f"--diloco.sync-every {first['sync_every']} " in first["flags"]
    assert first["flags"] in told(capsys, *PLAN, "1")
    assert first["command"] == f"diloco train RECIPE {first['flags']}"
    assert found["num_steps"] == round(20e9 / 2**21) and found["most_utilization"] == 1
    assert found["replicas"] == [{"step_seconds": 0.1, "gbit_s": 1.0, "latency_seconds": 0.01}] * 2


def test_a_plan_that_cannot_be_says_what_would_make_it_one(capsys):
    sentence = told(capsys, *PLAN, "0.001")
    assert "No setting reaches a compute utilization of 0.95 here." in sentence
    assert "links of" in sentence and "a target of 0." in sentence
    found = json.loads(told(capsys, *PLAN, "0.001", "--json"))
    assert found["plans"] == [] and found["remedy"]["link_gbit_s"] > 0.001


@pytest.mark.parametrize("flags", [[], ["--shards-per-replica", "2"]])
def test_a_plan_measures_this_machine_on_request(flags):
    command = [
        *(sys.executable, "-m", "diloco", "plan", "--measure", "tiny"),
        "--target",
        "0.2",
        *("--global-batch", "16", "--diloco.outer-learning-rate", "0.7", "--log-layer-cosine"),
        *flags,
    ]
    process = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr
    assert "replica 1: " in process.stdout and " Gbit/s, latency " in process.stdout
    last = process.stdout.rstrip().splitlines()[-1]
    told = (
        "diloco train tiny ",
        "--global-batch 16",
        "--diloco.outer-learning-rate 0.7 --log-layer-cosine",
        " ".join(flags),
        "--method streaming --num-replicas 2 --diloco",
    )
    assert all(part in last for part in told)


def test_one_replica_has_no_link_to_measure(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--measure", "tiny", "--num-replicas", "1"])
    assert capsys.readouterr().err == "diloco: a link has two ends: pass --num-replicas 2, or more, not 1\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "published"],
        ["simulate", "bandwidth", *RUN, "--method", "streaming", "--json"],
        ["simulate", "--help"],
        [*PLAN, "1"],
        ["plan", "--help"],
    ],
)
def test_no_torch_is_loaded_for_what_is_simulated(arguments):
    loaded = python(LOADED.format(arguments=arguments)).splitlines()[-1]
    assert "torch" not in loaded and "tyro" in loaded


METHOD = ["--method", "streaming_overlapped"]
MISTAKES = {
    "size": (["--method", "diloco", "--num-params", "-1"], "num_params must be above 0 and finite, not -1"),
    "zero": (["--method", "diloco", "--num-layers", "0"], "num_layers must be above 0 and finite, not 0"),
    "method": (["--method", "fsdp"], "'fsdp' is not a method: choose one of data_parallel, diloco, streaming"),
    "overlap": ([*METHOD, "--overlap-steps", "100"], "overlap_steps must be at least 0 and below sync_every=100"),
    "no overlap": (["--method", "streaming", "--overlap-steps", "1"], "but streaming does not overlap"),
    "fragment": (
        [*METHOD, "--layers-per-fragment", "25"],
        "layers_per_fragment=25, but the model has",
    ),
    "target": ([*METHOD, "--targets", "1.5"], "a target must be above 0 and at most 1, not 1.5"),
    "no target": ([*METHOD, "--targets", "half"], "'half' is no number"),
    "layers": ([*METHOD, "--num-layers", "100000000"], "num_layers must be at most 10,000 in a simulation"),
    "seed": ([*METHOD, "--seed", "-1"], "seed must be at least 0, not -1"),
    "steps": ([*METHOD, "--num-steps", "0"], "num_steps must be at least 1, not 0"),
    "period": (["--method", "data_parallel", "--sync-every", "0"], "sync_every must be at least 1, not 0"),
    "no latency": ([*METHOD, "--latency-seconds"], "latency_seconds=() must be one number"),
    "variation": ([*METHOD, "--step-variation", "1e300"], "variation must be at least 0 and at most 100"),
    "too many": ([*METHOD, "--num-replicas", "100000"], "num_replicas must be from 1 to 256, not 100000"),
    "paper": ([*METHOD, "--preset", "paper", "--wire", "e3m0"], "wire=e3m0 means nothing to the preset paper"),
    "replicas": ([*METHOD, "--num-replicas", "3", "--latency-seconds", "1", "2"], "one for each of 3 replicas"),
    "wire": ([*METHOD, "--wire", "e9m9"], "'e9m9' is no wire format"),
    "short": (["--method", "diloco", "--num-steps", "90"], "num_steps=90, but replicas sync every 100 steps"),
    "no stall": ([*METHOD, "--stall-probability", "0.5"], "stall_probability=0.5 with stall_seconds=0.0 stalls"),
    "no straggler": ([*METHOD, "--seed", "3"], "seed=3, but nothing is drawn"),
}


@pytest.mark.parametrize("preset", ["physical", "paper"])
@pytest.mark.parametrize(("arguments", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_ends_in_one_sentence(arguments, sentence, preset, capsys):
    machines = {"--wire", "--num-replicas", "--latency-seconds", "--step-variation", "--stall-probability"}
    physical = (machines | {"--seed"}) & set(arguments) and sentence != MISTAKES["seed"][1]
    chosen = [] if "--preset" in arguments else ["--preset", preset]
    if physical and preset == "paper":
        sentence = "means nothing to the preset paper"
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", "bandwidth", *RUN, *arguments, *chosen])
    shown = capsys.readouterr().err
    assert shown.startswith("diloco: ") and shown.count("\n") == 1 and sentence in shown


PLANNED = ["plan", *RUN, "--link-gbit-s", "1"]
WALL_CLOCK = ["--num-params", "1e9", "--num-tokens", "2e10", "--batch-tokens", "1e6", "--num-chips", "64"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["simulate", "timeline", "--num-steps", "0"], "num_steps must be from 1 to 1000 in a timeline, not 0"),
        (["simulate", "timeline", "--link-gbit-s", "-1"], "gbit_s must be above 0 and finite, not -1.0"),
        (
            ["simulate", "timeline", "--preset", "paper", "--link-gbit-s", "nan"],
            "gbit_s must be above 0 and finite",
        ),
        (["simulate", "timeline", "--method", "data_parallel"], "--preset paper"),
        (["simulate", "curves", "--figures", "loss"], "'loss' is not a figure: choose from methods"),
        (["simulate", "wall-clock", *WALL_CLOCK, "--overlap-steps", "5"], "num_replicas=0 is Data-Parallel"),
        (["simulate", "wall-clock", *WALL_CLOCK, "--inside", "slow"], "inside='slow' is not a network"),
        ([*PLANNED, "--batch-tokens", "0"], "batch_tokens must be above 0 and finite, not 0.0"),
        ([*PLANNED, "--num-tokens", "-1e10", "--batch-tokens", "-1"], "num_tokens must be above 0 and finite"),
        ([*PLANNED, "--num-tokens", "2e7"], "num_steps=10: so short a run is over before"),
        ([*PLANNED, "--target", "1"], "target must be above 0 and below 1, not 1.0"),
        ([*PLANNED, "--link-gbit-s", "0"], "link_gbit_s must be above 0 and finite, not 0.0"),
        (["plan", "--measure", "tiny", "--target", "2"], "target must be above 0 and below 1, not 2.0"),
        (["plan", "--measure=tiny", "--target", "2"], "target must be above 0 and below 1, not 2.0"),
        (["plan", "--measure", "tiny", "--diloco.wire", "int8"], "leave out --diloco.wire int8: the plan chooses"),
        (["plan", "--measure", "tiny", "--diloco.offsets", "1", "2"], "leave out --diloco.offsets 1 2: the plan"),
    ],
)
def test_other_mistakes_end_in_one_sentence_too(arguments, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    shown = capsys.readouterr().err
    assert shown.startswith("diloco: ") and shown.count("\n") == 1 and sentence in shown
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_it_says_what_to_install(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for what in ("timeline", "curves"):
        with pytest.raises(SystemExit, match="2"):
            main(["simulate", what, "--output", str(tmp_path)])
        assert "pip install '.[pictures]' in diloco's clone" in capsys.readouterr().err


def test_the_grid_is_the_papers():
    np.testing.assert_array_equal(GBIT_S, np.logspace(-1, 3, 50))
