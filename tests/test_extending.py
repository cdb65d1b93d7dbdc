"""The diffs of docs/extending.md: together, on a copy of the source code, they add what the page says."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SNIPPETS = ROOT / "docs" / "snippets"
MOST_FILES = {
    "new_codec": 2,
    "new_outer_rule": 2,
    "new_merge_rule": 1,
    "new_transport": 2,
    "new_family": 2,
    "new_experiment": 1,
    "new_verb": 1,
    "new_setting": 2,
}
"""The number of source files that each touches, as the page says."""
COMMANDS = """\
diloco train tiny --config gated.toml --num-replicas 2 --diloco.wire nf4 --optimizer.clip-value 0.1 \
--num-tokens 10240 --name one --evaluation.num-tokens 512 --data.train TEXT --data.held-out-fraction 0.1
diloco hash runs/one
diloco experiment outer_momentum --commands
diloco bench wire --wires nf4 --values 65536 --gradient runs/one/outer.safetensors
"""
AFTERWARDS = """
import torch, diloco
from diloco.cli.main import main
from diloco.outer.merge import Bounded
from diloco.outer.signum import Signum

model = torch.nn.Linear(8, 1, bias=False)
before = model.weight.detach().clone()
exchange = diloco.DelayedExchange(diloco.LoopbackExchange(), seconds=0.2)
rules = {"outer": Signum(lr=0.1), "mixing": Bounded(0.01)}
engine = diloco.StreamingDiLoCo(
    model, fragments="whole", sync_every=1, overlap_steps=0, exchange=exchange, **rules
)
with torch.no_grad():
    model.weight.add_(1)
engine.step()
torch.testing.assert_close(engine.outer_parameters()["weight"], before + 0.1)
torch.testing.assert_close(model.weight.detach(), before + 1 - 0.01)
assert engine.blocked_seconds > 0.1
main(["eval", "runs/one"])
"""
"""One inner step, with the rules and the transport; and a command that knows the family from the config alone."""


IN_TURN = """
import json, os, sys
import torch, torch.utils.tensorboard

for code in json.loads(sys.argv[1]):
    pid = os.fork()
    if not pid:
        exec(code, {})
        sys.exit()
    if os.waitpid(pid, 0)[1]:
        sys.exit(1)
"""
"""Codes one after another, each in a process that finds torch imported, and nothing of the changed source code."""


def python(folder: Path, *codes: str) -> str:
    """The output of codes, each in a process of its own that has the changed source code."""
    environment = os.environ | {"PYTHONPATH": f"{folder / 'src'}:{os.environ['PYTHONPATH']}"}
    command = [sys.executable, "-c", IN_TURN, json.dumps(codes)]
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_each_diff_touches_as_few_files_as_the_page_says():
    touched = {
        path.stem: [
            line.split(" b/")[1] for line in path.read_text().splitlines() if line.startswith("diff --git")
        ]
        for path in SNIPPETS.glob("*.diff")
    }
    assert {name: len(files) for name, files in touched.items()} == MOST_FILES
    assert all(file.startswith("src/diloco/") for files in touched.values() for file in files)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("git"), reason="git applies the diffs")
def test_the_diffs_of_the_page_add_what_it_says(tmp_path, small_corpus):
    shutil.copytree(
        ROOT / "src", tmp_path / "src"
    )  # with what is compiled, which stays right for what no diff changes
    for name in MOST_FILES:
        subprocess.run(["git", "apply", str(SNIPPETS / f"{name}.diff")], cwd=tmp_path, check=True, timeout=30)
    (toml,) = re.findall(r"```toml\n(\[model\].*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
    (tmp_path / "gated.toml").write_text(toml)
    words = [
        shlex.split(line)[1:] for line in COMMANDS.replace("TEXT", shlex.quote(str(small_corpus))).splitlines()
    ]
    run = f"from diloco.cli.main import main\nfor words in {words!r}: main(words)"
    output = python(tmp_path, f"{run}\nprint('AFTERWARDS', flush=True)", AFTERWARDS)
    output, _, evaluated = output.partition("AFTERWARDS")
    assert "nf4" in output and "momentum" in output
    summary = (tmp_path / "runs" / "one" / "summary.json").read_text()
    (digest,) = (line for line in output.splitlines() if len(line) == 64 and line in summary)
    assert digest
    assert json.loads((tmp_path / "runs" / "one" / "config.json").read_text())["optimizer"]["clip_value"] == 0.1
    assert "held-out loss" in evaluated
