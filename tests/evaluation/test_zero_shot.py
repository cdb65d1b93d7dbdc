"""Scores by lm-evaluation-harness, on questions in files; the real ones where they lie beside the project."""

import json
from pathlib import Path

import pytest
import torch

from diloco.data.tokenizers import ByteTokenizer, load_tokenizer
from diloco.errors import UserError
from diloco.models.decoder_config import DecoderConfig
from diloco.models.language_model import LanguageModel
from diloco.training.records.export import hugging_face_json

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("default")  # of the harness's and its own libraries

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
EVAL = SHARED / "eval"
DOLMA = SHARED / "tokenizers" / "gpt-neox-olmo-dolma-v1_5.json"
CPU = torch.device("cpu")
needs_questions = pytest.mark.skipif(not EVAL.is_dir(), reason=f"no questions in {EVAL}")


@pytest.fixture(autouse=True)
def _no_report_of_the_machine(monkeypatch):
    """The harness would ask pip for all that is installed."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda *_: None)


def score(model, tasks: dict[str, Path], *, tokenizer=None, limit=None):
    from diloco.evaluation.zero_shot import score_tasks

    return score_tasks(model, tokenizer or ByteTokenizer(), tasks, max_length=4096, device=CPU, limit=limit)


def write_questions(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def questions(path: Path, limit: int | None = None) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()[:limit]]


class Scripted(LanguageModel):
    """A model whose logits are a function of all tokens up to a position; the cache is those tokens."""

    class Read:
        def __init__(self, tokens: torch.Tensor | None = None) -> None:
            self.tokens = tokens

        def select(self, rows: torch.Tensor) -> "Scripted.Read":
            return Scripted.Read(self.tokens[rows])

    def new_cache(self) -> "Scripted.Read":
        return self.Read()

    def forward(self, tokens: torch.Tensor, cache: "Scripted.Read | None" = None) -> torch.Tensor:
        before = cache.tokens if cache is not None and cache.tokens is not None else tokens[:, :0]
        whole = torch.cat([before, tokens], dim=1)
        if cache is not None:
            cache.tokens = whole
        rows = [
            [self.logits(row[: end + 1]) for end in range(before.shape[1], len(row))] for row in whole.tolist()
        ]
        return torch.stack([torch.stack(row) for row in rows])

    def logits(self, read: list[int]) -> torch.Tensor:
        raise NotImplementedError


class Knowing(Scripted):
    """A model that expects the right answer of each question, and nothing in particular elsewhere."""

    def __init__(self, rows: list[dict]) -> None:
        super().__init__()
        self.answers = {row["query"].encode(): b" " + row["choices"][row["gold"]].encode() for row in rows}

    def logits(self, read: list[int]) -> torch.Tensor:
        text, logits = bytes(token for token in read if token < 256), torch.zeros(257)
        for query, answer in self.answers.items():
            if text.startswith(query) and answer.startswith(text[len(query) :]) and text != query + answer:
                logits[answer[len(text) - len(query)]] = 10.0
        return logits


def test_a_model_that_knows_the_answers_scores_all(tmp_path):
    """Texts stay as they are: dates are not parsed, and a line separator that JSON does not know ends none."""
    rows = [
        {"query": f"What\u2028is {n} and\x85{n}?", "choices": [f"1066-10-1{n}", f"it is {2 * n}"], "gold": n % 2}
        for n in range(5)
    ]
    wrong = [row | {"gold": 1 - row["gold"]} for row in rows]
    tables = {"right": rows, "wrong": wrong, "first three": [*rows[:3], *wrong[3:]]}
    files = {name: write_questions(tmp_path / name, some) for name, some in tables.items()}
    scores = score(Knowing(rows), files)
    assert scores["right"]["acc"] == scores["right"]["acc_norm"] == 1.0 and scores["wrong"]["acc"] == 0.0
    assert scores["first three"]["acc"] == 0.6
    assert score(Knowing(rows), files, limit=3)["first three"]["acc"] == 1.0


@needs_questions
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "dolma"])
def test_the_harness_own_class_gives_the_same_likelihoods(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from diloco.evaluation.zero_shot import HarnessLM

    tokenizer = ByteTokenizer() if kind == "bytes" else load_tokenizer(DOLMA)
    config = DecoderConfig(num_layers=2, num_heads=2, width=32, vocab_size=tokenizer.vocab_size)
    ours = config.build(seed=0)
    values, state = config.to_hugging_face(ours.state_dict(), context=512, bos_id=tokenizer.bos_id)
    theirs = transformers.PersimmonForCausalLM(transformers.PersimmonConfig(**values)).eval()
    theirs.load_state_dict(state, strict=False)
    theirs.tie_weights()
    text, bos = hugging_face_json(tokenizer)
    (tmp_path / "tokenizer.json").write_text(text)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token=bos, eos_token=bos
    )
    pairs = [
        (question["query"], f" {choice}")
        for question in questions(EVAL / "arc_easy_val.jsonl", 4)
        for choice in question["choices"]
    ] + [("", "Once upon a time"), ("ends in a space ", "word")]
    instances = [
        Instance(request_type="loglikelihood", doc={}, arguments=arguments, idx=index)
        for index, arguments in enumerate(pairs)
    ]
    reference = HFLM(
        pretrained=theirs, tokenizer=fast, batch_size=4, device="cpu", add_bos_token=True, max_length=512
    )
    scores = HarnessLM(ours, tokenizer, max_length=512, device=CPU).loglikelihood(instances)
    expected = reference.loglikelihood(instances, disable_tqdm=True)
    for mine, other in zip(scores, expected, strict=True):
        assert mine[0] == pytest.approx(other[0], abs=1e-4, rel=1e-5) and mine[1] == bool(other[1])

    texts = [questions(EVAL / "hellaswag_val.jsonl", 1)[0]["query"] * 12]
    rolling = [Instance(request_type="loglikelihood_rolling", doc={}, arguments=(t,), idx=0) for t in texts]
    mine = HarnessLM(ours, tokenizer, max_length=128, device=CPU).loglikelihood_rolling(rolling)
    reference = HFLM(
        pretrained=theirs, tokenizer=fast, batch_size=4, device="cpu", add_bos_token=False, max_length=128
    )
    assert mine == pytest.approx(reference.loglikelihood_rolling(rolling, disable_tqdm=True), rel=1e-5)


def test_text_is_generated_up_to_a_stop():
    from lm_eval.api.instance import Instance

    from diloco.evaluation.zero_shot import HarnessLM

    class Counting(Scripted):
        def logits(self, read):
            return torch.nn.functional.one_hot(torch.tensor((read[-1] + 1) % 256), 257).float()

    lm = HarnessLM(Counting(), ByteTokenizer(), max_length=64, device=CPU)

    def written(settings: dict) -> str:
        instance = Instance(request_type="generate_until", doc={}, arguments=("AB", settings), idx=0)
        return lm.generate_until([instance], disable_tqdm=True)[0]

    assert written({"until": ["GH"], "max_gen_toks": 20}) == "CDEF"
    assert written({"until": [], "max_gen_toks": 5}) == "CDEFG"
    with pytest.raises(UserError, match="asks for 256 tokens; sequences of 64 leave none for the question"):
        written({"until": []})


def test_a_metric_of_two_filters_is_two_numbers():
    from diloco.evaluation.zero_shot import _metrics

    results = {"exact_match,strict": 0.25, "exact_match,flexible": 0.5, "acc,none": 1, "alias": "x"}
    assert _metrics(results) == {"exact_match,strict": 0.25, "exact_match,flexible": 0.5, "acc": 1.0}


@pytest.mark.parametrize("error", [ValueError("no such split"), ConnectionError("no such split")])
def test_a_task_that_cannot_be_loaded_is_a_users_mistake(error, monkeypatch, tmp_path):
    from diloco.evaluation import zero_shot

    def simple_evaluate(*_, **__):
        raise error

    monkeypatch.setattr(zero_shot, "simple_evaluate", simple_evaluate)
    path = write_questions(tmp_path / "mine.jsonl", [{"query": "1 + 1 =", "choices": ["2", "3"], "gold": 0}])
    with pytest.raises(UserError, match="tasks mine can't be loaded or scored: no such split") as refusal:
        score(Knowing([]), {"mine": path})
    assert refusal.value.field == "tasks"
