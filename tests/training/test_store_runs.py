"""A trainer's run in a store, read by those who evaluate and export it."""

import json
from dataclasses import replace

import pytest
import torch
from tests.rendezvous.handwritten import Handwritten

from diloco.errors import FileError, UserError
from diloco.schema import flat
from diloco.training.config import joined
from diloco.training.config.config import TrainConfig, to_json
from diloco.training.config.joined import config_of
from diloco.training.config.recipes import tiny
from diloco.training.config.resolve import DATA_DIGEST, facts_with_rendezvous, resolve, text_facts
from diloco.training.records.export import export_run
from diloco.training.records.finished import evaluate_run, run_parameters
from diloco.training.records.runs import read_config


@pytest.fixture(scope="module")
def run(finished_run, tmp_path_factory) -> Handwritten:
    """A run of the model of `finished_run`, on its text, whose Θ has moved twice."""
    config = read_config(finished_run)
    own = ("name", "runs", "data.", "recipe", "micro_batch")
    facts = {name: value for name, value in flat(to_json(config)).items() if not name.startswith(own)}
    facts[DATA_DIGEST] = text_facts(config.data.prepared).digest
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


FOREIGN = {
    **{
        "name": "../evil",
        "runs": "/",
        "recipe": "laptop",
        "device": "cuda",
        "compile": True,
        "prometheus_port": 80,
    },
    **{"trackers": ["wandb"], "data.train": ["/etc/passwd"], "data.prepared": "/", "data": {"cache": "/"}},
    **{"elastic.num_shares": 3, "checkpoint.every_steps": 0, "shards_per_replica": 4, "timeout_seconds": 9},
}


def test_a_replica_that_joins_takes_nothing_that_is_its_own_from_the_log(tmp_path, monkeypatch):
    asked = replace(tiny(), num_replicas=1, rendezvous="store", seed=9)
    facts = json.loads(json.dumps(facts_with_rendezvous(resolve(asked, vocab_size=257, prepared=tmp_path))))

    def joined_by(more: dict[str, object]) -> TrainConfig:
        monkeypatch.setattr(joined, "facts_of", lambda _: facts | more)
        return joined.joined_config("store", names_model=False)

    config = joined_by(FOREIGN)
    assert config == joined_by({}) and config.seed == 9 and not config.name
    with pytest.raises(FileError, match="checkpoint is a section, and no value"):
        joined_by({"checkpoint": {"every_steps": 0}})


def test_text_that_is_not_the_runs_is_refused(run, finished_run, tmp_path) -> None:
    with pytest.raises(UserError, match="does not hold the run's text: set prepared"):
        evaluate_run(str(run.directory))
    index = json.loads((read_config(finished_run).data.prepared / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps(index | {"digest": "0" * 64}))
    with pytest.raises(UserError, match="holds another text than the run's"):
        evaluate_run(str(run.directory), prepared=tmp_path)
