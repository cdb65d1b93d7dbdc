"""Documents of text, streamed from the standard library, from files, or from the Hugging Face Hub.

Those of a config come in the order in which they are packed, each in its split.
"""

import hashlib
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, TypeVar

from diloco.data.config import DataConfig, as_typed
from diloco.data.readers import SUFFIXES, Document, Piece, Reading, given, suffixes_of
from diloco.data.readers import pieces as pieces_of_files
from diloco.data.shards import Split
from diloco.errors import UserError
from diloco.files import expanded, require, sha256
from diloco.hub import check_reachable, is_offline, not_here


def documents(source: str, reading: Reading = Reading()) -> Iterator[Document]:  # noqa: B008
    """Stream the documents of `source`, always in the same order.

    `source` is one of

    - `stdlib`: each module of the running Python's standard library, tests left out;
    - a file, a glob (`~` and `**` are understood), or a directory, which stands for all files below it that can
      be read, hidden ones left out: `.txt` (one document per file), `.jsonl`, `.csv` or `.parquet` (one per row,
      and its `id` where it has one); all but `.parquet` also as `.gz` or `.zst`; in capitals, too;
    - `hf:NAME[:CONFIG][:SPLIT]`: a dataset of the Hugging Face Hub, split `train` by default.

    Compressed text is read in pieces: a document takes a small multiple of `reading.longest_bytes` at the most.
    The libraries that read Parquet and the Hub take what a file asks for.

    Args:
        source: as above.
        reading: the field that holds a row's text, and the longest document.

    Raises:
        UserError: if nothing matches, a suffix is unknown, a file or row can't be read, or one is longer.
    """
    return chain.from_iterable(piece.documents(reading) for piece in pieces(source, reading))


def pieces(source: str, reading: Reading) -> Iterator[Piece]:
    """The documents of `source`, as `documents` gives them, in pieces that are cut alike each time.

    Raises:
        UserError: as `documents` does, but for what parsing a piece refuses.
    """
    if source == "stdlib":
        return given(_stdlib())
    if source.startswith("hf:"):
        return given(_hub(source, reading))
    root, paths = _match(source)
    return pieces_of_files(((path, path.relative_to(root).as_posix()) for path in paths), reading)


def num_bytes(source: str) -> int | None:
    """Bytes of the files of a source; None where they are not known."""
    if source == "stdlib" or source.startswith("hf:"):
        return None
    return sum(path.stat().st_size for path in _match(source)[1])


def fingerprint(source: str) -> list[Any]:
    """Facts that change with the text of `source`: Python's version, files' sizes and times, a dataset's name."""
    return _facts(source, lambda path: [path.stat().st_size, path.stat().st_mtime_ns])


def content(source: str) -> list[Any]:
    """The text of `source` wherever it lies: Python's version, each file's SHA-256, a dataset's name.

    A dataset of the Hub is taken to be as constant as its name.
    """
    return _facts(source, lambda path: [file_digest(path)])


def _facts(source: str, of_file: Callable[[Path], list[Any]]) -> list[Any]:
    if source == "stdlib":
        return [source, platform.python_version()]
    name = [source] if source.startswith("hf:") else []  # its documents are named by that
    if _is_of_the_hub(source):
        return name
    root, paths = _files(source)
    return [*name, *([path.relative_to(root).as_posix(), *of_file(path)] for path in paths)]


def parts(source: str) -> list[tuple[str, str]]:
    """The parts of a source, files by path or a dataset's split, each with its name in its documents' ids."""
    if source == "stdlib":
        return [(source, source)]
    if source.startswith("hf:"):
        return [(":".join(["hf", *(part or "" for part in _parse_hub(source))]), source)]
    root, paths = _match(source)
    return [(str(path.resolve()), path.relative_to(root).as_posix()) for path in paths]


