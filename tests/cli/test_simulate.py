import json

import numpy as np
import pytest

from diloco.cli.main import main
from diloco.simulator.description import GBIT_S

RUN = ["--num-params", "1e9", "--num-layers", "24", "--step-seconds", "0.1"]


def printed(capsys, *arguments: str) -> str:
    main(arguments)
    return capsys.readouterr().out


def bandwidth(capsys, *arguments: str) -> dict:
    return json.loads(printed(capsys, "simulate", "bandwidth", *RUN, "--json", *arguments))


def test_bandwidths_are_points_of_the_grid_under_the_targets_as_typed(capsys):
    result = bandwidth(capsys, "--method", "diloco", "--preset", "paper", "--targets", "0.50,.8, 0.99999")
    assert list(result) == ["gbit_s"] and list(result["gbit_s"]) == ["0.50", ".8", "0.99999"]
    assert result["gbit_s"]["0.50"] == GBIT_S[14] and result["gbit_s"][".8"] == GBIT_S[22]
    assert result["gbit_s"]["0.99999"] == "1000+"


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
    shorter = utilization(capsys, "--link", "1Mbit", "--first-sync", "early", "--num-steps", "50")
    assert shorter < 1, "fragments are sent before step H"


def utilization(capsys, *arguments: str) -> float:
    command = ["simulate", "utilization", *RUN, "--method", "streaming_overlapped_fp4", "--json", *arguments]
    return json.loads(printed(capsys, *command))["compute_utilization"]


def test_links_give_a_utilization(capsys):
    """The inverse: the bandwidth that a target needs reaches the target, and the grid's point before does not."""
    needed = bandwidth(capsys, "--method", "streaming_overlapped_fp4", "--targets", "0.9")["gbit_s"]["0.9"]
    before = GBIT_S[np.flatnonzero(needed == GBIT_S)[0] - 1]
    for more in ([], ["--num-replicas", "3"]):
        assert 0 < utilization(capsys, "--link", "1Mbit", *more) < 0.5
    assert utilization(capsys, "--link", f"{needed}Gbit") >= 0.9
    assert utilization(capsys, "--link", f"{before}Gbit") < 0.9
    assert utilization(capsys, "--link", f"{before}Gbit", f"{needed}Gbit") < 0.9
    assert utilization(capsys, "--link", "100Tbit") == 1
    assert 0 < utilization(capsys, "--link", "1Gbit/s", "--preset", "paper") < 1
    shown = printed(capsys, *("simulate", "utilization", *RUN, "--method", "diloco", "--link", "1e4Gbit"))
    assert shown == "compute utilization 99.97%\n"


def test_the_ends_of_the_grid_are_marked(capsys):
    slow = ["--method", "diloco", "--sync-every", "50000", "--num-params", "1e7", "--targets", "0.5,1"]
    table = printed(capsys, "simulate", "bandwidth", *RUN, *slow)
    assert "≤ 0.1" in table and "1000+" in table


def test_all_of_compute_is_all_but_for_rounding(capsys):
    for size in (["--num-params", "7e9", "--num-layers", "32", "--step-seconds", "2.3"], RUN):
        method = ["--method", "streaming_overlapped_fp4", "--targets", "0.99,0.999999999,1", "--json"]
        gbit_s = json.loads(printed(capsys, "simulate", "bandwidth", *size, *method))["gbit_s"]
        assert gbit_s["1"] == gbit_s["0.999999999"] < 1000


def test_replicas_are_as_many_as_there_are_overlaps(capsys):
    overlaps = ["--method", "streaming_overlapped", "--targets", "0.5", "--overlap-steps", "1", "2", "3"]
    two = bandwidth(capsys, *overlaps[:-1])["gbit_s"]["0.5"]
    assert two < bandwidth(capsys, *overlaps)["gbit_s"]["0.5"]


def test_the_published_tables_are_shown_cell_by_cell(capsys):
    table = printed(capsys, "simulate", "published")
    assert "73 of 75 are exact (=), 2 are one point off, 0 more" in table
    assert "88 of 90 are exact (=), 2 are one point off, 0 more" in table
    assert "184.2 · 184.2 =" in table and "1000+ · 1000 -1" in table
    assert "86.8 · 86.85 =" in table and "1.7 · 1.389 -1" in table
    assert "504 · 695" in table and "(+38%)" in table
    assert "1767 · 1767.33 (+0%)" in table and "0.88 · 0.87 (-1%)" in table


def test_a_steps_time_follows_from_its_operations(capsys):
    machine = ["--batch-tokens", "1048576", "--num-chips", "64", "--flops-per-chip", "459e12", "--mfu", "0.4"]
    assert printed(capsys, "simulate", "step-seconds", "--num-params", "1e9", *machine) == "0.5354\n"


def test_wall_clock_is_the_sum_of_its_parts(capsys):
    arguments = ["--num-params", "1e9", "--num-tokens", "2e10", "--batch-tokens", "1e6", "--num-chips", "64"]
    parts = json.loads(printed(capsys, "simulate", "wall-clock", *arguments, "--num-replicas", "2", "--json"))
    assert parts.pop("seconds") == pytest.approx(sum(parts.values()))
    assert parts["compute_seconds"] == pytest.approx(6250)
    assert "outer gradients" in printed(capsys, "simulate", "wall-clock", *arguments)


@pytest.mark.slow
def test_a_timeline_is_drawn_the_same_each_time(capsys, tmp_path):
    svg, png = tmp_path / "timeline.svg", tmp_path / "timeline.png"
    drawn, short = [], ["--num-steps", "7", "--num-layers", "2", "--layers-per-fragment", "1"]
    for _ in range(2):
        shown = printed(capsys, "simulate", "timeline", *short, "--output", str(tmp_path))
        assert shown.split() == [str(svg), str(png)] and png.read_bytes().startswith(b"\x89PNG")
        drawn.append(svg.read_text())
    assert drawn[0] == drawn[1] and "<svg" in drawn[0]


def test_without_matplotlib_it_says_what_to_install(capsys, tmp_path, monkeypatch):
    def no_library(module: str) -> None:
        raise ModuleNotFoundError(name=module.partition(".")[0])

    monkeypatch.setattr("diloco.files.importlib.import_module", no_library)
    for verb in ("timeline", "pictures"):
        with pytest.raises(SystemExit, match="2"):
            main(["simulate", verb, "--output", str(tmp_path)])
        assert "pip install 'diloco[pictures]'" in capsys.readouterr().err
