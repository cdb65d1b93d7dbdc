import json
import re
import sys
import tomllib
from email.message import Message

import pytest
from tests.running import ROOT

from diloco.cli import doctor
from diloco.cli.main import main


def parts(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, str]]:
    """The last finding about each part."""
    printed = capsys.readouterr()  # nothing of what was printed before
    code = None
    try:
        main(["doctor", "--json", *words])
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr()
    findings = {one["part"]: one for one in json.loads(printed.out)["parts"]}
    broken = [one["part"] for one in findings.values() if one["state"] == "broken"]
    assert code == (1 if broken else None) and all(part in printed.err for part in broken)
    return findings


@pytest.fixture(autouse=True)
def about(monkeypatch: pytest.MonkeyPatch) -> Message:
    """The metadata of a diloco with one extra, whose libraries are there."""
    message = Message()
    message["Provides-Extra"] = "store"
    for requirement in ("obstore>=0.10", "cryptography>=43"):
        message["Requires-Dist"] = f"{requirement}; extra == 'store'"
    monkeypatch.setattr(doctor, "metadata", lambda name: message)
    return message


def test_the_parts_of_this_machine_and_a_store_are_good(capsys, tmp_path):
    findings = parts(capsys, str(tmp_path / "store"))
    assert {name for name, one in findings.items() if one["state"] == "good"} >= {
        "torch",
        "threads",
        "network",
        "disk",
    }
    assert findings["extras"] == {"part": "extras", "state": "good", "text": "store"}
    assert "50 races had one winner each" in findings["store"]["text"]


def test_an_extra_and_a_compiler_that_are_absent_are_no_faults(capsys, about, monkeypatch):
    about["Provides-Extra"] = "more"
    for requirement in ("diloco[store]", "no-such-library>=1"):
        about["Requires-Dist"] = f'{requirement} ; extra == "more"'
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    findings = parts(capsys)
    assert findings["extras"] == {
        "part": "extras",
        "state": "absent",
        "text": "more: run pip install 'diloco[NAME]'",
    }
    assert findings["C compiler"]["state"] == "absent"


def test_what_is_installed_and_broken_ends_with_1(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    (tmp_path / "file").touch()
    findings = parts(capsys, str(tmp_path / "file"))
    assert "obstore" in findings["store"]["text"] and "nowhere0 is no interface" in findings["network"]["text"]
    assert findings["network"]["state"] == "broken"


def test_a_part_with_two_faults_is_named_once(capsys, monkeypatch):
    for library in ("obstore", "cryptography"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SystemExit, match="1"):
        main(["doctor"])
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) <= 24, "one screen"
    assert printed.out.count("! store") == 2 and printed.err == "diloco: store can't work as it is\n"


@pytest.mark.slow
def test_the_libraries_of_the_trainer_and_of_stores_work_under_the_names_of_their_modules(
    capsys, about, monkeypatch
):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    about["Provides-Extra"] = "train"
    for extra in ("train", "store"):
        for requirement in extras[extra]:
            about["Requires-Dist"] = f"{requirement}; extra == '{extra}'"
    assert any("pyyaml" in requirement for requirement in extras["train"]), "whose module is yaml"
    findings = parts(capsys)
    assert findings["extras"]["text"] == "store, train" and "broken" not in {
        one["state"] for one in findings.values()
    }
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "yaml" in parts(capsys)["train"]["text"]


def test_the_versions_of_torch_are_those_of_the_page_on_versions():
    page = ROOT / "docs" / "reference" / "versions.md"
    row = re.search(r"^\| torch \| ([\d., ]+) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert row is not None
    tried = [tuple(map(int, version.split(".")[:2])) for version in row[1].split(", ")]
    assert (min(tried), max(tried)) == (doctor.OLDEST_TORCH, doctor.NEWEST_TORCH)


def test_a_flag_that_is_unknown_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--store", "a"])
    assert "unrecognized arguments" in capsys.readouterr().err
