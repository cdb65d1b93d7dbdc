"""transformers' Trainer and trl's SFTTrainer: two replicas, each a job of its own, on tiny models.

And the examples that need transformers: one process imports it for all, which takes longer than to train.
"""

import contextlib
import io
import itertools
import os
import re
import resource
import runpy
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hostile.mutations import Hostile, hostile_pickle
from tests.integrations.jobs import assert_resumed, connect, die, is_killed, meet_at
from tests.ports import free_port
from tests.processes import run_replicas
from tests.running import EXAMPLES, losses, replicas_agree, run_example, run_snippets

import diloco
from diloco.errors import CheckpointError, FileWriteError
from diloco.outer.digest import parameters_hash
from diloco.publishing.versions import VERSION
from diloco.training.processes import end_with_parent

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

STEPS = 14
KILLED_AT = 11
"""The last checkpoint is then that of step 9, in which fragments are in flight."""
SCHEDULE = {"sync_every": 4, "overlap_steps": 2}


def build(model: torch.nn.Module) -> diloco.StreamingDiLoCo:
    fragments = diloco.strided(model, layers_per_fragment=1)
    schedule = diloco.Schedule(num_fragments=len(fragments), **SCHEDULE)
    return diloco.StreamingDiLoCo(model, fragments=fragments, schedule=schedule, exchange=connect())


def llama() -> Any:
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def rows(seed: int, num_rows: int) -> list[dict[str, torch.Tensor]]:
    """Tokens that count upwards, from where each row begins."""
    starts = torch.randint(64, (num_rows, 1), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in (starts + torch.arange(16)) % 64]


def arguments(folder: str, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 3,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        **changes,
    }


def new_callback() -> Any:
    from diloco.integrations.transformers import DiLoCoCallback

    return DiLoCoCallback(build)


def trainer_of(folder: str, *, kind: Any = None, **changes: Any) -> Any:
    """A Trainer with a shard of data for each replica, and two held-out sets that all share."""
    replica = int(os.environ.get("DILOCO_REPLICA", "0"))
    given = {name: changes.pop(name) for name in ("model", "model_init", "optimizers") if name in changes}
    return (kind or transformers.Trainer)(
        **{"model": llama(), **given},
        args=transformers.TrainingArguments(**arguments(folder, **changes)),
        train_dataset=rows(replica, 40),
        eval_dataset={"near": rows(100, 6), "far": rows(101, 6)},
        callbacks=[new_callback()],
    )


def sft_trainer_of(folder: str, **changes: Any) -> Any:
    """An SFTTrainer of a LoRA adapter, with token ids as they come out of a tokenizer."""
    import datasets
    import peft
    import tokenizers
    import trl

    replica = int(os.environ["DILOCO_REPLICA"])
    words = {f"w{i}": i for i in range(64)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    sets = [
        datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows(seed, num_rows)])
        for seed, num_rows in ((replica, 40), (100, 6))
    ]
    return trl.SFTTrainer(
        model=llama(),
        args=trl.SFTConfig(**arguments(folder, **changes), max_length=16, bf16=False),
        train_dataset=sets[0],
        eval_dataset=sets[1],
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="w0", eos_token="w2"
        ),
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        callbacks=[new_callback()],
    )


