"""Reinforcement learning in two places: GRPO by two trainers, rollouts by a process that follows them.

The trainers share one policy, Θ. Replica 0 publishes Θ after every outer step, and the rollout process, which may
be anywhere that reads the store, follows it. Rollouts name their policy: the version, and the hash of its Θ, which
is the same on both trainers. A trainer takes only rollouts of a Θ that it has had itself, a few steps ago at most.
The task: repeat the digit of the prompt. Start three processes:

    python examples/rl_two_sites.py rollouts
    python examples/rl_two_sites.py trainer --replica 0
    python examples/rl_two_sites.py trainer --replica 1

On several machines, `--address` is one of replica 0's machine and `--url` the rollout process's, both of which the
trainers reach, and the store is a bucket, such as `--store s3://bucket/versions`.
"""

import argparse
import json
import os
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback, set_seed

import diloco

SYNC_EVERY, NUM_STEPS = 4, 48
MOST_STEPS_BEHIND = SYNC_EVERY  # of the policy of rollouts; a trainer waits for newer ones
NUM_DIGITS, NUM_TOKENS = 5, 8  # of the vocabulary; of a completion


def policy() -> Any:
    """A tiny model of digits, with the same initial parameters everywhere."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=NUM_DIGITS + 2,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=NUM_DIGITS,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


# --8<-- [start:rollouts]
def serve_rollouts(store: str, port: int) -> None:
    """Answer prompts with completions by the newest policy in the store."""
    model, follower = policy().eval(), diloco.Follower(store)

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            prompts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            follower.load_into(model)
            if follower.version is None:
                self.send_error(503, "nothing is published yet")
                return
            version = follower.version
            made_by = {"version": version.number, "digest": version.digest, "step": version.step, **version.facts}
            content = json.dumps({"made_by": made_by, "rollouts": complete(model, prompts)}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None: ...

    HTTPServer(("", port), Answer).serve_forever()


# --8<-- [end:rollouts]


def complete(model: Any, prompts: list[str]) -> dict[str, Any]:
    """Completions, and the log probabilities of their tokens, as a `rollout_func` of trl returns them."""
    prompt_ids = torch.tensor([[int(prompt)] for prompt in prompts])
    output = model.generate(
        prompt_ids, max_new_tokens=NUM_TOKENS, do_sample=True, output_logits=True, return_dict_in_generate=True
    )
    completion_ids = output.sequences[:, 1:]
    logprobs = torch.stack(output.logits, 1).log_softmax(-1).gather(-1, completion_ids[..., None])[..., 0]
    tensors = {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}
    return {name: tensor.tolist() for name, tensor in tensors.items()}


# --8<-- [start:publish]
class Publish(TrainerCallback):
    """Notes the hash of each Θ; replica 0 publishes it, too."""

    def __init__(self, engine: diloco.StreamingDiLoCo, publisher: diloco.Publisher | None) -> None:
        self.engine, self.publisher = engine, publisher
        self.hashes: dict[int, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % SYNC_EVERY == 0:
            self.note(state.global_step)

    def note(self, step: int) -> None:
        self.hashes[step] = self.engine.outer_hash()
        if self.publisher:
            facts = {"outer_hash": self.hashes[step]}
            self.publisher.publish(self.engine.outer_parameters(), step=step, facts=facts)


# --8<-- [end:publish]


# --8<-- [start:rollout_func]
class Rollouts:
    """Takes completions from the rollout process, and checks which policy made them: a `rollout_func` of trl."""

    def __init__(self, url: str, hashes: dict[int, str]) -> None:
        self.url, self.hashes = url, hashes
        self.made_by: dict[str, Any] = {}
        self.num_refused = 0

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(self.url, json.dumps(prompts).encode(), timeout=60) as answer:
                    content = json.load(answer)
            except OSError:  # it has not started, or nothing is published
                time.sleep(0.5)
                continue
            self.made_by, num_steps = content["made_by"], trainer.state.global_step
            behind = num_steps - self.made_by["step"]
            if self.hashes.get(self.made_by["step"]) == self.made_by["outer_hash"] and behind <= MOST_STEPS_BEHIND:
                return {**content["rollouts"], "steps_behind": [behind] * len(prompts)}
            self.num_refused += len(prompts)
            time.sleep(0.1)
        raise TimeoutError(f"{self.url} had no rollouts of a policy of this run that is new enough")


def reward(prompts: list[str], completion_ids: list[list[int]], **fields: Any) -> list[float | None]:
    """The share of a completion that is the prompt's digit."""
    fields["log_metric"]("steps_behind", sum(fields["steps_behind"]) / len(prompts))
    return [ids.count(int(prompt)) / len(ids) for prompt, ids in zip(prompts, completion_ids, strict=True)]


