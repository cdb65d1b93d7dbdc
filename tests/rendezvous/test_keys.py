import os

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from diloco.errors import UserError
from diloco.rendezvous.log.keys import ForgedError, Signer, check, signer_of_environment, write_key


@pytest.fixture
def path(tmp_path):
    write_key(tmp_path / "diloco.key")
    return tmp_path / "diloco.key"


def test_a_signature_holds_for_its_message_and_key_alone(path, tmp_path):
    signer = Signer.of_file(path)
    other = write_key(tmp_path / "other.key")
    signature = signer.sign(b"a message")
    check(signer.public, signature, b"a message", source="entry 7")
    swapped = signature[64:] + signature[:64]
    for public, mark, message in [
        (signer.public, signature, b"another message"),
        (other, signature, b"a message"),
        (signer.public, swapped, b"a message"),
        (signer.public, signature.upper(), b"a message"),
        (signer.public, signature + "\n", b"a message"),
        (signer.public, " " + signature, b"a message"),
        (signer.public, signature[:-2], b"a message"),
        (signer.public, "é" * 128, b"a message"),
        ("0" * 63, signature, b"a message"),
    ]:
        with pytest.raises(ForgedError, match="entry 7 is forged: its signature is not that of the key"):
            check(public, mark, message, source="entry 7")


def test_a_signature_for_another_program_is_worth_nothing(path):
    signer = Signer.of_file(path)
    plain = signer._key.sign(b"a message").hex()
    with pytest.raises(ForgedError, match="is forged"):
        check(signer.public, plain, b"a message", source="entry 7")
    # Nor is one of ours worth anything elsewhere: the same library verifies it over the longer message alone.
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer.public))
    key.verify(bytes.fromhex(signer.sign(b"a message")), b"diloco log 1\na message")


def test_without_keys_nothing_is_signed(path):
    assert Signer().public == Signer().sign(b"a message") == ""
    check("", "", b"a message", source="entry 7")
    with pytest.raises(ForgedError, match="entry 7 is signed, in a run without keys"):
        check("", Signer.of_file(path).sign(b"a message"), b"a message", source="entry 7")
    with pytest.raises(ForgedError, match="entry 7 is not signed: it should be by the key"):
        check(Signer.of_file(path).public, "", b"a message", source="entry 7")


def test_a_key_file_is_its_owners_alone_whatever_the_umask(tmp_path):
    umask = os.umask(0)
    try:
        public = write_key(tmp_path / "diloco.key")
    finally:
        os.umask(umask)
    assert (tmp_path / "diloco.key").stat().st_mode & 0o777 == 0o600
    assert Signer.of_file(tmp_path / "diloco.key").public == public != write_key(tmp_path / "another.key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_a_key_that_others_have_rights_to_is_refused(path, mode):
    path.chmod(mode)
    with pytest.raises(UserError, match=rf"by others \(mode {mode:04o}\): run chmod 600 .*diloco.key"):
        Signer.of_file(path)


def test_a_key_is_never_overwritten(path):
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"diloco\.key exists already: name a new file"):
        write_key(path)
    assert path.read_bytes() == before


def test_what_is_no_key_is_refused(path, tmp_path):
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    form = Encoding.PEM, PrivateFormat.PKCS8
    for text in (
        b"",
        b"\xff" * 100,
        path.read_bytes()[:60],
        X25519PrivateKey.generate().private_bytes(*form, NoEncryption()),
        Ed25519PrivateKey.generate().private_bytes(*form, BestAvailableEncryption(b"secret")),
        b"-----BEGIN PRIVATE KEY-----\n" * 10_000,
    ):
        path.write_bytes(text)
        with pytest.raises(UserError, match="is no key of diloco's: make one with diloco keys new"):
            Signer.of_file(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, reason in (("pipe", "is not a file"), ("missing", "can't be read: No such file")):
        with pytest.raises(UserError, match=f"{name} {reason}"):
            Signer.of_file(tmp_path / name)


def test_the_environment_names_the_key(path, monkeypatch):
    monkeypatch.delenv("DILOCO_KEY", raising=False)
    assert signer_of_environment().public == ""
    monkeypatch.setenv("DILOCO_KEY", str(path))
    assert signer_of_environment().public == Signer.of_file(path).public
