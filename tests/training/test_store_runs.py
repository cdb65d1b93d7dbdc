"""A trainer's run in a store, read by those who evaluate and export it."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from tests.rendezvous.handwritten import SEED, Handwritten

from diloco.data.shards import read_index
from diloco.errors import DilocoError, UserError
from diloco.models.hugging_face_config import HuggingFaceConfig
from diloco.outer.digest import parameters_hash
from diloco.rendezvous.replay import INITIAL
from diloco.schema import flat
from diloco.training.config.config import TrainConfig, get, to_json
from diloco.training.config.joined import check_text, config_of, joined_config, known
from diloco.training.config.recipes import tiny
from diloco.training.config.resolve import (
    DATA_DIGEST,
    TOKENIZER_DIGEST,
    facts_with_rendezvous,
    names_with_rendezvous,
    resolve,
    text_facts,
)
from diloco.training.prepare import prepare_run
from diloco.training.records.export import export_run
from diloco.training.records.finished import evaluate_run, run_parameters
from diloco.training.records.runs import read_config
from diloco.training.records.store_runs import initial_parameters


@pytest.fixture(scope="module")
def run(finished_run, tmp_path_factory) -> Handwritten:
    """A run of the model of `finished_run`, on its text, whose Θ has moved twice."""
    config = read_config(finished_run)
    own = ("name", "runs", "data.", "recipe", "micro_batch")
    facts = {name: value for name, value in flat(to_json(config)).items() if not name.startswith(own)}
    facts[DATA_DIGEST] = text_facts(config.data).digest
    del facts["seed"]  # written with the facts of the codec
    model = config.model.build(seed=5)
    directory = tmp_path_factory.mktemp("store") / "elastic"
    run = Handwritten(directory, facts=facts, initial=dict(model.named_parameters()))
    run.train(2)
    run.snapshot(0)
    run.step(0, [run.send(0, 0)])
    return run


def test_theta_comes_from_the_newest_snapshot_and_the_rounds_after_it(run, finished_run) -> None:
    model, step = run_parameters(str(run.directory), "outer")
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name], value) for name, value in run.theta().items())
    assert step == 600 // read_config(finished_run).tokens_per_step
    with pytest.raises(UserError, match="a store holds the newest outer parameters alone"):
        run_parameters(str(run.directory), "replica")
    with pytest.raises(UserError, match=r"at_step=1: a store holds the newest"):
        run_parameters(str(run.directory), "outer", at_step=1)


def test_a_run_is_evaluated_and_exported_from_its_store(run, finished_run, tmp_path) -> None:
    prepared = read_config(finished_run).data.prepared
    assert prepared is not None
    result = evaluate_run(str(run.directory), prepared=prepared)
    assert result["eval_loss"] > 0 and result["run"] == str(run.directory)
    export_run(str(run.directory), "safetensors", tmp_path / "out", prepared=prepared)
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert "# elastic" in (tmp_path / "out" / "README.md").read_text()


def test_a_batch_of_which_each_replica_takes_a_share_of_its_own_need_be_no_multiple_of_them(tmp_path):
    batch = {"num_replicas": 2, "global_batch": 9, "num_tokens": 60 * 9 * 64}
    asked = replace(tiny(), **batch, replica_batch=4, rendezvous="store")
    facts = facts_with_rendezvous(resolve(asked, vocab_size=257, prepared=tmp_path))
    config = config_of(json.loads(json.dumps(facts)))
    assert config is not None and {name: getattr(config, name) for name in batch} == batch


OF_THIS_MACHINE = {
    "name": "..",
    "runs": "/",
    "recipe": "tiny",
    "data.train": ["/etc/passwd"],
    "data.prepared": "/",
    "trackers": ["wandb"],
    "prometheus_port": 80,
    "checkpoint.every_steps": 1,
    "device": "cuda",
    "micro_batch": 1,
}


def shared(tmp_path) -> dict:
    """The facts of a trainer's run that is none of a recipe."""
    asked = replace(tiny(), seed=SEED, num_replicas=1, rendezvous="elsewhere", global_batch=6, num_tokens=6 * 640)
    return facts_with_rendezvous(resolve(asked, vocab_size=257, prepared=tmp_path))