def left_out(source: str) -> list[str]:
    """The files of a directory, hidden ones aside, that are not read, since their suffixes are not known."""
    directory = expanded(source)
    if source == "stdlib" or source.startswith("hf:") or not directory.is_dir():
        return []
    others = [path for path in _visible(directory) if suffixes_of(path) is None]
    return [path.relative_to(directory).as_posix() for path in others]


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hexadecimal; it is read again only when its size or time has changed."""
    stat = path.stat()
    return _digest_at(path.absolute(), stat.st_size, stat.st_mtime_ns)


@cache
def _digest_at(path: Path, size: int, modified_ns: int) -> str:
    return sha256(path)


def _stdlib() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if skipped.isdisjoint(relative.parts):
            try:
                text = path.read_bytes().decode()
            except UnicodeDecodeError:
                continue
            yield Document(relative.as_posix(), text)


def _hub(source: str, reading: Reading) -> Iterator[Document]:
    """The documents of a data set on the Hugging Face Hub."""
    name, config, split = _parse_hub(source)
    load_dataset = require("datasets", extra="hub").load_dataset
    if _is_of_the_hub(source):
        check_reachable(source)
    try:
        rows = enumerate(load_dataset(name, config, split=split, streaming=True), start=1)
        yield from reading.documents(rows, name=source, noun="row")
    except Exception as error:  # an unknown name, configuration or split; no network; a damaged file: of any class
        if is_offline() and "OfflineMode" in str(error):
            raise not_here(source) from error
        if "scripts are no longer supported" in str(error):
            raise UserError(
                f"source {source!r} is loaded by a script of its own, which the library `datasets` refuses: "
                "download its files and name them"
            ) from error
        fields = error.fields if isinstance(error, UserError) else ()
        raise UserError(f"source {source!r} can't be read: {error}", *fields) from error


def _is_of_the_hub(source: str) -> bool:
    """True for a dataset that does not lie here: the library takes a directory's path for a name, too."""
    return source.startswith("hf:") and not Path(_parse_hub(source)[0]).exists()


def _files(source: str) -> tuple[Path, list[Path]]:
    """The files of a source that lie here, and the directory that their names are relative to."""
    if not source.startswith("hf:"):
        return _match(source)
    root = Path(_parse_hub(source)[0])
    return root, _visible(root)


def _parse_hub(source: str) -> tuple[str, str | None, str]:
    match source.split(":")[1:]:
        case [name] if name:
            return name, None, "train"
        case [name, config] if name:
            return name, config or None, "train"
        case [name, config, split] if name and split:
            return name, config or None, split
    raise UserError(f"source {source!r} is not of the form hf:NAME[:CONFIG][:SPLIT]")


def _match(source: str) -> tuple[Path, list[Path]]:
    """The directory that ids are relative to, and the files that `source` names, sorted."""
    if not source:
        raise UserError("a source of text is empty: name a file, a directory or a glob")
    pattern = expanded(source)
    try:
        if pattern.is_dir():
            return pattern, _files_below(pattern)
        if pattern.is_file():
            root, paths = pattern.parent, [pattern]
        else:
            root = Path(*takewhile(lambda part: not set("*?[") & set(part), pattern.parts[:-1]))
            paths = sorted({path for path in _glob(root, pattern.relative_to(root).parts) if _is_file(path)})
    except (OSError, ValueError) as error:  # a directory closed to us, or a pattern that is none
        raise UserError(f"source {source!r} can't be looked up: {error}") from error
    if not paths and "://" in source:
        raise UserError(
            f"source {source!r} is a URL, and text is read from files of this machine: download it, or name a "
            "data set of the Hugging Face hub by hf:NAME"
        )
    if not paths:
        hub = "" if set("./*") & set(source) else f", or hf:{source} for that data set of the Hugging Face Hub"
        raise UserError(f"source {source!r} matches no file: name a file, or a glob such as 'texts/**/*.txt'{hub}")
    for path in paths:
        if suffixes_of(path) is None:
            raise UserError(f"{path} has none of the known suffixes: {', '.join(SUFFIXES)}")
    return root, paths


