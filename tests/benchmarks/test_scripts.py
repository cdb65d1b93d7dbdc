"""Every benchmark runs, at a size of seconds; outputs are checked as far as they are the same on any machine."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from .scripts import BENCHMARKS, end_of, run, table
from .test_laboratory import can_make_namespaces

pytestmark = pytest.mark.slow
TINY = ["--recipe", "tiny", "--seeds", "0", "--learning-rates", "0.004"]
needs_namespaces = pytest.mark.skipif(not can_make_namespaces(), reason="needs root, and iproute2's ip and tc")


def test_streaming_vs_data_parallel(tmp_path: Path, text: list[str]):
    script = "streaming_vs_data_parallel.py"
    output = run(script, *text, "--output", tmp_path, *TINY, "--steps", 30)
    losses = {row["variant"]: float(row["eval_loss"]) for row in table(tmp_path / "results.csv")}
    names = ["data_parallel", "streaming_overlapped_fp4", "streaming_overlapped", "averaging"]
    assert sorted(losses) == sorted(names)
    assert len(set(losses.values())) == 4, "four different methods"
    assert [line.split()[0] for line in output.splitlines()[-4:]] == names


def test_parity_goes_on_from_its_table(tmp_path: Path, text: list[str]):
    arguments = [*text, "--output", tmp_path, *TINY, "--steps", 170]
    output = run("parity.py", *arguments)
    rows, lines = table(tmp_path / "results.csv"), output.splitlines()[-5:]
    names = ["data_parallel", "streaming", "sync_every_100", "overlap_steps_5", "num_replicas_4"]
    assert [row["variant"] for row in rows] == [line.split()[0] for line in lines] == names
    assert len({row["eval_loss"] for row in rows}) == 5, "five different runs"
    assert {row["num_tokens"] for row in rows} == {str(170 * 4 * 64)}
    sent = {row["variant"]: int(row["bytes_sent_per_replica"]) for row in rows}
    assert sent["num_replicas_4"] == 3 * sent["streaming"], "to each of three others"
    shutil.rmtree(tmp_path / "runs")
    assert run("parity.py", *arguments) == output and not list((tmp_path / "runs").glob("*/config.json"))


def test_wire_formats(tmp_path: Path, text: list[str]):
    variants = ["fp32", "e3m0, error feedback"]
    arguments = [*TINY, "--width", 32, "--steps", 30, "--variants", *variants]
    output = run("wire_formats.py", *text, "--output", tmp_path, *arguments)
    sizes = {row["variant"]: int(row["bytes_sent_per_replica"]) for row in table(tmp_path / "results.csv")}
    assert sizes["fp32"] > 7 * sizes["e3m0, error feedback"]
    assert all(variant in output for variant in variants)


def test_no_script_is_forgotten():
    callers = (*Path(__file__).parent.glob("test_*.py"), BENCHMARKS / "link_study" / "measuring.py")
    names = "".join(path.read_text() for path in callers)
    scripts = [path.name for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()]
    assert len(scripts) > 20 and [name for name in scripts if f'"{name}"' not in names] == []


def test_checksums():
    line = run("checksums.py", "--values", 1 << 16, "--repeats", 2)
    assert line.startswith("65,536 values, copy ")
    assert set(re.findall(r"(encode|decode and add|encode without) [0-9.]+", line)) == {
        "encode",
        "decode and add",
        "encode without",
    }


def test_outer_step():
    output = run("outer_step.py", "--parameters", 1 << 16, "--replicas", 3, "--wire", "int4", "--dtype", "bf16")
    assert "65,536 parameters in bf16, 3 replicas, int4:" in output
    assert "decode and add 3 payloads" in output


def test_training_step():
    row = run("training_step.py", "--sizes", "1M", "--steps", 8, "--sequences", 1, "--tokens", 32).splitlines()[-1]
    assert re.fullmatch(r"\| 1,212,544 \| [0-9,]+ \| [0-9,]+ \| [0-9.]+ \|", row)


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


def test_store_bytes():
    rows = [line.split(" | ") for line in run("store_bytes.py", "--replicas", 8, "--shares", 8).splitlines()[2:]]
    assert [row[1] for row in rows] == ["gather", "8 shares"]
    (gather, shares) = ([float(cell.replace(",", "")) for cell in row[2:5]] for row in rows)
    payload = 10**9 * 4.03125 / 8 / 1e9
    assert gather == pytest.approx([payload, 7 * payload, 7], abs=0.01)
    assert shares == pytest.approx([payload * 9 / 8, 2 * payload * 7 / 8, 1.75], abs=0.06)


def test_engine_overhead():
    assert re.search(r"engine.step\(\) [0-9.]+ ms: [0-9.]+%", run("engine_overhead.py", "--steps", 8))


def test_walks_count_the_files_that_run():
    output = run("walks.py", "--repeats", 1, "--files")
    values = dict(re.split(r"  +", line) for line in output.splitlines() if re.search(r"\S  +\S", line))
    walks = {
        name: set(files.split()) for name, files in re.findall(r"^(\w+):\n((?:  \S+\n?)+)", output, re.MULTILINE)
    }
    send, store, train, imported = (walks[name] for name in ("send", "store", "train", "imported"))
    assert int(values["send and merge, two replicas of gloo: files that run"]) == len(send)
    assert int(values["the same through a store: files that run"]) == len(store)
    assert (
        values["diloco train tiny to its first step: files that run, imported"] == f"{len(train)}, {len(imported)}"
    )
    assert "schedule.py" in send & store & train and "cli/train.py" in train - send
    assert train - imported <= {"__main__.py"} and len(send) < len(store)


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
    process = end_of("golden.py", file, "--compare", "--runs", name)
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


@needs_namespaces
def test_sites():
    *_, one_a_process, leaders = (line.split() for line in run("sites.py", "--width", 64).splitlines())
    each, lead = (int(row[-2].replace(",", "")) for row in (one_a_process, leaders))
    assert lead < 0.6 * each and one_a_process[-1] == leaders[-1]
