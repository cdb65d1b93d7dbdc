"""Every argument that an exchange refuses, and the sentence."""

import socket
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from tests.exchange.test_encrypted import SECRET, certify
from tests.ports import free_port

import diloco
from diloco.exchange.process_group import ProcessGroupExchange

PLACE = {"address": "127.0.0.1:1", "replica": 0, "num_replicas": 2}
NUMBERS = [
    *(("timeout_seconds", value) for value in (0, float("inf"), float("nan"), "5", 1e15, None)),
    *(("num_connections", value) for value in (0, 1.5, "2")),
]
"""Arguments that mean nothing, of every exchange."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "address=None must be host:port of replica 0, .*: give it, or set DILOCO_ADDRESS"),
        ({"address": "host"}, "address=host must be host:port"),
        *(
            ({"address": f"127.0.0.1:{port}"}, rf"address=127\.0\.0\.1:{port} must be host:port")
            for port in ("", "0", "99999", "²", "٣", "-1", "1_0")
        ),
        ({"address": "host:1"}, "replica=None must be a whole number: give it, or set DILOCO_REPLICA"),
        (PLACE | {"replica": 2}, "replica=2 must be from 0 to below num_replicas=2"),
        *((PLACE | {name: value}, f"{name}=.* must be a") for name, value in NUMBERS),
        (PLACE | {"address": "192.0.2.1:1"}, "it must run on that host"),
        *(
            (PLACE | {"address": address}, "is no place to reach: give the address of replica 0's machine")
            for address in ("0.0.0.0:1", "[::]:1")
        ),
        (
            PLACE | {"secret": "hunter2"},
            r"secret has 7 characters and must have at least 16.*secrets.token_hex\(16\)",
        ),
        (PLACE | {"secret": SECRET, "certificates": "."}, "give secret or certificates, not both"),
        (
            PLACE | {"certificates": "nowhere"},
            "certificates=nowhere: tls.crt is missing; the directory holds tls.crt, tls.key",
        ),
    ],
)
def test_connect(arguments, message):
    with pytest.raises(diloco.UserError, match=message):
        diloco.connect(**arguments)


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            diloco.UserError,
            match=f"replica 0 can't listen at address=127.0.0.1:{port} .*in use.*a port of its own",
        ):
            diloco.connect(f"127.0.0.1:{port}", replica=0, num_replicas=2)


def test_files_that_are_no_certificates(tmp_path):
    certify(tmp_path, ["a"])
    (tmp_path / "a" / "tls.key").write_text("rubbish")
    with pytest.raises(diloco.UserError, match=r"tls.crt, tls.key, ca.crt can't be used"):
        diloco.connect(**PLACE, certificates=tmp_path / "a")


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({name: value}, f"{name}=.* must be a") for name, value in NUMBERS),
        ({"group": 3}, "group=3 is no process group that has this process"),
    ],
)
def test_a_process_group(arguments, message):
    with pytest.raises(diloco.UserError, match=message):
        ProcessGroupExchange(**arguments)


def test_no_process_group():
    with pytest.raises(diloco.UserError, match=r"init_process_group first; .* meet with diloco\.connect"):
        ProcessGroupExchange()