def test_a_joiner_takes_what_all_share_from_the_log_and_nothing_that_is_its_own(tmp_path):
    facts = shared(tmp_path)
    run = Handwritten(tmp_path / "run", facts=facts | OF_THIS_MACHINE)
    config = joined_config(str(run.directory), names_model=False)
    assert facts_with_rendezvous(config) == facts
    sizes = {name: getattr(config, name) for name in ("num_tokens", "global_batch", "sequence_length", "model")}
    default = TrainConfig(num_replicas=1, **sizes)
    own = [name for name in names_with_rendezvous() if not name.startswith("model.")]
    assert [name for name in own if get(config, name) != get(default, name)] == ["rendezvous"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_initial_parameters_of_either_precision_are_made_again(tmp_path, dtype):
    """With bf16-params, Θ begins with what the replicas' own parameters were rounded to."""
    facts = shared(tmp_path)
    model = known("store", config_of(facts)).model.initial(seed=SEED)
    rounded = {name: parameter.detach().to(dtype).float() for name, parameter in model.named_parameters()}
    made = initial_parameters(facts | {INITIAL: parameters_hash(rounded)})
    assert made is not None and all(torch.equal(made[name], value) for name, value in rounded.items())


NO_MODEL = dict.fromkeys(("model.num_layers", "model.width", "model.vocab_size", "model.num_heads"))
TRANSFORMER = {"model.family": HuggingFaceConfig.family, "model.architecture": '{"model_type": "gpt2"}'}


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (None, r"rendezvous=.*there is no directory .*run; to create a run there, name a recipe before the flags"),
        (NO_MODEL, ".*the run is a program's own, and does not describe its model"),
        (
            TRANSFORMER | {"model.hf": "/etc", "model.num_heads": None},
            ".* trains a model of transformers: name the same by model.hf",
        ),
        ({"global_batch": 0}, "entry 0 of the log can't be read: global_batch must be at least 1"),
        ({"data": "/etc", "model": 3}, "entry 0 of the log can't be read: .*model"),
        ({"checkpoint": {"every_steps": 0}}, "entry 0 of the log can't be read: checkpoint is a section, and no"),
        ({"model.num_layers": 10**9}, "entry 0 of the log can't be read: model.num_layers=1000000000 must be at"),
    ],
)
def test_what_a_joiner_can_not_take_from_a_log_is_refused(facts, sentence, tmp_path):
    if facts is not None:
        changed = shared(tmp_path) | facts
        Handwritten(tmp_path / "run", facts={name: value for name, value in changed.items() if value is not None})
    with pytest.raises(DilocoError, match=f"^{sentence}"):
        joined_config(str(tmp_path / "run"), names_model=False)


def test_a_joiner_with_other_text_is_told_what_it_needs(finished_run, tmp_path):
    run = Handwritten(tmp_path / "run", facts=shared(tmp_path) | {DATA_DIGEST: "0" * 64})
    config = joined_config(str(run.directory), names_model=False)
    data = replace(config.data, prepared=read_config(finished_run).data.prepared)
    with pytest.raises(UserError, match=f"not {'0' * 16}: name the sources and the tokenizer .* data.prepared"):
        prepare_run(replace(config, name="b", runs=tmp_path, data=data))


def test_the_place_of_the_runs_text_is_named_if_a_run_here_has_it(
    run, finished_run, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = read_config(finished_run).data
    digest = text_facts(data).digest
    with pytest.raises(
        UserError, match=f"does not hold the run's text: set prepared to its directory .* digest {digest:.16}"
    ):
        evaluate_run(str(run.directory))
    shutil.copytree(finished_run, tmp_path / "runs" / "member", ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(UserError, match=rf"runs/member has read it: set prepared={data.prepared}"):
        evaluate_run(str(run.directory))


def test_text_that_is_not_the_runs_is_refused(run, finished_run, tmp_path) -> None:
    index = json.loads((read_config(finished_run).data.prepared / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps(index | {"digest": "0" * 64}))
    with pytest.raises(UserError, match="holds another text than the run's"):
        evaluate_run(str(run.directory), prepared=tmp_path)


def test_an_outer_run_takes_a_text_of_its_tokenizer_alone(finished_run) -> None:
    prepared = read_config(finished_run).data.prepared
    digest = read_index(prepared).tokenizer_digest
    check_text({TOKENIZER_DIGEST: digest}, prepared)
    with pytest.raises(UserError, match="holds another tokenizer than the run's"):
        check_text({TOKENIZER_DIGEST: "0" * len(digest)}, prepared)
