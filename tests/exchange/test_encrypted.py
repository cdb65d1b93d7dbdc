"""Exchanges with a secret or certificates: the same bits as over gloo, and only for those who have them."""

import logging
import os
import socket
import time
from datetime import datetime
from ipaddress import IPv4Address, IPv6Address
from itertools import product
from pathlib import Path

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from tests.exchange.test_connect import (
    CASE,
    SHARES,
    error_of_connect,
    train_connected,
)
from tests.exchange.test_notices import fail
from tests.exchange.test_process_group import assert_named, exchange_out_of_order, wait_in_vain
from tests.ports import free_port
from tests.processes import run_replicas
from tests.sockets import listening

import diloco
from diloco.exchange.encrypted import tls
from diloco.exchange.transport import Channel, Tag

SECRET = "correct horse battery staple"
SIZES = (0, 1, 7, 65_537, 3 << 20, (5 << 20) + 3)
LENGTHS = {key: SIZES[key[0]] for key in product(range(len(SIZES)), (1, 90_000), (0, 1))}
"""Lengths of payloads by (fragment, round, phase)."""


def secretly(function, *arguments):
    tls._COST["n"] = 1 << 10  # the tests of peers take the whole time
    os.environ["DILOCO_SECRET"] = SECRET
    return function(*arguments)


@pytest.mark.parametrize(
    ("case", "num_replicas", "num_connections"),
    [(SHARES, 2, 2), pytest.param(CASE, 3, 1, marks=pytest.mark.slow)],
)
def test_replicas_with_a_secret_train_as_without(case, num_replicas, num_connections):
    arguments = (train_connected, case, num_connections)
    encrypted = run_replicas(secretly, num_replicas, *arguments, joined=False)
    assert set(encrypted) == set(run_replicas(*arguments[:1], num_replicas, *arguments[1:], joined=False))


def test_messages_of_any_size_arrive_whole_in_whatever_order():
    assert run_replicas(secretly, 2, exchange_out_of_order, 2, LENGTHS, joined=False) == [{1}, {0}]


@pytest.mark.slow
def test_a_failure_is_told_at_once():
    *others, message = run_replicas(secretly, 3, fail, "not finite", "gather", joined=False)
    for other in others:
        assert message in other and "replica 2 failed" in other


@pytest.mark.parametrize(("absent", "ending"), [(1, "dies meanwhile"), (1, "silent"), (0, "dies meanwhile")])
def test_an_absent_replica_is_named_within_the_time_limit(absent, ending, tmp_path):
    arguments = (wait_in_vain, absent, ending, str(tmp_path))
    results = run_replicas(secretly, 3, *arguments, mortal=(absent,), joined=False)
    assert_named(absent, results)
    message, _ = results[2]
    assert ("nothing came or went within" in message) == (ending == "silent")


def prove_something_else(folder: str, secrets: list[str | None]) -> str:
    """The error of a replica that has another secret than replica 0."""
    replica = int(os.environ["DILOCO_REPLICA"])
    if secrets[0] is None:
        tls.SECONDS_TO_SHAKE_HANDS = 0.5  # nobody will
    logging.basicConfig(filename=f"{folder}/{replica}", force=True)
    seconds = 20.0
    if secrets[replica] is None and replica == 1:
        host, _, port = os.environ["DILOCO_ADDRESS"].rpartition(":")
        wait_until_somebody_listens(host, int(port))
        seconds = 0.5  # of torch's store for an answer
    return error_of_connect(folder, seconds=seconds, secret=secrets[replica])


def wait_until_somebody_listens(host: str, port: int) -> None:
    while True:
        try:
            return socket.create_connection((host, port), timeout=5).close()
        except OSError:
            time.sleep(0.01)


def test_another_secret_is_named_on_both_sides(tmp_path):
    first, other = run_replicas(prove_something_else, 2, str(tmp_path), [SECRET, SECRET + "r"], joined=False)
    assert "has another secret (DILOCO_SECRET): give all replicas the same" in other
    assert "replica 1 did not arrive" in first and "has another secret (DILOCO_SECRET)" in first
    assert "refused a connection: a process at 127.0.0.1 has another secret" in Path(tmp_path, "0").read_text()


