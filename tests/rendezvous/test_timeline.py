"""A run's timeline: how each replica ended; and the section of the report that shows it."""

import pytest
from tests.rendezvous.handwritten import Handwritten
from tests.report.test_page import content

from diloco.cli.main import main
from diloco.rendezvous.log.entries import Keys, Leave
from diloco.rendezvous.log.keys import Signer, write_key
from diloco.rendezvous.status import Look, Timeline


@pytest.fixture
def run(tmp_path) -> Handwritten:
    """a is replaced by a process of its name, b leaves, c dies, and d, which comes late, is active to the end."""
    run = Handwritten(tmp_path / "run")
    for name in "abc":
        run.join(name)
    run.step(0, [run.send(0, replica) for replica in range(3)])
    assert run.join("a") == 3
    run.append(Leave(finished=False), author=1)
    assert run.join("d") == 4
    for p in (1, 0, 1, 0, 1):
        run.step(p, [run.send(p, replica) for replica in (3, 4)])
    return run


def read_timeline(url: str) -> Timeline:
    look = Look(url, with_timeline=True)
    look.again()
    assert look.timeline is not None
    return look.timeline


def test_each_end_is_told_apart(run) -> None:
    timeline = read_timeline(str(run.directory))
    rows = [(life.name, life.end, life.joined, life.ended) for life in timeline.lives]
    assert rows == [
        ("a", "replaced", 0, 1),
        ("b", "left", 0, 1),
        ("c", "died", 0, 1),
        ("a", "active", 1, 6),
        ("d", "active", 1, 6),
    ]
    assert timeline.contributors == [3, 2, 2, 2, 2, 2]
    assert timeline.lives[4].counted == [2, 3, 4, 5, 6]
    assert timeline.tokens[-1] == run.state.tokens // 2


def test_who_is_active_until_the_run_is_closed_has_left(run) -> None:
    run.close(author=4)
    assert [life.end for life in read_timeline(str(run.directory)).lives] == [
        "replaced",
        "left",
        "died",
        "left",
        "left",
    ]


def test_a_revoked_key_is_told_apart(tmp_path) -> None:
    for name in "ab":
        write_key(tmp_path / name)
    run = Handwritten(tmp_path / "run", signers=[Signer.of_file(tmp_path / "a"), Signer.of_file(tmp_path / "b")])
    run.join("a")
    run.join("b")
    run.append(Keys(revoked=(run.signers[1].public,)), author=-1, signer=run.signers[0])
    assert [life.end for life in read_timeline(str(run.directory)).lives] == ["active", "revoked"]


def test_the_report_shows_it(run, tmp_path) -> None:
    main(["report", str(run.directory), "--output", str(tmp_path / "report.html")])
    (section,) = content(tmp_path / "report.html")["sections"]
    facts = section["facts"]
    assert (facts["replicas active"], facts["left"], facts["deaths"]) == ("2 of 5", "1", "2")
    assert "A dot is an outer step" in section["charts"][0]["about"] and len(section["charts"]) == 3
    assert ["2 c", "died", "0", "1"] in [row[:4] for row in section["table"]["rows"]]
