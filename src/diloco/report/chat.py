"""The chat of a run's live page: one model in memory, which writes one answer at a time."""

import json
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from diloco.data.tokenizers import Tokenizer, text_pieces
from diloco.errors import DilocoError, UserError
from diloco.models.writer import Writer, check_sampling, generate
from diloco.rendezvous.log.log import is_store
from diloco.report.handler import BusyError
from diloco.report.page import Panel
from diloco.report.reach import reach
from diloco.schema import decoded
from diloco.training.config.config import Parameters
from diloco.training.records.finished import RunModel, finished_config, load_model, newest_step
from diloco.training.records.runs import run_directory
from diloco.training.records.summary import OUTER_FILE
from diloco.training.records.tail import RunTail

MOST_CHARACTERS = 8_000
"""Characters of the text that an answer goes on from."""
MOST_TOKENS = 1_000
_MOST_ASKING = 4
"""Answers that are written or waited for."""
_TURN_SECONDS = 60.0
"""The longest wait for other answers."""
_ANSWER_SECONDS = 120.0
"""The longest time in which an answer is written."""
_STORE_SECONDS = 300.0
"""Age at which the outer parameters of a store are read anew."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request for an answer."""

    text: str
    """The text to go on from; empty for the beginning of a document."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)]

    def __post_init__(self) -> None:
        if len(self.text) > MOST_CHARACTERS:
            raise UserError(f"the text has more than {MOST_CHARACTERS:,} characters: shorten it")


class Chat:
    """Answers of a run's newest model.

    Args:
        source: the run's directory, or its store.
        max_tokens: the length of an answer that the page asks for at first.
        temperature: the temperature likewise.
        top_k: how many of the likeliest tokens each is drawn from.
        seed: of the first answer's draws; the next one has the next.
        parameters: which of the run's parameters.
        prepared: directory of the run's data, if it was moved, or the run is in a store.

    Raises:
        UserError: if there is no run or no data, or a value is out of its range.
    """

    def __init__(
        self,
        source: str,
        *,
        max_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 40,
        seed: int = 0,
        parameters: Parameters = "outer",
        prepared: Path | None = None,
    ) -> None:
        check_sampling(temperature, top_k)
        if max_tokens > MOST_TOKENS:
            raise UserError(f"max_tokens={max_tokens} must be at most {MOST_TOKENS} on a page", "max_tokens")
        finished_config(source, prepared)
        self._source, self._prepared = source, prepared
        self._parameters: Parameters = parameters
        self._first = {"max_tokens": max_tokens, "temperature": temperature}
        self._top_k, self._seed, self._num_threads = top_k, seed, torch.get_num_threads()
        self._places, self._turn = threading.BoundedSemaphore(_MOST_ASKING), threading.Lock()
        self._model: RunModel | None = None
        self._key: object = None

    def content(self, runs: list[RunTail]) -> bytes:
        """The values that the page shows beside the answers, as JSON.

        Args:
            runs: the run, if it has a directory on this machine.
        """
        bounds = {"most_tokens": MOST_TOKENS, "most_characters": MOST_CHARACTERS}
        values: dict[str, Any] = {**self._first, **bounds, "reach": None}
        for run in runs:
            if run.config is not None and run.last is not None:
                far = reach(run.config, num_tokens=run.last.tokens, tokens_per_second=run.tokens_per_second)
                values["reach"] = None if far is None else asdict(far)
        return json.dumps(values).encode()

    def answer(self, request: bytes) -> Generator[bytes, None, None]:
        """Lines of JSON: the step of the model, the pieces of its text, and how the answer ended.

        Args:
            request: a `Question` as JSON.

        Raises:
            UserError: before the first line, for a request that can't be read, or a run without parameters yet.
            BusyError: before the first line, if too many others wait.
        """
        question = decoded(request, Question, source="the question")
        with self._one_at_a_time():
            self._seed += 1
            with _lack_of_memory_named():
                model = self._newest()
            writer = model.writer(temperature=question.temperature, top_k=self._top_k, seed=self._seed - 1)
            yield _line(step=model.step)
            end, until = "", time.monotonic() + _ANSWER_SECONDS
            try:
                with _lack_of_memory_named():
                    for piece in answer(writer, model.tokenizer, question.text, max_tokens=question.max_tokens):
                        yield _line(text=piece)
                        if time.monotonic() > until:
                            end = f"stopped after {_ANSWER_SECONDS:.0f} s"
                            break
            except UserError as error:
                end = str(error)
            yield _line(end=end)

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if not self._places.acquire(blocking=False):
            raise BusyError(f"{_MOST_ASKING} answers are being written or waited for: ask again later")
        try:
            if not self._turn.acquire(timeout=_TURN_SECONDS):
                raise BusyError(f"others' answers took more than {_TURN_SECONDS:.0f} s: ask again later")
            try:
                yield
            finally:
                self._turn.release()
        finally:
            self._places.release()

    def _newest(self) -> RunModel:
        """The model with the newest parameters, which is read only where they have changed."""
        if is_store(self._source):
            is_over, key = False, time.monotonic() // _STORE_SECONDS
        else:
            is_over = (run_directory(self._source) / OUTER_FILE).exists()
            key = newest_step(self._source, self._parameters)
        # Beside training, two threads that wait for each other were twelve times slower than one.
        torch.set_num_threads(self._num_threads if is_over else 1)
        if key is None:
            raise UserError("the run has no checkpoint yet: ask again after its first one")
        key = is_over, key  # the last step has a checkpoint, too, which was read to the CPU
        if self._model is None or key != self._key:
            self._model = None  # first, so that memory never holds two
            device = "auto" if is_over else "cpu"  # a GPU's memory may be what training needs next
            parameters, prepared = self._parameters, self._prepared
            self._model = load_model(self._source, parameters=parameters, prepared=prepared, device=device)
            self._key = key
        return self._model


@contextmanager
def _lack_of_memory_named() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch has no narrower class on a CPU
        if isinstance(error, DilocoError):
            raise
        reason = (str(error) or "not enough memory").splitlines()[0]
        raise UserError(f"the model can't write here: {reason}") from error


def answer(writer: Writer, tokenizer: Tokenizer, text: str, *, max_tokens: int) -> Iterator[str]:
    """The text with which a writer goes on from another, in pieces, up to an empty line."""
    tokens = tokenizer.encode([text])[0].tolist()
    writer.read(tokens)
    written = ""
    for piece in text_pieces(tokenizer, generate(writer, max_tokens, stop=tokenizer.bos_id), after=tokens):
        yield piece
        written += piece
        if "\n\n" in written.lstrip("\n"):
            return


def _line(**values: object) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _part(suffix: str) -> str:
    return Path(__file__).with_suffix(suffix).read_text(encoding="utf-8")


PANEL = Panel(body=_part(".html"), style=_part(".css"), script=_part(".js"))
"""The panel on the page."""
