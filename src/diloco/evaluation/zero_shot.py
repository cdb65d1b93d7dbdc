"""Zero-shot tasks through lm-evaluation-harness: every task that it has, and files of questions."""

import json
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Features, List, Value
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from diloco.data.tokenizers import Tokenizer
from diloco.errors import UserError, nearest
from diloco.evaluation.likelihoods import likelihoods
from diloco.evaluation.questions import read_questions
from diloco.models.language_model import LanguageModel
from diloco.models.writer import Writer, generate


class HarnessLM(TemplateLM):
    """A model and its tokenizer for the harness; BOS precedes every text, as in training.

    The harness's own class for models of transformers counts BOS twice where it scores whole texts, and stops at
    an answer that is longer than a sequence.

    Args:
        model: a model that offers a cache.
        tokenizer: the model's.
        max_length: the most tokens that the model may read in one sequence.
        device: where the model is.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, *, max_length: int, device: torch.device
    ) -> None:
        super().__init__()
        self.model, self.tokenizer_, self.max_length = model, tokenizer, max_length
        self._model_device = device

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document: the BOS of the next."""
        return self.tokenizer_.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, after BOS unless `add_special_tokens` is False."""
        ids = self.tokenizer_.encode([string])[0].tolist()
        return ids if add_special_tokens is False else [self.tokenizer_.bos_id, *ids]

    def _loglikelihood_tokens(self, requests: list, **_: Any) -> list[tuple[float, bool]]:
        scored = likelihoods(
            self.model,
            [(context, continuation) for _, context, continuation in requests],
            max_length=self.max_length,
            device=self._model_device,
        )
        return [(likelihood.log_likelihood, likelihood.is_greedy) for likelihood in scored]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows that do not overlap, each given the token before it."""
        windows = [
            [
                utils.make_disjoint_window(window)
                for window in utils.get_rolling_token_windows(
                    token_list=self.tok_encode(text, add_special_tokens=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for (text,) in (request.args for request in requests)
        ]
        scored = iter(self._loglikelihood_tokens([("", *window) for of_text in windows for window in of_text]))
        return [sum(next(scored)[0] for _ in of_text) for of_text in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy text up to a stop, or of `max_gen_toks` tokens."""
        return [self._generate(*request.args) for request in tqdm(requests, disable=disable_tqdm)]

    def _generate(self, context: str, settings: dict[str, Any]) -> str:
        """The text that the model writes greedily after a context, until a stop of the task's."""
        if settings.get("do_sample") or settings.get("temperature"):
            raise UserError(
                f"the task asks for {settings}, and diloco generates greedily only: take other tasks", "tasks"
            )
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        tokens = self.tok_encode(context)
        most = settings.get("max_gen_toks", 256)
        if most >= self.max_length:
            raise UserError(
                f"the task asks for {most} tokens; sequences of {self.max_length} leave none for the question: "
                "take other tasks",
                "tasks",
            )
        vocab_size, written = self.tokenizer_.vocab_size, []
        length, device = self.max_length, self._model_device
        writer = Writer(self.model, context=length, device=device, vocab_size=vocab_size, temperature=0)
        writer.read(tokens[-(self.max_length - most) :])
        for token in generate(writer, most, stop=self.eot_token_id):
            written.append(token)
            text = self.tokenizer_.decode(written)
            if any(stop in text for stop in stops if stop):
                return min((text.split(stop)[0] for stop in stops if stop), key=len)
        return self.tokenizer_.decode(written)


def score_tasks(
    model: LanguageModel,
    tokenizer: Tokenizer,
    tasks: Mapping[str, Path | None],
    *,
    max_length: int,
    device: torch.device,
    limit: int | None = None,
) -> dict[str, dict[str, float]]:
    """The harness's metrics of each task by name, such as acc, acc_stderr, acc_norm.

    Args:
        model: a model that offers a cache.
        tokenizer: the model's.
        tasks: by name, each with a file that `read_questions` reads, or None for the harness's own task of that
            name, whose data come from the Hugging Face Hub.
        max_length: the most tokens that the model may read in one sequence.
        device: where the model is.
        limit: the most questions of each task, its first ones.

    Raises:
        UserError: for a task that the harness doesn't have or can't load, or a file that holds no questions.
    """
    check_tasks(tasks)
    with tempfile.TemporaryDirectory() as scratch:
        configs: list[Any] = [
            name if path is None else _file_task(name, path, Path(scratch, str(index)))
            for index, (name, path) in enumerate(tasks.items())
        ]
        harness = HarnessLM(model, tokenizer, max_length=max_length, device=device)
        try:
            with redirect_stdout(sys.stderr):  # the harness's own remarks
                scores = simple_evaluate(
                    harness,
                    tasks=configs,
                    task_manager=_task_manager(None in tasks.values()),
                    limit=limit,
                    log_samples=False,
                    bootstrap_iters=100,
                )
        except UserError:
            raise
        except Exception as error:
            if not _is_of_loading(error):
                raise
            raise UserError(f"tasks {', '.join(tasks)} can't be loaded or scored: {error}", "tasks") from error
    assert scores is not None, "this process is the first, and gets the results"
    return {name.removeprefix(_OWN): _metrics(values) for name, values in scores.get("results", {}).items()}


def _is_of_loading(error: Exception) -> bool:
    """True for what the harness and datasets raise of a task's libraries and files, rather than of a model."""
    needs_script = isinstance(error, RuntimeError) and "Dataset scripts" in str(error)
    return needs_script or isinstance(error, OSError | ImportError | ValueError)


_OWN = "diloco_"
"""Prefix of our own tasks' names, lest the harness take them for its own."""


def check_tasks(tasks: Mapping[str, Path | None]) -> None:
    """Refuse a task that neither has a file nor is one of the harness's.

    Raises:
        UserError: with its name.
    """
    known = _task_manager(None in tasks.values()).all_tasks
    for name, path in tasks.items():
        if path is None and name not in known:
            near = nearest(name, known) or ": `lm-eval ls` lists all"
            raise UserError(
                f"{name!r} is no task of lm-evaluation-harness{near}; a file of your own questions is named by "
                "data",
                "tasks",
                "data",
            )


@cache
def _task_manager(include_defaults: bool) -> TaskManager:
    """The harness's tasks; to index its own takes many seconds."""
    return TaskManager(include_defaults=include_defaults)


def _file_task(name: str, path: Path, scratch: Path) -> dict[str, Any]:
    """A multiple-choice task, scored as the harness scores HellaSwag, PIQA and ARC."""
    scratch.mkdir()
    questions = scratch / "questions.jsonl"
    lines = "".join(json.dumps(question) + "\n" for question in read_questions(path))
    questions.write_text(lines, encoding="utf-8")
    return {
        "task": _OWN + name,
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"validation": str(questions)},
            "cache_dir": str(scratch / "cache"),
            # Otherwise texts that look like dates would become dates.
            "features": Features(
                {"query": Value("string"), "choices": List(Value("string")), "gold": Value("int64")}
            ),
        },
        "validation_split": "validation",
        "output_type": "multiple_choice",
        "doc_to_text": "query",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")
        ],
    }


def _metrics(scores: Mapping[str, object]) -> dict[str, float]:
    """Scores by the metric's name, with the harness's filter where there is one."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in scores.items()
        if isinstance(value, int | float) and "," in name
    }