def _files_below(directory: Path) -> list[Path]:
    """The files of a directory that can be read, hidden ones left out, sorted."""
    paths = [path for path in _visible(directory) if suffixes_of(path) is not None]
    if not paths:
        raise UserError(f"the directory {directory} holds no file with a known suffix: {', '.join(SUFFIXES)}")
    return paths


def _visible(directory: Path) -> list[Path]:
    """The files of a directory, hidden ones left out, sorted."""
    return sorted(
        path
        for folder in _folders(directory)
        for path in folder.iterdir()
        if not any(part.startswith(".") for part in path.relative_to(directory).parts) and _is_file(path)
    )


def _is_file(path: Path) -> bool:
    """True for a file.

    Raises:
        FileNotFoundError: for a link of a known suffix that leads to nothing, as where a disk is not mounted.
    """
    if suffixes_of(path) is not None:
        path.stat()
    return path.is_file()


def _glob(root: Path, parts: Sequence[str]) -> Iterator[Path]:
    """The paths that match a pattern below a directory; `**` is every directory, those behind links too."""
    if "**" not in parts:
        yield from root.glob("/".join(parts))
        return
    place = parts.index("**")
    for base in root.glob("/".join(parts[:place])) if place else (root,):
        for folder in _folders(base) if base.is_dir() else ():
            yield from _glob(folder, parts[place + 1 :]) if parts[place + 1 :] else (folder,)


def _folders(directory: Path) -> Iterator[Path]:
    """A directory and those below it, behind symbolic links too, each once.

    Raises:
        OSError: if one may not be read.
    """
    seen: set[tuple[int, int]] = set()
    for folder, names, _ in os.walk(directory, onerror=_raise, followlinks=True):
        stat = Path(folder).stat()
        if (stat.st_dev, stat.st_ino) in seen:
            names.clear()
            continue
        seen.add((stat.st_dev, stat.st_ino))
        names.sort()
        yield Path(folder)


def _raise(error: OSError) -> None:
    raise error


def check_disjoint(config: DataConfig) -> None:
    """Refuse to hold out text that is trained on.

    Raises:
        UserError: with the file or dataset that is among both, or that would be held out by one name of two.
    """
    names = dict[str, str]()
    for part, name in chain.from_iterable(map(parts, config.train)):
        if names.setdefault(part, name) != name and not config.held_out:
            raise UserError(
                f"{part} is read as {names[part]} and as {name}, so that documents held out by one name would be "
                "trained on by the other: leave one out of data.train, or name data.held_out",
                *("data.train", "data.held_out"),
            )
    for source in config.held_out:
        for part, _ in parts(source):
            if part in names:
                raise UserError(
                    f"{part} is both training and held-out text: leave it out of data.held_out or data.train",
                    "data.held_out",
                    "data.train",
                )


def is_held_out_by_position(config: DataConfig) -> bool:
    """True if the end of each document is held out, since hashing ids would leave a split empty.

    The documents are read until that is known.
    """
    splits, train_bytes = set[Split](), 0
    for document in () if config.held_out else _training_documents(config, by_position=False):
        (split, _), *_ = split_parts(document, config, by_position=False)
        if document.text:
            splits.add(split)
        train_bytes += _num_bytes(document) if split == "train" else 0
        if len(splits) == 2 or (config.max_train_bytes is not None and train_bytes >= config.max_train_bytes):
            break
    return not config.held_out and len(splits) < 2


def split_documents(config: DataConfig, *, by_position: bool) -> Iterator[tuple[Split, Document]]:
    """Stream all documents of a config, each with its split, always in the same order.

    Args:
        config: names the sources.
        by_position: as `is_held_out_by_position` says.

    Raises:
        UserError: as `documents` does.
    """
    train_bytes = 0
    for document in _training_documents(config, by_position=by_position):
        for split, part in split_parts(document, config, by_position=by_position):
            yield split, part
            train_bytes += _num_bytes(part) if split == "train" else 0
        if config.max_train_bytes is not None and train_bytes >= config.max_train_bytes:
            break
    for source in config.held_out:
        for document in documents(source, reading_of(config)):
            yield "held_out", document


