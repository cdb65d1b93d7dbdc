"""Pieces of text, parsed, split and tokenized, by as many processes as there are cores.

They are processes, since the threads of the tokenizers library wait for each other at one cache of words.
"""

import os
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np

from diloco.data.config import DataConfig
from diloco.data.corpora import reading_of, split_parts
from diloco.data.readers import Document, Piece
from diloco.data.shards import SPLITS, Split, token_dtype
from diloco.data.tokenizers import Tokenizer, load_tokenizer
from diloco.errors import UserError
from diloco.files import num_cores

PIECES_ALONE = 8
"""Pieces up to which a text is tokenized by this process alone: others would take longer to start."""

SECONDS_OF_A_PIECE = 600.0
"""Time in which a process answers, and a second more per 100 kB; one that does not stands still."""
_BYTES_A_SECOND = 1e5

Place = tuple[int, int]
"""A piece's source and its number in it, both counted from 0."""


@dataclass(frozen=True)
class Task:
    """A piece to encode."""

    place: Place
    piece: Piece
    is_training: bool
    """False for a piece of a held-out source."""
    num_packed: Mapping[Split, int] | None
    """Documents of each split at the piece's beginning that need no tokens, since they are packed; None is all."""


@dataclass(frozen=True)
class Parts:
    """The K documents of a piece in one split, or the parts of them there; the last L need tokens."""

    document_K: np.ndarray
    """The number in the piece of each one's document: int64, rising."""
    num_bytes_K: np.ndarray
    """UTF-8 bytes of its text: int64."""
    tokens: np.ndarray
    """The tokens of the last L, a BOS before each: of the directory's dtype, shape (num_tokens,)."""
    bounds: np.ndarray
    """The token at which each of these L starts, and the number of all: int64, shape (L + 1,)."""


@dataclass(frozen=True)
class Encoded:
    """An encoded piece."""

    place: Place
    read_bytes: int
    """`Piece.read_bytes`."""
    num_documents: int
    parts: dict[Split, Parts]
    skipped: Counter[str]
    """`Reading.skipped`."""
    error: UserError | None
    """The refusal of what follows these documents in the piece."""


class Encoder:
    """Encodes pieces, in whatever process it is.

    Args:
        config: of the text.
        by_position: as `is_held_out_by_position` says.
        tokenizer: of the text.
    """

    def __init__(self, config: DataConfig, by_position: bool, tokenizer: Tokenizer) -> None:
        self._config, self._by_position, self._tokenizer = config, by_position, tokenizer
        self._dtype = token_dtype(tokenizer.vocab_size)

    def encode(self, task: Task) -> Encoded:
        """Parse, split and tokenize a piece."""
        skipped, error, num_documents = Counter[str](), None, 0
        rows: dict[Split, list[tuple[int, int, str]]] = {split: [] for split in SPLITS}
        try:
            for document in task.piece.documents(reading_of(self._config, skipped)):
                parts: list[tuple[Split, Document]] = [("held_out", document)]
                if task.is_training:
                    parts = split_parts(document, self._config, by_position=self._by_position)
                sizes = [len(utf8(part)) for _, part in parts]
                for (split, part), size in zip(parts, sizes, strict=True):
                    rows[split].append((num_documents, size, part.text))
                num_documents += 1
        except UserError as refusal:
            error = refusal
        encoded: dict[Split, Parts] = {split: self._parts(rows[split], split, task.num_packed) for split in SPLITS}
        return Encoded(task.place, task.piece.read_bytes, num_documents, encoded, skipped, error)

    def _parts(
        self, rows: list[tuple[int, int, str]], split: Split, num_packed: Mapping[Split, int] | None
    ) -> Parts:
        """The sizes of a split's documents, and the tokens of those that are not packed yet."""
        texts = [text for _, _, text in rows[num_packed.get(split, 0) :]] if num_packed is not None else []
        bos = np.array([self._tokenizer.bos_id], dtype=np.uint32)
        encoded = self._tokenizer.encode(texts) if texts else []
        tokens = np.concatenate([*chain.from_iterable((bos, ids) for ids in encoded), bos[:0]])
        return Parts(
            document_K=np.array([number for number, _, _ in rows], dtype=np.int64),
            num_bytes_K=np.array([size for _, size, _ in rows], dtype=np.int64),
            tokens=tokens.astype(self._dtype),
            bounds=np.cumsum([0, *(1 + len(ids) for ids in encoded)], dtype=np.int64),
        )


def utf8(document: Document) -> bytes:
    """The bytes of a document's text.

    Raises:
        UserError: if it has none.
    """
    try:
        return document.text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the text of document {document.id!r} can't be encoded in UTF-8: {error}") from error


