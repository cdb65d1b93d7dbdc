"""The errors that diloco raises on purpose; any other exception but OSError is a bug, and shows its traceback."""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager


class DilocoError(Exception):
    """An expected failure; its message is one sentence that says what to do."""

    exit_code: int = 1
    """Exit code of a command that ends with this error."""
    fields: tuple[str, ...] = ()
    """The dotted names of the settings in the message, the one at fault first."""

    def spelled(self, spell: Callable[[str], str]) -> str:
        """The message with each of `fields` written as `spell` writes it: a command line's flags.

        A field is rewritten where it stands alone: not inside a longer name or a path, nor as a setting's value.
        """
        if not self.fields:
            return str(self)
        names = "|".join(map(re.escape, sorted(self.fields, key=len, reverse=True)))
        alone = rf"(?<![\w./=-])(?:{names})(?![\w./-]*\w)"
        return re.sub(alone, lambda match: spell(match[0]), str(self))


class UserError(DilocoError, ValueError):
    """A user's mistake: a setting, a file or a model that diloco can't work with.

    Args:
        message: one sentence; it writes settings as the library does, such as `diloco.sync_every=0`.
        fields: the dotted names of the settings in the message, the one at fault first.

    >>> error = UserError("num_tokens=7 is too few: take 4096", "num_tokens")
    >>> error.field
    'num_tokens'
    >>> error.spelled(lambda field: "--" + field.replace("_", "-"))
    '--num-tokens=7 is too few: take 4096'
    """

    exit_code = 2

    def __init__(self, message: str, *fields: str) -> None:
        super().__init__(message)
        self.fields = fields

    @property
    def field(self) -> str | None:
        """The setting at fault; None where none is."""
        return self.fields[0] if self.fields else None


@contextmanager
def setting(field: str, value: object) -> Iterator[None]:
    """Name a setting and its value in a refusal that names none.

    >>> with setting("wire", "fp8"):
    ...     raise UserError("it is not a codec")
    Traceback (most recent call last):
    diloco.errors.UserError: wire=fp8: it is not a codec
    """
    try:
        yield
    except UserError as error:
        if error.fields:
            raise
        raise UserError(f"{field}={value}: {error}", field) from None


def nearest(word: str, choices: Iterable[str]) -> str:
    """A question after a name that is not known: the choice that it was meant for; nothing where none is near.

    >>> nearest("metod", ["name", "method"])
    ': did you mean method?'
    """
    matches = difflib.get_close_matches(word, list(choices), n=1)
    return f": did you mean {matches[0]}?" if matches else ""


def listed(names: Sequence[object], most: int = 8) -> str:
    """The first of many names, and how many more there are.

    >>> listed(["a", "b"]), listed(["a", "b", "c", "d"], most=2)
    ('a, b', 'a, b and 2 more')
    """
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def printable(text: str) -> str:
    """A text as a terminal may show it, which obeys control characters, or reorders letters: U+FFFD for each.

    >>> printable("a\\tb\\n\\x1b]0;title\\x07")
    'a\\tb\\n\ufffd]0;title\ufffd'
    """
    return _CONTROLS.sub("\ufffd", text)


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class MissingLibraryError(UserError, ImportError):
    """An optional library is not installed."""


class NonFiniteError(DilocoError, FloatingPointError):
    """An outer gradient holds NaN or infinity; it was not sent."""

    exit_code = 2


class TrainingError(UserError):
    """Training can't go on with these settings: the loss is not finite, or memory ran out."""


class DisagreementError(UserError):
    """The replicas differ in a setting or a value that they must share."""


class FileError(UserError):
    """A file can't be read: it is missing, cut short, or holds what diloco would not have written."""


class CheckpointError(FileError):
    """A checkpoint can't be read."""


class FileWriteError(DilocoError, OSError):
    """A file can't be written: the disk is full, or the place is not writable."""


class CheckpointWriteError(FileWriteError):
    """A checkpoint can't be written."""


class PayloadError(DilocoError, ValueError):
    """A payload is too short, too long, from another codec, or damaged."""


class ExchangeError(DilocoError, RuntimeError):
    """Payloads of some replicas did not arrive; a gloo process group can't be used afterwards.

    Args:
        message: fragment, round, and the missing replicas.
        missing: the replicas whose payload is missing.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing
        """The replicas whose payload is missing."""


class ReplicaFailedError(DilocoError):
    """A replica ended before the run did.

    Args:
        message: the replica's own message, or how it ended.
        exit_code: the replica's own, or 1.
        fields: the settings in the message.
    """

    def __init__(self, message: str, *, exit_code: int = 1, fields: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.fields = fields


class Stopped(KeyboardInterrupt):
    """The end of a run by a signal; no failure, of which others must hear.

    Args:
        message: the signal, and what is saved.
        exit_code: of a command that ends with it.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def exit_code_of(error: BaseException) -> int | None:
    """The exit code of a command that ends with an error; None for a bug, which shows its traceback."""
    if isinstance(error, DilocoError | Stopped):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    return DilocoError.exit_code if isinstance(error, OSError) else None