def _training_documents(config: DataConfig, *, by_position: bool) -> Iterator[Document]:
    def train_bytes(document: Document) -> int:
        return sum(
            _num_bytes(part)
            for split, part in split_parts(document, config, by_position=by_position)
            if split == "train"
        )

    return in_order([documents(source, reading_of(config)) for source in config.train], config, train_bytes)


_T = TypeVar("_T")


def in_order(
    streams: Sequence[Iterator[_T]],
    config: DataConfig,
    train_bytes: Callable[[_T], int],
    *,
    ended: Callable[[str], object] = lambda _: None,
) -> Iterator[_T]:
    """The documents of all training sources in the order in which they are packed.

    Without weights, that is one source after the other. With weights w, the next comes from the source that is
    furthest behind: the one with the least b / w, b being the bytes of training text that were read of it, and the
    first of several. So no source is ever ahead of its share by more than a document. The text ends with the first
    source that ends.

    Args:
        streams: one per training source, read only as far as needed.
        config: has the weights.
        train_bytes: bytes of training text in what a stream yields.
        ended: called with the source that ended the text, where there are weights.

    >>> config = DataConfig(train=("a.txt", "b.txt"), weights=(3, 1))
    >>> "".join(in_order([iter("aaaaaaa"), iter("bbb")], config, len))
    'abaaabaaab'
    """
    if not config.weights:
        yield from chain.from_iterable(streams)
        return
    read_bytes = [0] * len(streams)
    while True:
        turn = min(range(len(streams)), key=lambda i: read_bytes[i] / config.weights[i])
        try:
            item = next(streams[turn])
        except StopIteration:
            ended(config.train[turn])
            return
        read_bytes[turn] += train_bytes(item)
        yield item


def reading_of(config: DataConfig, skipped: Counter[str] | None = None) -> Reading:
    """The way in which a config reads rows; `skipped` counts those that it leaves out."""
    skipped = Counter() if skipped is None else skipped
    return Reading(config.text_field, config.max_document_bytes, skipped if config.skip_null else None)


def split_parts(document: Document, config: DataConfig, *, by_position: bool) -> list[tuple[Split, Document]]:
    """A training source's document in the split of its id, or its beginning and its end, unless empty, in a split
    each."""
    if not by_position:
        is_train = bool(config.held_out) or not is_held_out(document.id, config.held_out_fraction)
        return [("train" if is_train else "held_out", document)]
    cut = round(len(document.text) * (1 - config.held_out_fraction))
    texts: dict[Split, str] = {"train": document.text[:cut], "held_out": document.text[cut:]}
    return [(split, Document(document.id, text)) for split, text in texts.items() if text]


def _num_bytes(document: Document) -> int:
    return len(document.text.encode(errors="surrogatepass"))


def is_held_out(document_id: str, fraction: float) -> bool:
    """True for the `fraction` of all ids whose hash is lowest.

    Nothing else counts: a document stays in its split whatever is read beside it, in whatever order.
    """
    digest = hashlib.sha256(document_id.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def empty_split(config: DataConfig, split: Split) -> UserError:
    """The error for a split that no document belongs to."""
    training = (document for source in config.train for document in documents(source, reading_of(config)))
    if not config.held_out and any(document.text for document in training):
        effect, remedy = (
            ("holds out none", "raise it") if split == "held_out" else ("leaves nothing to train on", "lower it")
        )
        return UserError(
            f"data.held_out_fraction={config.held_out_fraction} {effect} of the text of "
            f"data.train={as_typed(config.train)}: {remedy}, add text, or name data.held_out",
            *("data.held_out_fraction", "data.train", "data.held_out"),
        )
    is_named = split == "held_out" and config.held_out
    name, sources = ("data.held_out", config.held_out) if is_named else ("data.train", config.train)
    return UserError(f"{name}={as_typed(sources)} holds no text: name other sources", name)
