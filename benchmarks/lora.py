"""Fine-tune a LoRA adapter with trl's SFTTrainer: two replicas against one replica with the double batch.

    python benchmarks/lora.py --pretrain BOOKS.jsonl --train ARTICLES.jsonl --held-out HELD_OUT.jsonl

A tiny Llama is pretrained on one kind of text for a moment, and fine-tuned on another. Every replica has half of
the articles and half of the batch; all runs take the same number of steps. Prints the held-out loss of each, and
the bytes that one replica sends, beside those of Data-Parallel for the same adapter: FP32 gradients in a ring at
every step.
"""

import argparse
import json
import math
import os
import socket
import tempfile
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import datasets
import torch
import transformers
from peft import LoraConfig
from tokenizers import ByteLevelBPETokenizer
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import diloco
from diloco.integrations.transformers import DiLoCoCallback

VOCABULARY, SEQUENCE = 1024, 128
MOST_CHARACTERS = 8_000
"""A longer document is cut, so that tokenizing takes less time than training."""


@dataclass(frozen=True)
class Run:
    """One SFTTrainer: a replica, or one that trains alone."""

    batch: int
    """Sequences a step."""
    shard: tuple[int, int] = (0, 1)
    """The replica's part of the training data, and the number of parts."""
    address: str | None = None
    """The address at which the replicas meet; None trains alone."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--pretrain", "--train", "--held-out"):
        parser.add_argument(name, type=Path, required=True, help="a .jsonl with a field `text`")
    parser.add_argument("--pretrain-steps", type=int, default=200)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--sync-every", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step of each replica")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as folder:
        address, batch = f"127.0.0.1:{free_port()}", arguments.batch
        with get_context("fork").Pool(2) as pool:  # while this process has no thread of torch
            pool.apply(pretrain, (arguments, folder))
            run = partial(fine_tune, arguments, folder)
            double, alone = pool.map(run, [Run(2 * batch), Run(batch)], chunksize=1)
            diloco_, same = pool.map(run, [Run(batch, (r, 2), address) for r in range(2)], chunksize=1)
            pool.close()  # the block's end would kill the processes before they release their semaphores
            pool.join()
    assert diloco_["hash"] == same["hash"], "the replicas share one adapter"
    data_parallel = arguments.steps * 4 * diloco_["parameters"]
    print(f"adapter of {diloco_['parameters']:,} parameters, {arguments.steps} steps, H = {arguments.sync_every}")
    print(f"{'':42}{'held-out loss':>14}{'bytes sent':>14}")
    for name, loss, num_bytes in (
        ("the model before", double["before"], 0),
        ("one replica", alone["loss"], 0),
        ("one replica, double batch (Data-Parallel)", double["loss"], data_parallel),
        ("two replicas, DiLoCo", diloco_["loss"], diloco_["bytes"]),
    ):
        print(f"{name:42}{loss:14.4f}{num_bytes:14,}")
    print(f"DiLoCo sends {data_parallel / max(diloco_['bytes'], 1):.0f}× fewer bytes than Data-Parallel")


def pretrain(arguments: argparse.Namespace, folder: str) -> None:
    """Save a tokenizer and a model of the first text."""
    documents = texts(arguments.pretrain)[:400]
    byte_pairs = ByteLevelBPETokenizer()
    byte_pairs.train_from_iterator(documents, VOCABULARY, special_tokens=["<pad>", "<eos>"], show_progress=False)
    fast = PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=byte_pairs._tokenizer, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=SEQUENCE,
        pad_token_id=byte_pairs.token_to_id("<pad>"),
        eos_token_id=byte_pairs.token_to_id("<eos>"),
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    model, steps = LlamaForCausalLM(config), arguments.pretrain_steps
    tokens = torch.tensor(byte_pairs.encode("\n".join(documents)).ids)
    windows = tokens[: len(tokens) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: math.cos(math.pi / 2 * t / max(steps, 1)))
    for _ in range(steps):
        batch = windows[torch.randint(len(windows), (16,))]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(folder)


def fine_tune(arguments: argparse.Namespace, folder: str, run: Run) -> dict:
    """The held-out loss of one SFTTrainer, and what it has sent."""
    replica, num_replicas = run.shard
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()

    def build(model: nn.Module) -> diloco.StreamingDiLoCo:
        fragments = diloco.strided(model, layers_per_fragment=2)
        return diloco.StreamingDiLoCo(
            model,
            fragments=fragments,
            schedule=diloco.Schedule(
                sync_every=arguments.sync_every, num_fragments=len(fragments), overlap_steps=2
            ),
            exchange=diloco.connect(run.address, replica=replica, num_replicas=num_replicas),
        )

    train, held_out = (
        datasets.Dataset.from_dict({"text": texts(path)}) for path in (arguments.train, arguments.held_out)
    )
    callback = None if run.address is None else DiLoCoCallback(build)
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        args=SFTConfig(
            output_dir=f"{folder}/{run.batch}-{replica}-of-{num_replicas}",
            max_steps=arguments.steps,
            per_device_train_batch_size=run.batch,
            per_device_eval_batch_size=32,
            learning_rate=arguments.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=min(10, arguments.steps // 10),
            max_length=SEQUENCE,
            packing=True,
            packing_strategy="wrapped",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=train.shard(num_replicas, replica),
        eval_dataset=held_out,
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=None if callback is None else [callback],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    assert trainer.model is not None
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return {
        "before": before,
        "loss": trainer.evaluate()["eval_loss"],
        "parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "bytes": 0 if callback is None else callback.engine.bytes_sent,
        "hash": "" if callback is None else callback.engine.outer_hash(),
    }


def texts(path: Path) -> list[str]:
    with path.open() as file:
        return [json.loads(line)["text"][:MOST_CHARACTERS] for line in file]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    main()
