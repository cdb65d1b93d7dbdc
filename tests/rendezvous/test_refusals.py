"""Refusals before a replica has joined: of a store, an argument, the settings of a run, a key."""

import errno
import re
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.test_elastic import counted, until
from tests.rendezvous.handwritten import Handwritten
from tests.rendezvous.replicas import Replica, new_model
from torch import nn

import diloco
from diloco.errors import DilocoError, FileError, UserError
from diloco.rendezvous.log.keys import write_key
from diloco.rendezvous.log.log import open_run
from diloco.rendezvous.replay import replayed
from diloco.rendezvous.store import Store

KEYS = "AWS_ACCESS_KEY_ID=key AWS_SECRET_ACCESS_KEY=secret AWS_REGION=us-east-1"
"""The environment of those below that name an endpoint."""

STORES = r"""
''                                                      => ^give the directory, or the URL, of the store$
ftp://host/run                                          => ^ftp://host/run: give a directory, or s3://bucket/prefix
file://host/run                                         => three slashes
s3:///run KEYS                                          => the bucket's name is missing
s3:/bucket/run KEYS                                     => ^s3:/bucket/run: a bucket's URL has two slashes: s3://b
s3://badSPACEbucket/run KEYS                              => invalid domain character
s3://key:secret@bucket/run KEYS                         => ^s3://…: give no credentials or options in the URL
s3://bucket/run?region=x KEYS                           => give no credentials or options in the URL
s3://bucket/run AWS_ACCESS_KEY_ID=key                   => half of them: set AWS_ACCESS_KEY_ID
az://container/run                                      => or half of them: set AZURE_STORAGE_ACCOUNT_NAME
s3://bucket/run KEYS AWS_ENDPOINT_URL=http://a.example  => is not encrypted: .* AWS_ALLOW_HTTP
s3://bucket/run KEYS AWS_ENDPOINT_URL=r2.example.com    => ^AWS_E.*=r2.example.com does not begin with https://
s3://bucket/run KEYS AWS_ENDPOINT_URL=https:/host:1     => does not begin with https://: write https://host:1$
s3://bucket/run KEYS AWS_ENDPOINT_URL=ftp://host        => is no URL of an endpoint: write https://HOST, or
s3://bucket/run KEYS AWS_ENDPOINT_URL=https://          => is no URL of an endpoint
s3://bucket/run KEYS AWS_ENDPOINT_URL=https://host:port => is no URL of an endpoint
s3://bucket/run KEYS AWS_ENDPOINT_URL=http://127.0.0.1:5599/bucket/ => bucket: leave .*_URL=http://127.0.0.1:5599$
gs://bucket/run GOOGLE_BASE_URL=host:1                  => ^GOOGLE_BASE_URL=host:1 does not begin with https://
s3://bucket/run KEYS SSL_CERT_FILE=/none.pem            => SSL_CERT_FILE=/none.pem can't be read: No such
hf:/buckets/me/runs KEYS                                => a bucket's URL has two slashes: hf://buckets/NAMESPACE
hf://me/runs KEYS                                       => ^hf://me/runs: .* of a bucket is hf://buckets/NAMESPACE/
hf://buckets/me KEYS                                    => of a bucket is hf://buckets/NAMESPACE/BUCKET/prefix$
hf://buckets/me//run KEYS                               => of a bucket is hf://buckets/NAMESPACE/BUCKET/prefix$
hf://buckets/me/runs/run KEYS HF_S3_ENDPOINT=host       => ^HF_S3_ENDPOINT=host does not begin with https://
hf://buckets/me/runs/run KEYS HF_S3_ENDPOINT=https://s3.hf.co/me => already names .*: HF_S3_ENDPOINT=https://s3.hf.co$
hf://buckets/me/runs/run AWS_ACCESS_KEY_ID=HFAK1        => half of them: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACC
/none/run                                               => ^/none does not exist
FILE                                                    => is a file: give a directory
"""