@pytest.mark.slow
def test_a_secret_on_one_side_alone_is_named(tmp_path):
    for name in ("without", "alone"):
        (tmp_path / name).mkdir()
    _, without = run_replicas(prove_something_else, 2, str(tmp_path / "without"), [SECRET, None], joined=False)
    assert "give this replica the same secret (DILOCO_SECRET)" in without
    _, alone = run_replicas(prove_something_else, 2, str(tmp_path / "alone"), [None, SECRET], joined=False)
    assert "gave no answer" in alone and "secret (DILOCO_SECRET)" in alone


def listen_in_vain() -> set[tuple[IPv4Address | IPv6Address, int]]:
    """The addresses and ports on which this process listens while it exchanges."""
    exchange = diloco.connect(timeout_seconds=20)
    exchange.start({1 - exchange.replica: torch.ones(9, dtype=torch.uint8)}, Tag(Channel.PAYLOAD, 0, 1)).wait()
    places = listening(os.getpid())
    exchange.start({1 - exchange.replica: torch.ones(9, dtype=torch.uint8)}, Tag(Channel.PAYLOAD, 0, 2)).wait()
    exchange.close()
    return places


def test_each_process_listens_on_one_port_of_one_interface():
    for places in run_replicas(secretly, 2, listen_in_vain, joined=False):
        ((address, _),) = places
        assert str(address) == "127.0.0.1"


def certify(folder: Path, names: list[str]) -> None:
    """A directory of certificates for each name, of an authority of their own."""
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"authority in {folder.name}")])

    def certificate(name: x509.Name, key: ec.EllipticCurvePrivateKey, is_authority: bool) -> bytes:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(authority_name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime(2000, 1, 1))
            .not_valid_after(datetime(2200, 1, 1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .sign(authority_key, hashes.SHA256())
            .public_bytes(Encoding.PEM)
        )

    for name in names:
        key = ec.generate_private_key(ec.SECP256R1())
        (folder / name).mkdir(parents=True)
        own_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        (folder / name / "tls.crt").write_bytes(certificate(own_name, key, False))
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (folder / name / "tls.key").write_bytes(private)
        (folder / name / "ca.crt").write_bytes(certificate(authority_name, authority_key, True))


def exchange_with_certificates(folders: list[str]) -> str:
    exchange = diloco.connect(certificates=folders[int(os.environ["DILOCO_REPLICA"])], timeout_seconds=20)
    theirs = exchange.start(
        {1 - exchange.replica: torch.full((3,), exchange.replica, dtype=torch.uint8)}, Tag(Channel.PAYLOAD, 0, 1)
    ).wait()
    return str({replica: payload.tolist() for replica, payload in theirs.items()})


def prove_another_authority(folder: str, folders: list[str]) -> str:
    return error_of_connect(folder, certificates=folders[int(os.environ["DILOCO_REPLICA"])])


def test_certificates_of_one_authority_take_the_place_of_a_secret(tmp_path):
    certify(tmp_path / "ours", ["a", "b"])
    certify(tmp_path / "theirs", ["a"])
    ours = [str(tmp_path / "ours" / name) for name in "ab"]
    alike = run_replicas(exchange_with_certificates, 2, ours, joined=False)
    assert alike == ["{1: [1, 1, 1]}", "{0: [0, 0, 0]}"]
    mixed = [ours[0], str(tmp_path / "theirs" / "a")]
    _, other = run_replicas(prove_another_authority, 2, str(tmp_path), mixed, joined=False)
    assert "has another authority of certificates (DILOCO_CERTIFICATES)" in other


def test_an_address_that_others_reach_without_a_secret_is_warned_of(caplog, monkeypatch):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no network")
        own_address = probe.getsockname()[0]
    for _ in range(2):
        with caplog.at_level(logging.WARNING), pytest.raises(diloco.ExchangeError):
            diloco.connect(f"{own_address}:{free_port()}", replica=0, num_replicas=2, timeout_seconds=0.1)
    warnings = [message for message in caplog.messages if "can read this run and join it" in message]
    assert len(warnings) == 1 and own_address in warnings[0]
