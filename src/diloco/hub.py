"""The Hugging Face Hub: a short check that it answers, files from it, and folders to it."""

import os
import re
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from diloco.errors import UserError
from diloco.files import requiring

_MOST_SECONDS = 5.0
_OFFLINE = "HF_HUB_OFFLINE"


def endpoint() -> str:
    """The address of the Hub, or of its mirror that HF_ENDPOINT names."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def is_offline() -> bool:
    """True where the Hub's libraries were told to use no network."""
    return os.environ.get(_OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE")


def check_reachable(wanted: str) -> None:
    """Refuse at once what only the Hub has, where it does not answer: its libraries try for a minute and more.

    Args:
        wanted: what is to be read from it.

    Raises:
        UserError: if it does not answer within seconds.
    """
    if is_offline():  # then the libraries take what they have kept, or say at once that they have not
        return
    if reason := _silence():
        raise UserError(
            f"{wanted} can't be read: the Hugging Face Hub does not answer at {endpoint()} ({reason}): name files "
            f"of this machine, or set {_OFFLINE}=1 to read what was downloaded before"
        )


def check_online(field: str, value: str) -> None:
    """Refuse a setting that needs the Hub to answer, where it does not, or where nobody may ask it.

    Raises:
        UserError: naming the setting.
    """
    if is_offline():
        raise UserError(f"{field}={value}, but {_OFFLINE} forbids to ask the Hub: unset it", field)
    if reason := _silence():
        raise UserError(
            f"{field}={value} needs the Hugging Face Hub, which does not answer at {endpoint()} ({reason})", field
        )


def _silence() -> str:
    """The reason why the Hub does not answer; empty if it does."""
    try:
        urlopen(Request(endpoint(), method="HEAD"), timeout=_MOST_SECONDS).close()
    except HTTPError:
        return ""  # an answer
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        return getattr(reason, "strerror", None) or str(reason)
    return ""


def not_here(name: str) -> UserError:
    """The refusal of what the Hub's libraries have not kept, and may not download."""
    return UserError(
        f"{name} was not downloaded to this machine before, and {_OFFLINE} forbids it now: unset that, or name "
        "files of this machine"
    )


def hub_file(name: str, files: tuple[str, ...]) -> Path | None:
    """The first of `files` that a repository of the Hub has, kept by the Hub's library from then on.

    Args:
        name: of the repository, such as gpt2 or EleutherAI/pythia-70m.
        files: names of files in it.

    Returns:
        Its path here; None if no repository can have this name.

    Raises:
        UserError: if the Hub does not answer, or has no such repository, or not for you.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name):
        return None
    with requiring("huggingface_hub", extra="train"):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RemoteEntryNotFoundError

    for file in files:
        try:
            return Path(hf_hub_download(name, file, local_files_only=True))
        except LocalEntryNotFoundError:
            continue
        except HFValidationError:
            return None
    if is_offline():
        raise not_here(name)
    check_reachable(f"{name} of the Hub")
    for file in files:
        try:
            return Path(hf_hub_download(name, file, endpoint=endpoint()))
        except RemoteEntryNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise UserError(f"{name} can't be read from the Hub: {str(error).splitlines()[0]}") from error
    raise UserError(f"{name} on the Hub has none of {', '.join(files)}")


def push(folder: Path, name: str) -> str:
    """Upload the files of a folder to a model's repository of the Hub; a new one is made, and is private.

    Args:
        folder: of the files.
        name: of the repository, such as me/my-model.

    Returns:
        The address of the repository.

    Raises:
        UserError: if the Hub does not answer, or refuses; `hf auth login` says who you are.
    """
    with requiring("huggingface_hub", extra="train"):
        from huggingface_hub import HfApi

    check_online("push_to_hub", name)
    hub = HfApi(endpoint=endpoint())
    try:
        address = hub.create_repo(name, private=True, exist_ok=True)
        hub.upload_folder(repo_id=address.repo_id, folder_path=folder)
    except Exception as error:  # a connection that breaks is an error of the library's own library
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{folder} can't be uploaded to {name}: {reason}; it is written, and hf upload {name} {folder} tries "
            "again"
        ) from error
    return str(address)