@pytest.mark.parametrize("row", [line for line in STORES.splitlines() if line])
def test_a_store(row: str, use_environment, monkeypatch: pytest.MonkeyPatch) -> None:
    command, sentence = row.split(" => ")
    url, *environment = command.replace("KEYS", KEYS).replace("FILE ", f"{__file__} ").split()
    for variable in environment:
        monkeypatch.setenv(*variable.split("=", 1))
    with pytest.raises(UserError, match=sentence) as refusal:
        Store.open(url.strip("'").replace("SPACE", " "))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "sentence", "field"),
    [
        ({"name": "a/b"}, "name='a/b' must be 1 to 64 letters, digits, dots, dashes and underscores", "name"),
        ({"num_shares": 1}, "num_shares=1 must be from 2 to 1024", "num_shares"),
        ({"num_shares": 4}, "num_shares=4 means nothing with combine=gather", "num_shares"),
        ({"quorum": 0}, "entry 0 of the log can't be read: .*quorum: expected int >= 1", None),
        ({"num_slots": 0}, "entry 0 of the log can't be read: .*num_slots", None),
        ({"key": "/none"}, "the key /none can't be read: No such file", None),
        *(
            ({"facts": {"lr": value}}, "must hold finite numbers and strings", "facts")
            for value in (float("nan"), float("inf"), {1, 2})
        ),
    ],
)
def test_an_argument(arguments: dict, sentence: str, field: str | None, tmp_path) -> None:
    with pytest.raises(UserError, match=sentence) as refusal:
        Replica(str(tmp_path / "run"), **arguments)
    assert field is None or refusal.value.fields[0] == field
    assert not (tmp_path / "run" / "log").exists(), "no run was created"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The URLs of a run without keys, of one with keys, and of a copy of the first whose log was changed."""
    folder = tmp_path_factory.mktemp("runs")
    publics = {name: write_key(folder / name) for name in ("creator", "other")}
    urls = {name: str(folder / f"{name}-run") for name in ("plain", "keyed", "changed")}
    first = Replica(urls["plain"], snapshot_rounds=100)
    keyed = Replica(urls["keyed"], key=str(folder / "creator"))
    until(lambda: first.exchange.state.number > 8, first)
    shutil.copytree(urls["plain"], urls["changed"])
    entry = Path(urls["changed"], "log", "0000000005")
    entry.write_bytes(entry.read_bytes().replace(b'"tokens":', b'"tokens":1', 1))
    before = {}
    while before != (before := {name: num_entries(urls[name]) for name in ("plain", "keyed")}):
        time.sleep(0.2)  # what a replica has decided is still on its way
    yield urls | {"other": str(folder / "other"), "public": publics["other"]}
    assert {name: num_entries(urls[name]) for name in before} == before, "nobody who was refused has written"
    newest = min(counted(first))
    until(lambda: min(counted(first)) > newest, first)
    first.vanish()
    keyed.vanish()


def num_entries(url: str) -> int:
    return len(list(Path(url, "log").iterdir()))


def another_model() -> nn.Module:
    model = new_model()
    with torch.no_grad():
        model.blocks[0].bias += 1
    return model


JOINERS: list[tuple[str, dict[str, Any], str]] = [
    ("plain", {"model": another_model()}, 'in initial parameters .*: the run has "[0-9a-f]*", and this'),
    ("plain", {"sync_every": 8}, "in sync_every: the run has 6, and this replica 8"),
    ("plain", {"wire": "e3m0"}, 'in wire: the run has "fp32", and this replica "e3m0'),
    ("plain", {"error_feedback": 0.5}, "in error feedback: the run has null, and this replica 0.5"),
    ("plain", {"facts": {"lr": 1}}, "in lr: the run has null, and this replica 1"),
    ("plain", {"quorum": "all"}, "quorum=all, and the run was created with quorum=majority: leave it out"),
    (
        "plain",
        {"key": "OTHER"},
        "the run was created without keys, and this replica has one: leave",
    ),
    ("keyed", {}, "the run asks for a key: set DILOCO_KEY to this replica's key file, which diloco keys new"),
    ("keyed", {"key": "OTHER"}, "its creator allows it by diloco keys allow .*keyed-run PUBLIC"),
    ("changed", {}, r"entry [56] of the log "),
]


@pytest.mark.parametrize(("run", "arguments", "sentence"), JOINERS)
def test_a_joiner(run: str, arguments: dict, sentence: str, runs: dict[str, str]) -> None:
    asked = {name: runs["other"] if value == "OTHER" else value for name, value in arguments.items()}
    with pytest.raises(DilocoError, match=sentence.replace("PUBLIC", runs["public"])) as refusal:
        Replica(runs[run], name="other", **asked)
    assert "\n" not in str(refusal.value)


def test_a_join_is_tried_once(runs: dict[str, str]) -> None:
    exchange, model = diloco.StoreRendezvous(runs["plain"], name="b"), new_model()
    build = partial(diloco.StreamingDiLoCo, model, fragments="whole", rendezvous=exchange)
    for sentence in ("differs from the run in", "has joined already"):
        with pytest.raises(UserError, match=sentence):
            build()
    exchange.abort("the test is over")


FACTS: list[dict[str, Any]] = [
    {"wire": "fp8"},
    {"seed": "x"},
    {"shape, fragment and place of parameter x": [[3], 0, 9]},
    {"shape, fragment and place of parameter x": 3},
    {"outer rule's momentum": 2.0},
    {"combine": "reduce_scatter"},
    {"combine": "broadcast"},
]


@pytest.mark.parametrize("facts", FACTS, ids=str)
def test_facts_that_are_no_runs(facts: dict[str, Any], tmp_path) -> None:
    run = Handwritten(tmp_path / "run", facts=facts)
    with pytest.raises(FileError, match=re.escape("entry 0 of the log does not describe a run")):
        replayed(str(run.directory))


def test_a_directory_that_can_not_be_read_is_not_said_to_hold_no_run(tmp_path, monkeypatch):
    def stale(path: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "is_file", stale)
    with pytest.raises(UserError, match="can't be read: Stale file handle"):
        open_run(str(tmp_path))
