"""Zero-shot tasks through lm-evaluation-harness, whose `LM` our model is: every task that it has works."""

import json
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
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
from diloco.errors import UserError
from diloco.evaluation.likelihoods import likelihoods
from diloco.evaluation.questions import read_questions
from diloco.models.language_model import LanguageModel


class HarnessLM(TemplateLM):
    """A model and its tokenizer for the harness; BOS precedes every text, as in training.

    Args:
        model: tokens to logits, with a cache.
        tokenizer: of the model.
        max_length: tokens that it may read at once.
        device: where it is.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, *, max_length: int, device: torch.device
    ) -> None:
        super().__init__()
        self.model, self.tokenizer_, self.max_length = model, tokenizer, max_length
        self._device = device

    @property
    def eot_token_id(self) -> int:
        """What ends a document: the BOS of the next."""
        return self.tokenizer_.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, after BOS unless that is not wanted."""
        ids = self.tokenizer_.encode([string])[0].tolist()
        return ids if add_special_tokens is False else [self.tokenizer_.bos_id, *ids]

    def _loglikelihood_tokens(self, requests: list, **_: Any) -> list[tuple[float, bool]]:
        found = likelihoods(
            self.model,
            [(context, continuation) for _, context, continuation in requests],
            max_length=self.max_length,
            device=self._device,
        )
        return [(likelihood.log_likelihood, likelihood.is_greedy) for likelihood in found]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows that do not overlap, each after the token before it."""
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
        found = iter(self._loglikelihood_tokens([("", *window) for several in windows for window in several]))
        return [sum(next(found)[0] for _ in several) for several in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy text up to a stop, or `max_gen_toks` tokens."""
        return [self._generate(*request.args) for request in tqdm(requests, disable=disable_tqdm)]

    def _generate(self, context: str, settings: dict[str, Any]) -> str:
        if settings.get("do_sample") or settings.get("temperature"):
            raise UserError(f"text is generated greedily here, and the task asks for {settings}")
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        tokens = self.tok_encode(context)
        num_wanted = settings.get("max_gen_toks", 256)
        if num_wanted >= self.max_length:
            raise UserError(
                f"the task wants {num_wanted} tokens written, and the model was trained on sequences of "
                f"{self.max_length}, which leaves none for the question: evaluate it on other tasks"
            )
        tokens, written = tokens[-(self.max_length - num_wanted) :], []
        cache, unread = self.model.new_cache(), tokens
        with torch.inference_mode():
            while len(written) < num_wanted:
                logits_V = self.model(torch.tensor([unread], device=self._device), cache)[0, -1]
                unread = [int(logits_V[: self.tokenizer_.vocab_size].argmax())]
                if unread[0] == self.eot_token_id:
                    break
                written += unread
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
    """What the harness measures of each task, by the metric's name, such as acc, acc_stderr, acc_norm.

    Args:
        model: tokens to logits, with a cache.
        tokenizer: of the model.
        tasks: by name, each with a file that `read_questions` reads, or None for the harness's own task of that
            name, whose data come from the hub.
        max_length: tokens that the model may read at once.
        device: where it is.
        limit: questions of each task at the most, the first.

    Raises:
        UserError: for a task that the harness doesn't have or can't load, or a file that is not one of questions.
    """
    check_tasks(tasks)
    with tempfile.TemporaryDirectory() as scratch:
        manager = TaskManager(include_defaults=None in tasks.values())
        configs: list[Any] = [
            name if path is None else _file_task(name, path, Path(scratch)) for name, path in tasks.items()
        ]
        harness = HarnessLM(model, tokenizer, max_length=max_length, device=device)
        try:
            with redirect_stdout(sys.stderr):  # the harness's own remarks
                found = simple_evaluate(
                    harness,
                    tasks=configs,
                    task_manager=manager,
                    limit=limit,
                    log_samples=False,
                    bootstrap_iters=100,
                )
        except (ConnectionError, OSError) as error:
            raise UserError(f"the data of {', '.join(tasks)} can't be loaded: {error}") from error
    assert found is not None, "this process is the first, and gets the results"
    results = found.get("results", {})
    return {name.removeprefix(_OWN): _metrics(scores) for name, scores in results.items()}


_OWN = "diloco_"
"""Before the name of a task of our own, lest the harness take it for one of its."""


def check_tasks(tasks: Mapping[str, Path | None]) -> None:
    """Refuse a task that neither has a file nor is one of the harness's.

    Raises:
        UserError: naming it.
    """
    manager = TaskManager(include_defaults=None in tasks.values())
    for name in (name for name, path in tasks.items() if path is None and name not in manager.all_tasks):
        raise UserError(
            f"{name!r} is no task of lm-evaluation-harness: `lm-eval ls tasks` lists them; "
            "for questions of your own name their file by --data"
        )


def _file_task(name: str, path: Path, scratch: Path) -> dict[str, Any]:
    """A task of multiple choice, scored as the harness scores HellaSwag, PIQA and ARC."""
    questions = scratch / f"{name}.jsonl"
    questions.write_text("".join(json.dumps(question) + "\n" for question in read_questions(path)))
    return {
        "task": _OWN + name,
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"validation": str(questions)},
            "cache_dir": str(scratch / "cache"),
            # Left to themselves, texts that look like dates would become dates.
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
    """By the metric's name, with the harness's filter where there is one."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in scores.items()
        if isinstance(value, int | float) and "," in name
    }
