"""`diloco keys`: the keys of replicas that meet in a store, and the list of those that may join a run."""

import asyncio
import re
import sys
from pathlib import Path
from typing import Annotated, TypeAlias

import tyro

from diloco.cli._command import choose
from diloco.errors import DilocoError, UserError
from diloco.files import expanded
from diloco.rendezvous.log.entries import Keys
from diloco.rendezvous.log.keys import VARIABLE, Signer, signer_of_environment, write_key
from diloco.rendezvous.log.log import Log, first_entry, open_run
from diloco.rendezvous.log.run import RunState
from diloco.rendezvous.store import Store

HELP = "keys of a run in a store: diloco keys new [FILE] | show FILE | allow URL KEY … | revoke URL KEY …"
ORDER = 12
_MOST_RACES = 100
"""Entries that others may write first."""
_PATIENCE_SECONDS = 60.0
"""Longest outage of the store that a command waits out."""
_URL: TypeAlias = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="URL")]
_Keys: TypeAlias = Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="KEY …")]


def run(arguments: list[str]) -> None:
    """Make or show a key, or change who may join a run."""
    commands = {"new": _new, "show": _show, "allow": _allow, "revoke": _revoke}
    choose(commands, arguments, prog="diloco keys")


def _new(file: tyro.conf.Positional[Path] = Path("diloco.key")) -> None:
    """Write a new private key to a file of your own, and print its public key.

    Args:
        file: A new file.
    """
    file = expanded(file)
    public = write_key(file)
    print(public)
    print(
        f"diloco: keep {file} to yourself, and set {VARIABLE}={file.absolute()} for the replica; "
        f"the creator of a run lets it join by: diloco keys allow URL {public}",
        file=sys.stderr,
    )


def _show(file: tyro.conf.Positional[Path]) -> None:
    """Print the public key of a file.

    Args:
        file: The file that holds the private key.
    """
    print(Signer.of_file(file).public)


def _allow(url: _URL, keys: _Keys) -> None:
    """Let the holders of keys join a run, signed with the key of its creator, which DILOCO_KEY names.

    Args:
        url: The run's store.
        keys: Public keys, as `diloco keys new` prints them.
    """
    _change(url, Keys(allowed=_checked(keys)))


def _revoke(url: _URL, keys: _Keys) -> None:
    """Shut the holders of keys out of a run, signed with the key of its creator, which DILOCO_KEY names.

    What they have uploaded, and others have counted, stays counted.

    Args:
        url: The run's store.
        keys: Public keys.
    """
    _change(url, Keys(revoked=_checked(keys)))


def _checked(keys: tuple[str, ...]) -> tuple[str, ...]:
    if not keys:
        raise UserError("name at least one public key, as diloco keys show prints it")
    for key in keys:
        if not re.fullmatch("[0-9a-f]{64}", key):
            raise UserError(
                f"{key!r:.100} is no public key of 64 hexadecimal digits, as diloco keys show prints it"
            )
    return tuple(dict.fromkeys(keys))


def _change(url: str, change: Keys) -> None:
    signer = signer_of_environment()
    if not signer.public:
        raise UserError(f"set {VARIABLE} to the key file of the run's creator, who alone changes who may join")
    number, state = asyncio.run(_changed(open_run(url), signer, change))
    done = "nothing to change" if number is None else f"written as entry {number} of the log"
    print(f"{done}; {len(state.allowed)} key{'s' * (len(state.allowed) != 1)} may join the run:")
    for key in state.allowed:
        print(key)


async def _changed(store: Store, signer: Signer, change: Keys) -> tuple[int | None, RunState]:
    """Write a change of the allow-list; the number of its entry, or None if nothing changes, and the new state."""
    _, first = await first_entry(store)
    log = Log(store, first, signer, patience_seconds=_PATIENCE_SECONDS)
    _check_creator(log.state, signer)
    for _ in range(_MOST_RACES):
        await log.read_all()
        await log.check_no_gap()  # an entry that was deleted: what is written into its place would be another log
        if log.state.closed:
            raise UserError("the run is closed: nobody can join it any more, and its list of keys stays as it is")
        allowed = log.state.allowed
        known = {*allowed, *(member.key for member in log.state.members)}
        if unknown := [key for key in change.revoked if key not in known]:
            raise UserError(f"the key {unknown[0]} is not among those that may join the run")
        if {*allowed, *change.allowed} - {*change.revoked} == {*allowed}:
            return None, log.state
        (number, _), is_own = await log.append(change, author=-1)
        if is_own:
            return number, log.state
    raise DilocoError(f"the replicas wrote each of the next {_MOST_RACES} entries of the log first: try again")


def _check_creator(state: RunState, signer: Signer) -> None:
    if not state.creator:
        raise UserError(
            "the run was created without keys, and trusts everybody who can write to its store: to choose who may "
            f"join, create a new run with {VARIABLE} set"
        )
    if state.creator != signer.public:
        raise UserError(
            f"the run's creator has the key {state.creator}, and {VARIABLE} names that of {signer.public}: "
            "the creator alone changes who may join"
        )