# --8<-- [end:rollout_func]


class Report(TrainerCallback):
    """Prints the reward, and the policy of the rollouts."""

    def __init__(self, replica: int, rollouts: Rollouts) -> None:
        self.replica, self.rollouts = replica, rollouts

    def on_log(self, args: Any, state: Any, control: Any, **fields: Any) -> None:
        logs = fields["logs"]
        if "reward" in logs:
            made_by = "version {version}, digest {digest}".format(**self.rollouts.made_by)
            print(f"replica {self.replica}, step {state.global_step}: reward {logs['reward']:.3f}; {made_by}")


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {**{str(digit): digit for digit in range(NUM_DIGITS)}, "<pad>": NUM_DIGITS, "<eos>": NUM_DIGITS + 1}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<pad>")), pad_token="<pad>", eos_token="<eos>"
    )


def train(replica: int, address: str, store: str, url: str) -> None:
    """Train one replica, and print the mean reward at the start and at the end."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # trl says of rollout_func that it may change
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from diloco.integrations.transformers import DiLoCoCallback

    digits = Dataset.from_dict({"prompt": [str(digit) for digit in range(NUM_DIGITS)] * 20})
    arguments = GRPOConfig(
        f"trained/replica-{replica}",
        max_steps=NUM_STEPS,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        per_device_train_batch_size=64,
        steps_per_generation=SYNC_EVERY,  # rollouts for the inner steps up to the next Θ
        num_generations=8,
        max_completion_length=NUM_TOKENS,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        seed=replica,
    )

    # --8<-- [start:trainer]
    def engine(model: torch.nn.Module) -> diloco.StreamingDiLoCo:
        return diloco.StreamingDiLoCo(
            model,
            fragments="whole",
            sync_every=SYNC_EVERY,
            overlap_steps=0,
            outer="sgd:lr=1",  # the average, since few inner steps lie between two
            mixing=0.0,  # a trainer goes on from Θ, the policy of the rollouts
            exchange=diloco.connect(address, replica=replica, num_replicas=2),
        )

    callback = DiLoCoCallback(engine)
    trainer = GRPOTrainer(
        policy(),
        reward,
        arguments,
        train_dataset=digits.shard(2, replica),
        processing_class=tokenizer(),
        callbacks=[callback],
        rollout_func=lambda prompts, trainer: rollouts(prompts, trainer),
    )
    publish = Publish(callback.engine, diloco.Publisher(store) if replica == 0 else None)
    rollouts = Rollouts(url, publish.hashes)
    trainer.add_callback(publish)
    # --8<-- [end:trainer]
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Report(replica, rollouts))
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    outer_hash = callback.engine.outer_hash()[:16]
    print(f"replica {replica}: mean reward {rewards[0]:.3f} of the first rollouts, {rewards[-1]:.3f} of the last")
    print(f"replica {replica}: {rollouts.num_refused} rollouts refused; outer hash {outer_hash}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["rollouts", "trainer"])
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--address", default="127.0.0.1:29500", help="host:port of replica 0")
    parser.add_argument("--store", default="versions", help="where the versions are")
    parser.add_argument("--url", default="http://127.0.0.1:8765", help="of the rollout process")
    parser.add_argument("--port", type=int, default=8765, help="on which the rollout process listens")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "rollouts":
        serve_rollouts(options.store, options.port)
    else:
        train(options.replica, options.address, options.store, options.url)
