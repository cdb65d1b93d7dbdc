"""The examples and the code blocks of the docs, as a reader would start them."""

import json
import multiprocessing
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.ports import free_port
from tests.processes import run_main, run_mains, run_replicas
from tests.running import EXAMPLES, ROOT, SNIPPETS, losses, replicas_agree, run_example

from diloco.rendezvous.status import Look


def run_notebook(name: str) -> None:
    """Run the cells of code of a notebook one after another, without a kernel."""
    import matplotlib as mpl

    mpl.use("Agg")
    names: dict = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads((EXAMPLES / name).read_text())["cells"]):
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "a notebook is committed without outputs"
            exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), names)


def torchrun(cwd: Path, num_processes: int, *command: str) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_processes)]
    process = subprocess.run([*launcher, *command], cwd=cwd, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.slow
def test_the_notebooks_run():
    calls = [(run_notebook, "own_loop.ipynb"), (run_notebook, "scaling_laws.ipynb")]
    done = run_mains(calls, folder=EXAMPLES, timeout_seconds=120, imports=["torch"])
    own_loop, laws = (each.stdout for each in done)
    sent, dense = (int(number.replace(",", "")) for number in re.findall(r"sent ([\d,]+)", own_loop))
    one, other = re.findall(r"[0-9a-f]{16}", own_loop)
    held_out, guess = map(float, re.findall(r": (\d\.\d+)", own_loop))
    assert one == other and sent < dense / 50 and held_out < guess / 2
    assert len(re.findall(r"^DiLoCo, M = \d +predicted \d", laws, re.MULTILINE)) == 3


@pytest.mark.slow
def test_two_sites_of_two_processes_agree(tmp_path):
    flags = ["--leader", "--address", f"127.0.0.1:{free_port()}", "--replica", "{job}", "--steps", "50"]
    run = (run_example, 4, str(tmp_path), free_port(), 2, "two_sites.py", *flags)
    outputs = run_replicas(*run, joined=False, timeout_seconds=150)
    assert all(losses(output)[-1] < losses(output)[0] for output in outputs[::2])
    assert replicas_agree("".join(outputs), num_processes=4)


def test_the_algorithm_learns_and_its_replicas_agree(capsys):
    runpy.run_path(str(EXAMPLES / "algorithm.py"), run_name="__main__")
    output = capsys.readouterr().out
    first, *_, last = losses(output)
    assert last < first / 2 and replicas_agree(output, num_processes=2)


@pytest.mark.parametrize("example", ["outer_rule.py", "sign_codec.py"])
def test_an_extension_of_ones_own_learns(example, capsys):
    runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    first, *_, last = losses(capsys.readouterr().out)
    assert last < first / 10


def run_directory_transport() -> None:
    """Run the example, whose replicas are forked here, since a spawned one would import torch anew."""
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _: fork
    runpy.run_path(str(EXAMPLES / "directory_transport.py"), run_name="__main__")


@pytest.mark.slow
def test_replicas_agree_through_a_directory(tmp_path):
    process = run_main(run_directory_transport, folder=tmp_path, timeout_seconds=150)
    assert process.returncode == 0, process.stderr
    assert replicas_agree(process.stdout, num_processes=2)


@pytest.mark.parametrize(
    "snippet",
    [
        *("ema.py", "evaluate_and_resume.py", "masters.py", "merge_rule.py", "methods.py"),
        *("publish_weights.py", "resume_model_first.py", "trackers.py"),
    ],
)
def test_snippets_run(snippet):
    runpy.run_path(str(SNIPPETS / snippet))


@pytest.mark.slow
def test_the_snippet_of_a_store_trains_and_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_STORE", str(tmp_path / "run"))
    values = runpy.run_path(str(SNIPPETS / "store_run.py"))
    status = Look(str(tmp_path / "run")).again()
    assert status.finished and status.tokens >= values["BUDGET"] and min(status.rounds) > 5


@pytest.mark.slow
def test_the_snippet_of_a_sharded_replica_trains_and_ends_the_run(tmp_path):
    arguments = (run_example, 2, str(tmp_path), free_port(), 2, str(SNIPPETS / "sharded_store_run.py"))
    outputs = run_replicas(*arguments, joined=False)
    assert replicas_agree("".join(outputs), num_processes=2)
    status = Look(str(tmp_path / "run")).again()
    assert status.finished and status.tokens >= 5_000 and min(status.rounds) > 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="nccl needs a GPU")
def test_the_exchange_has_a_group_beside_nccl(tmp_path):
    assert "1 replicas" in torchrun(tmp_path, 1, str(SNIPPETS / "beside_nccl.py"))


def test_the_readmes_loop_trains(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 4)
    before = [parameter.clone() for parameter in model.parameters()]
    values = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batches": torch.randn(3, 4, 1, 8),
        "loss": lambda model, batch: model(batch).square().mean(),
    }
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        with pytest.warns(UserWarning, match="was never sent"):  # after 3 steps
            exec(code, values)
    finally:
        dist.destroy_process_group()
    assert values["engine"].num_steps == 3
    assert not all(map(torch.equal, before, model.parameters()))


IN_OTHER_TESTS = {
    "own_loop.py": "test_tutorial.py",
    "ray_train.py": "integrations/test_ray.py",
    "lightning_autoencoder.py": "integrations/test_lightning.py",
    "torchtitan_run.py": "integrations/test_torchtitan.py",
    **dict.fromkeys(
        (
            *("accelerate_loop.py", "transformers_trainer.py", "trl_sft.py"),
            *("rl_two_sites.py", "sharded_replicas.py"),
        ),
        "integrations/test_transformers.py",
    ),
}
"""Examples and snippets that other tests run, since those have imported the frameworks."""


def test_every_code_block_of_the_docs_is_part_of_a_file_that_runs():
    from docs.generate import with_code

    tested = {path.name for path in (*EXAMPLES.glob("*.py"), *SNIPPETS.glob("*.py"))}
    for page in (ROOT / "docs").rglob("*.md"):
        markdown = page.read_text()
        assert markdown == with_code(markdown), f"{page}: make format copies the code anew"
        for title in re.findall(r"^ *```python(.*)$", markdown, re.MULTILINE):
            copied = re.fullmatch(r' title="(?:examples|docs/snippets)/(\w+\.py)(?::\w+)?"', title)
            assert copied and copied[1] in tested, f"{page}: {title}"
    untested = {name for name in tested if name not in Path(__file__).read_text()}
    assert not untested
    for name, test in IN_OTHER_TESTS.items():
        assert Path(name).stem in (Path(__file__).parent / test).read_text()
