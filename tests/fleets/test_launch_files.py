"""The files for SkyPilot and Kubernetes, read by SkyPilot's own parser and held against Kubernetes' schemas.

Both packages are too large for the development environment: `pip install skypilot kubernetes-validate`.
"""

import shlex

import pytest
import yaml
from tests.fleets.test_launch import MACHINES, STORE, fleet_of

from diloco.fleets.launch import planned

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("default")
def test_skypilot_reads_the_task(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    sky = pytest.importorskip("sky")
    text = (
        "launch.setup = ['pip install diloco']\nlaunch.environment = { A = 'b' }\nlaunch.image = 'me/diloco:1'\n"
    )
    fleet = fleet_of(tmp_path, text + STORE + MACHINES)
    planned(fleet, "skypilot", tmp_path / "run")
    task = sky.Task.from_yaml(str(tmp_path / "run" / "a100.yaml"))
    (resources,) = task.resources
    assert resources.use_spot and resources.accelerators == {"A100": 8} and resources.region == "us-east-1"
    assert task.envs == {"A": "b", "DILOCO_NAME": "a100-0"}
    assert task.run.splitlines()[-1].endswith('--name "$DILOCO_NAME"') and "pip install diloco" in task.setup


@pytest.mark.filterwarnings("default")
def test_the_command_that_launches_is_one_of_skypilots(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    cli = pytest.importorskip("sky.client.cli.command").cli
    plan = planned(fleet_of(tmp_path, STORE + MACHINES), "skypilot", tmp_path / "run")
    for command in (
        *plan.commands,
        ("sky", "jobs", "queue", "--all", "--output", "json"),
        ("sky", "jobs", "cancel", "--yes", "--name", "run-a100-0"),
    ):
        leaf = cli
        words = list(command[1:])
        while hasattr(leaf, "commands"):
            leaf = leaf.commands[words.pop(0)]
        leaf.make_context(leaf.name, words)  # it parses, and sends nothing


@pytest.mark.parametrize("group", [False, True], ids=["store", "group"])
def test_kubernetes_schemas_hold(group, tmp_path):
    validate = pytest.importorskip("kubernetes_validate")
    command = "launch.command = 'diloco train laptop'" if group else STORE
    machines = MACHINES.replace("launch.spot = true", "") if group else MACHINES
    extra = "launch.kubernetes = { tolerations = [{ key = 'spot', operator = 'Exists' }], secrets = ['bucket'] }"
    text = f"launch.image = 'me/diloco:1'\n{command}{machines}{extra}"
    plan = planned(fleet_of(tmp_path, text), "kubernetes", tmp_path / "run")
    assert len(plan.files) == 2 + group
    for content in plan.files.values():
        for version in ("1.29", validate.latest_version()):
            validate.validate(yaml.safe_load(content), version, strict=True)
    wrong = yaml.safe_load(plan.files["a100.yaml"])
    wrong["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, "1.29", strict=True)


def test_the_commands_name_the_files_that_are_written(tmp_path):
    plan = planned(fleet_of(tmp_path, f"launch.image = 'a'\n{STORE}{MACHINES}"), "kubernetes", tmp_path / "run")
    files = [shlex.split(shlex.join(command))[-1] for command in plan.commands]
    assert files == [str(tmp_path / "run" / name) for name in plan.files]
