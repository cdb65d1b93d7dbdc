"""`diloco follow`: keep a directory current with the versions that somebody publishes."""

import sys
import threading
from pathlib import Path
from typing import Annotated

import tyro

from diloco.cli._command import call
from diloco.errors import UserError
from diloco.integrations.serving import InferenceServer, ServerError

HELP = "keep a directory current with published versions: diloco follow URL --to DIR [--once] [--notify SERVER]"
ORDER = 13


def run(arguments: list[str]) -> None:
    """Follow what a command line names."""
    call(_follow, arguments, prog="diloco follow")


def _follow(
    url: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="URL")],
    to: Path,
    once: bool = False,
    notify: tuple[str, ...] = (),
    public_key: tuple[str, ...] = (),
    timeout_seconds: float = 600.0,
) -> None:
    """Write each new version to DIR/version-N in the format of transformers, and have DIR/current lead to it.

    It goes on until Ctrl-C, and when it is started again it goes on from what the directory holds.

    Args:
        url: The publisher's place: a directory, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix.
        to: Directory that is kept current; it is made if it is not there.
        once: Write the newest version, and end.
        notify: Servers that load each version from DIR, which they see under the same path, such as
            sglang:http://127.0.0.1:30000, or vllm:http://127.0.0.1:8000 where VLLM_SERVER_DEV_MODE=1 started it.
            One that fails is told the next version, too. Its key is in DILOCO_SERVER_KEY.
        public_key: Keys of which one has signed every version, as `diloco keys show` prints them; left out,
            signatures are not checked.
        timeout_seconds: How long the store may give no answer.
    """
    from diloco.publishing.directories import FollowedDirectory
    from diloco.publishing.follower import Follower

    directory, servers = FollowedDirectory(to), [InferenceServer.of(server) for server in notify]
    with Follower(url, public_key=public_key or None, timeout_seconds=timeout_seconds) as follower:
        if (held := directory.resume(follower)) and not once:
            _load(servers, directory.current, held.number, once)
        if once and follower.update() is None and follower.version is None:
            raise UserError(f"{url} has no version yet: start its publisher first", "url")
        for version in [follower.version] if once else follower:
            assert version is not None, "a version is held"
            if version != held:
                directory.write(version, follower.state, {name: follower.file(name) for name in version.files})
            facts = f"version {version.number}, step {version.step}, {version.digest:.16}"
            print(f"{facts}: {directory.current}", flush=True)
            _load(servers, directory.current, version.number, once)


def _load(servers: list[InferenceServer], directory: Path, number: int, once: bool) -> None:
    """Let all servers load a version at the same time: the others do not wait for one that does not answer."""
    errors = list[ServerError]()

    def load(server: InferenceServer) -> None:
        try:
            server.load(directory, number)
            print(f"version {number}: loaded by {server.url}", flush=True)
        except ServerError as error:
            errors.append(error)
            if not once:
                print(f"{error}: the next version is tried", file=sys.stderr, flush=True)

    threads = [threading.Thread(target=load, args=(server,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if once and errors:
        raise errors.pop()  # a list in which it stays would keep alive what the frames here hold