class Encoders:
    """Processes that encode pieces; a context manager, in which they live.

    Args:
        config: of the text; has their number.
        by_position: as `is_held_out_by_position` says.
        tokenizer: of the text.
        spec: names the tokenizer, as `load_tokenizer` takes it.
    """

    def __init__(self, config: DataConfig, by_position: bool, tokenizer: Tokenizer, *, spec: str) -> None:
        self._own = Encoder(config, by_position, tokenizer)
        self._arguments = config, by_position, spec
        # Bytes take longer to send to another process than to tokenize.
        self._num_processes = 0 if spec == "bytes" else config.workers or num_cores()
        # A thread for each process, which waits for it; they are started as they are needed.
        self._threads = ThreadPoolExecutor(self._num_processes or 1)
        self._of_thread = threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_over = False
        self._pids: dict[Place, int] = {}
        """The processes that encode a piece now, by piece; the first has done so for the longest time."""

    def __enter__(self) -> "Encoders":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True  # first: a process that is being started now is killed by its thread
        for process in self._processes:
            process.kill()  # it holds nothing
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.wait()

    def in_order(self, tasks: Iterator[Task]) -> Iterator[Encoded]:
        """The encoded pieces of tasks, in the order of these, of which a few are read ahead.

        Raises:
            UserError: if reading the tasks does, after those before; if a process was killed, or stands still.
        """
        asked = _until_refused(tasks)
        head = list(islice(asked, PIECES_ALONE)) if self._num_processes else []
        asked = chain(head, asked)
        if len(head) < PIECES_ALONE:
            yield from map(self._encode_here, asked)
            return
        pending, ahead = deque[tuple[Task | UserError, Future[Encoded]]](), 2 * self._num_processes
        for one in asked:
            pending.append((one, self._threads.submit(self._ask, one)))
            if len(pending) > ahead:
                yield self._answer(*pending.popleft())
        while pending:
            yield self._answer(*pending.popleft())

    def _answer(self, task: Task | UserError, answer: Future[Encoded]) -> Encoded:
        """Wait for what `_ask` returns, bounded in time."""
        if not isinstance(task, UserError):
            seconds = SECONDS_OF_A_PIECE + task.piece.read_bytes / _BYTES_A_SECOND
            if wait([answer], seconds).not_done:
                # It may not have been asked yet, since another one is waited for, or is being started.
                pids = dict(self._pids)
                place = task.place if task.place in pids else next(iter(pids), task.place)
                process = f"process {pids[place]}" if pids else "the process"
                source = (*self._arguments[0].train, *self._arguments[0].held_out)[place[0]]
                raise UserError(
                    f"{process}, which tokenizes a part of {source}, gave no answer within {seconds:.0f} s: it "
                    "was stopped, or this computer is too busy: prepare the text again, and take fewer by "
                    "data.workers",
                    "data.workers",
                )
        return answer.result()

    def _encode_here(self, task: Task | UserError) -> Encoded:
        if isinstance(task, UserError):
            raise task
        return self._own.encode(task)

    def _ask(self, task: Task | UserError) -> Encoded:
        """Have a process encode the documents of a task."""
        if isinstance(task, UserError):
            raise task
        try:
            connection = self._connection(task.place)
            connection.send(task)
            answer = connection.recv()
        except (EOFError, OSError) as error:  # OSError also inside a message
            raise UserError(
                "a process that tokenizes text was killed (out of memory?): take fewer by data.workers, or shorter"
                " documents",
                "data.workers",
            ) from error
        finally:
            self._pids.pop(task.place, None)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _connection(self, place: Place) -> Any:
        """The connection to this thread's process, which is started now if it is not yet, and noted for a piece.

        It is no process of multiprocessing's: those begin with the user's program, which may come here again.
        """
        if not hasattr(self._of_thread, "connection"):
            self._of_thread.connection, theirs = Pipe()
            with theirs:
                program = (
                    "import sys; sys.path[:] = sys.argv[2:]\n"
                    "from diloco.data.encoding import serve; serve(int(sys.argv[1]))"
                )
                process = subprocess.Popen(
                    [sys.executable, "-c", program, str(theirs.fileno()), *sys.path],
                    pass_fds=[theirs.fileno()],
                    env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
                    process_group=0,  # Ctrl-C is for this process
                )
            self._processes.append(process)
            if self._is_over:
                process.kill()
            self._pids[place] = self._of_thread.pid = process.pid  # before a send, which may wait
            self._of_thread.connection.send(self._arguments)
        self._pids[place] = self._of_thread.pid
        return self._of_thread.connection


def _until_refused(tasks: Iterable[Task]) -> Iterator[Task | UserError]:
    """The tasks, and then the refusal to read more of them, which is due once those before are done."""
    try:
        yield from tasks
    except UserError as error:
        yield error


def serve(descriptor: int) -> None:
    """Be a process of `Encoders`, until that has ended, however it has."""
    with Connection(descriptor) as connection, suppress(EOFError, OSError):
        config, by_position, spec = connection.recv()
        encoder = Encoder(config, by_position, load_tokenizer(spec))
        while True:
            task = connection.recv()
            try:
                answer = encoder.encode(task)
            except Exception as error:
                answer = error
            connection.send(answer)