def train_and_be_killed(make: Callable[..., Any], folder: str) -> None:
    class Kill(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == KILLED_AT:
                die()

    trainer = make(folder)
    trainer.add_callback(Kill())
    trainer.train()


def load_model(folder: str) -> dict[str, torch.Tensor]:
    return dict(transformers.AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def load_adapter(folder: str) -> dict[str, torch.Tensor]:
    import peft

    model = peft.PeftModel.from_pretrained(llama(), folder)
    assert Path(folder, "adapter_model.safetensors").exists() and not Path(folder, "model.safetensors").exists()
    return dict(model.named_parameters())


KINDS = {"Trainer": (trainer_of, load_model, "eval_far_loss")}
"""The makers of a trainer, the loaders of its model, and the metric that is compared."""
IMPORTS = ["transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate"]
if find_spec("trl") and find_spec("peft"):
    KINDS["SFTTrainer with LoRA"] = (sft_trainer_of, load_adapter, "eval_loss")
    IMPORTS += ["trl.trainer.sft_trainer", "trl.trainer.grpo_trainer", "peft"]
SNIPPETS = ["accelerate_loop.py", "transformers_trainer.py", *(["trl_sft.py"] if len(KINDS) == 2 else [])]


def train_replica(folder: str, ports: list[int]) -> dict[str, dict[str, Any]]:
    """For each kind a run that is killed and resumed, and the same run undisturbed and without evaluations."""
    warnings.simplefilter("default")
    transformers.logging.set_verbosity_error()
    results, replica = {}, int(os.environ["DILOCO_REPLICA"])
    for number, (kind, (make, load, metric)) in enumerate(KINDS.items()):
        place, (first, second, third) = (
            f"{folder}/{number}-{os.environ['DILOCO_REPLICA']}",
            ports[3 * number :][:3],
        )
        is_killed(train_and_be_killed, make, place, port=first)

        meet_at(second)
        trainer = make(place)
        trainer.train(resume_from_checkpoint=True)
        engine = trainer.callback_handler.callbacks[1].engine
        trainer.save_model(f"{place}/shipped")
        loaded = load(f"{place}/shipped")

        meet_at(third)
        undisturbed = make(f"{place}/undisturbed", eval_strategy="no", save_strategy="no")
        undisturbed.train()
        results[kind] = {
            "hash": engine.outer_hash(),
            "num_steps": engine.num_steps,
            "bytes": engine.bytes_sent,
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "evaluated": [entry[metric] for entry in trainer.state.log_history if metric in entry],
            "after": trainer.evaluate()[metric],
            "shipped": parameters_hash({name: loaded[name] for name in engine.outer_parameters()}),
            "undisturbed": undisturbed.callback_handler.callbacks[1].engine.outer_hash(),
        }
    meet_at(ports[-1])
    with pytest.raises(diloco.DisagreementError, match="disagree on max_steps: replica 0 has 6, replica 1 has 7"):
        trainer_of(f"{folder}/uneven-{replica}", max_steps=6 + replica).train()
    return results


def run_sharded_then_whole(folder: str, ports: list[int]) -> list[str]:
    """The outputs of the example with two processes a replica, and in the first two of four with one."""
    rank = os.environ["DILOCO_REPLICA"]
    outputs = [run_example(folder, ports[0], 4, "sharded_replicas.py")]
    if int(rank) < 2:
        os.environ["DILOCO_REPLICA"] = rank
        flags = ("--num-shards", "1", "--resume")
        outputs.append(run_example(folder, ports[1], 2, "sharded_replicas.py", *flags))
    return outputs


def run_part(folder: str, *arguments: str) -> str:
    """The output of a process of the example of reinforcement learning."""
    end_with_parent()
    os.chdir(folder)
    sys.argv, output = ["rl_two_sites.py", *arguments], io.StringIO()
    with contextlib.redirect_stdout(output), warnings.catch_warnings():
        warnings.simplefilter("default")
        runpy.run_path(str(EXAMPLES / sys.argv[0]), run_name="__main__")
    return output.getvalue()


def run_rl_trainer(folder: str, replica: int, ports: list[int]) -> str:
    """The output of a trainer; replica 0 starts the rollout process, too."""
    address, port = f"127.0.0.1:{ports[0]}", str(ports[1])
    if replica == 0:
        rollouts = get_context("fork").Process(target=run_part, args=(folder, "rollouts", "--port", port))
        rollouts.daemon = True
        rollouts.start()
    flags = ("--replica", str(replica), "--address", address, "--url", f"http://127.0.0.1:{port}")
    return run_part(folder, "trainer", *flags)


def run_all(folder: str, ports: list[int]) -> Any:
    """Numbers 0 and 1 are replicas that are killed, 2 and 3 of the snippets, 4 to 7 and 8 to 9 of examples."""
    number = int(os.environ["DILOCO_REPLICA"])
    if number > 7:
        return run_rl_trainer(folder, number % 2, ports[-3:-1])
    os.environ |= {"DILOCO_NUM_REPLICAS": "2", "DILOCO_REPLICA": str(number % 4 if number > 3 else number % 2)}
    if number < 2:
        return train_replica(folder, ports[5:])
    if number < 4:
        return run_snippets(SNIPPETS, ports[2 : 2 + len(SNIPPETS)], folder)
    return run_sharded_then_whole(folder, ports[:2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def results(folder) -> list[Any]:
    """The results of `run_all` in each of its processes; the last two need trl."""
    arguments = (str(folder), [free_port() for _ in range(5 + 3 * len(KINDS) + 3)])
    number = 10 if len(KINDS) == 2 else 8
    return run_replicas(run_all, number, *arguments, joined=False, timeout_seconds=200, imports=IMPORTS)


@pytest.fixture(scope="module")
def trained(results) -> list[dict[str, dict[str, Any]]]:
    """The results of `train_replica` on each of two replicas."""
    return results[:2]


@pytest.mark.parametrize("kind", KINDS)
def test_two_replicas_are_killed_and_resume(trained, kind):
    first, second = (results[kind] for results in trained)
    assert_resumed((first, second), STEPS)
    assert first["bytes"] > 0
    assert first["after"] == second["after"]
    assert len(first["losses"]) == STEPS and first["losses"] != second["losses"], "each trains on its own data"
    assert len(first["evaluated"]) == 5 and first["evaluated"] == second["evaluated"], "they share Θ alone"
    assert first["evaluated"][-1] < first["evaluated"][0]


def test_the_snippets_of_frameworks_train_two_replicas(results, folder):
    hashes, others = results[2:4]
    assert hashes == others and len(set(hashes)) == len(SNIPPETS)
    assert (folder / "trained/replica-0/model.safetensors").exists()
    assert (folder / "tuned/replica-1/adapter_model.safetensors").exists() or len(SNIPPETS) == 2


def test_sharded_replicas_go_on_unsharded(results):
    outputs = itertools.zip_longest(*results[4:8], fillvalue="")
    output, resumed = map("".join, outputs)
    assert replicas_agree(output, num_processes=4) and replicas_agree(resumed, num_processes=2)
    (first, *_, last), (again, end) = losses(output), losses(resumed)
    assert last < 1 < first and again < first
    # Rank 0's loss is of half of the batch in one case, and of all of it in the other.
    assert end == pytest.approx(last, rel=0.3)


@pytest.mark.skipif(len(KINDS) < 2, reason="needs trl")
def test_two_trainers_learn_from_rollouts_of_a_process_that_follows(results, folder):
    files = (folder / "versions/versions").iterdir()
    headers = {int(file.name): VERSION.open(file.read_bytes(), file.name).header for file in files}
    assert replicas_agree("".join(results[8:]), num_processes=2)
    for output in results[8:]:
        ((first, last),) = re.findall(r"mean reward (\S+) of the first rollouts, (\S+) of the last", output)
        assert float(first) < 0.25 and float(last) > 0.6, "chance is 1 in 7"
        made_by = re.findall(r"step (\d+): .* version (\d+), digest (\w{64})\n", output)
        assert len(made_by) == 12
        for step, number, digest in made_by:
            assert headers[int(number)].digest == digest, "its publisher wrote it"
            assert 0 < int(step) - headers[int(number)].step <= 5, "the step was under way when it was made"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load_best_model_at_end": True}, "load_best_model_at_end=True would end with one replica's own"),
        ({"save_only_model": True}, "save_only_model=True would save one replica's own parameters"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint=True would save a checkpoint without the engine"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True would start again in mid-run"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True moves the model"),
        ({"fsdp": "full_shard"}, "fsdp=full_shard shards the model after the engine was built"),
        ({"deepspeed": "zero.json"}, "deepspeed=zero.json keeps weights of its own"),
        ({"push_to_hub": True}, "hub_strategy=every_save would push one replica's own parameters: set it to end"),
    ],
)
def test_arguments_that_would_lose_the_outer_parameters_are_refused(tmp_path, changes, message):
    callback, args = new_callback(), transformers.TrainingArguments(**arguments(str(tmp_path)))
    for name, value in changes.items():
        setattr(args, name, value)
    with pytest.raises(diloco.UserError, match=message):
        callback.on_init_end(args, transformers.TrainerState(), transformers.TrainerControl(), model=llama())


def test_a_callback_that_cannot_see_the_initial_parameters_is_refused(tmp_path):
    args = transformers.TrainingArguments(**arguments(str(tmp_path), eval_strategy="no"))
    late = transformers.Trainer(llama(), args, train_dataset=rows(0, 8))
    late.add_callback(new_callback())
    with pytest.raises(diloco.UserError, match="give DiLoCoCallback to the Trainer as one of its callbacks"):
        late.train()
    with pytest.raises(diloco.UserError, match="has made a new model for train"):
        trainer_of(str(tmp_path), model=None, model_init=llama).train()


def wrong_shapes(saved: dict[str, Any]) -> dict[str, Any]:
    outer = saved["engine"]["outer"]
    return saved | {"engine": saved["engine"] | {"outer": {name: value[..., :1] for name, value in outer.items()}}}


DAMAGED: dict[str, tuple[Callable[[dict[str, Any], Path], Any], str]] = {
    "a hostile pickle": (lambda _, marker: hostile_pickle(marker), "can't be read .*it is damaged, or holds"),
    "a hostile object": (lambda saved, marker: saved | {"engine": Hostile(marker)}, "can't be read .*holds more"),
    "no state": (lambda saved, _: saved | {"engine": 3}, "does not hold what this callback saves"),
    "an empty state": (lambda saved, _: saved | {"engine": {}}, "the state"),
    "wrong shapes": (lambda saved, _: wrong_shapes(saved), r"q_proj.weight is \(16, 1\)"),
    "the state of other parameters": (
        lambda saved, _: saved | {"parameters": "0"},
        "was saved with other parameters",
    ),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """The state in a checkpoint, of a trainer that trains no further."""
    folder = tmp_path_factory.mktemp("begun")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*was never sent", UserWarning)
        trainer = trainer_of(str(folder), max_steps=3)
        trainer.train()
    with pytest.raises(diloco.UserError, match="this engine has trained already: make a new Trainer"):
        trainer.train()
    return folder / "checkpoint-3" / "diloco.pt"


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_or_hostile_state_is_refused_and_runs_no_code(begun, tmp_path, name):
    make, sentence = DAMAGED[name]
    content = make(torch.load(begun, weights_only=True), tmp_path / "marker")
    shutil.copytree(begun.parent, tmp_path / "checkpoint-3")
    damaged = tmp_path / "checkpoint-3" / "diloco.pt"
    damaged.write_bytes(content) if isinstance(content, bytes) else torch.save(content, damaged)
    with pytest.raises(diloco.UserError, match=sentence) as refusal:
        trainer_of(str(tmp_path), max_steps=6).train(resume_from_checkpoint=str(damaged.parent))
    is_engines = name in ("an empty state", "wrong shapes", "the state of other parameters")
    assert isinstance(refusal.value, CheckpointError) != is_engines
    assert not (tmp_path / "marker").exists()


def test_a_checkpoint_elsewhere_is_refused(begun, tmp_path):
    with pytest.raises(diloco.UserError, match="does not exist: resume a checkpoint in output_dir"):
        trainer_of(str(tmp_path), max_steps=6).train(resume_from_checkpoint=str(begun.parent))


def test_a_checkpoint_with_a_parameter_that_was_frozen_in_training_is_resumed(tmp_path):
    class Freeze(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            model.lm_head.requires_grad_(False)

    def train(max_steps: int, **options: Any) -> int:
        trainer = trainer_of(str(tmp_path), eval_strategy="no", max_steps=max_steps)
        trainer.add_callback(Freeze())
        trainer.train(**options)
        return trainer.callback_handler.callbacks[1].engine.num_steps

    assert [train(9), train(12, resume_from_checkpoint=True)] == [9, 12]


def test_a_state_that_the_disk_can_not_take_names_its_path_and_bytes(tmp_path):
    from diloco.integrations.transformers import _save

    path = tmp_path / "diloco.pt"
    path.write_bytes(b"earlier")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(FileWriteError, match=f"can't write {path}: .*needs more than 400,000 bytes"):
            _save(path, {"outer": {"a": torch.zeros(100_000)}}, "")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"earlier" and list(tmp_path.iterdir()) == [path]


class ScheduleFree(torch.optim.SGD):
    """An optimizer with both methods that the Trainer looks for"""

    def eval(self) -> None: ...

    def train(self) -> None: ...


def test_an_optimizer_of_another_model_is_refused(tmp_path):
    optimizer = torch.optim.AdamW(llama().parameters())
    with pytest.raises(diloco.UserError, match="trains none of the parameters that the engine exchanges"):
        trainer_of(str(tmp_path), max_steps=1, optimizers=(optimizer, None)).train()


def test_evaluations_of_other_parameters_than_theta_are_refused(tmp_path):
    model = llama()
    schedule_free = ScheduleFree(model.parameters(), lr=0.1)
    with pytest.raises(diloco.UserError, match="a schedule-free optimizer evaluates parameters of its own"):
        trainer_of(str(tmp_path), model=model, optimizers=(schedule_free, None)).train()

    class Forgetful(transformers.Trainer):
        def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
            optimizer, self.optimizer = self.optimizer, None
            try:
                return super().evaluation_loop(*arguments, **options)
            finally:
                self.optimizer = optimizer

    with pytest.raises(diloco.UserError, match="evaluation_loop must call self"):
        trainer_of(str(tmp_path), kind=Forgetful).train()
