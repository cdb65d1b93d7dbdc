"""Every error that diloco raises on purpose; any other exception is a bug, and shows its traceback."""

import re
from collections.abc import Callable
from typing import ClassVar


class DilocoError(Exception):
    """Something that can be expected to go wrong; its message is one sentence that says what to do."""

    exit_code: ClassVar[int] = 1
    """Exit code of a command that ends with this error."""


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
        super().__init__(message, *fields)
        self.fields = fields
        """The settings in the message, the one at fault first; none where no setting is at fault."""

    def __str__(self) -> str:
        return self.args[0]

    @property
    def field(self) -> str | None:
        """The setting at fault."""
        return self.fields[0] if self.fields else None

    def spelled(self, spell: Callable[[str], str]) -> str:
        """The message with each of `fields` written as `spell` writes it: a command line's flags."""
        if not self.fields:
            return str(self)
        names = "|".join(map(re.escape, sorted(self.fields, key=len, reverse=True)))
        return re.sub(rf"(?<![\w.-])(?:{names})(?![\w.]*\w)", lambda match: spell(match[0]), str(self))


class NonFiniteError(UserError):
    """An outer gradient holds NaN or an infinity; nothing of it was sent."""


class TrainingError(UserError):
    """Training can't go on with these settings: the loss is not finite, or memory does not suffice."""


class DisagreementError(UserError):
    """The replicas differ in something that they must agree on."""


class CheckpointError(UserError):
    """A checkpoint can't be read."""


class CheckpointWriteError(DilocoError, OSError):
    """A checkpoint can't be written."""


class PayloadError(DilocoError, ValueError):
    """A payload is not what the codec makes: cut short, too long, of another codec, or damaged."""


class ExchangeError(DilocoError, RuntimeError):
    """Some replicas' payloads did not arrive; on gloo, the process group is of no use after that.

    Args:
        message: fragment, round, and who is missing.
        missing: the replicas whose payload is missing.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message, missing)
        self.missing = missing
        """The replicas whose payload is missing."""

    def __str__(self) -> str:
        return self.args[0]


class ReplicaFailedError(DilocoError):
    """A replica ended before the run did.

    Args:
        message: what the replica said, or how it ended.
        exit_code: the replica's own, or 1.
    """

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # pyright: ignore[reportAttributeAccessIssue]
