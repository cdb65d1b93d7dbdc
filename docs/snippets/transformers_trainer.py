"""A Trainer of one replica: each replica's job has DILOCO_ADDRESS, DILOCO_REPLICA and DILOCO_NUM_REPLICAS."""

import os

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import diloco
from diloco.integrations.transformers import DiLoCoCallback

replica, num_replicas = int(os.environ["DILOCO_REPLICA"]), int(os.environ["DILOCO_NUM_REPLICAS"])
set_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    pad_token_id=0,
)
model = LlamaForCausalLM(config)
tokens = ((torch.randint(64, (80, 1)) + torch.arange(16)) % 64).tolist()
dataset = Dataset.from_dict({"input_ids": tokens, "labels": tokens}).train_test_split(test_size=16, seed=0)
training_args = TrainingArguments(
    output_dir=f"trained/replica-{replica}",
    max_steps=20,
    eval_strategy="steps",
    eval_steps=10,
    save_steps=10,
    report_to="none",
    use_cpu=True,
)


# --8<-- [start:engine]
def engine(model: torch.nn.Module) -> diloco.StreamingDiLoCo:
    return diloco.StreamingDiLoCo(
        model, fragments="strided", sync_every=5, overlap_steps=2, exchange=diloco.connect()
    )


# --8<-- [end:engine]

# --8<-- [start:trainer]
callback = DiLoCoCallback(engine)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=dataset["train"].shard(num_replicas, replica),  # changed
    eval_dataset=dataset["test"],
    callbacks=[callback],  # added
)
trainer.train()
trainer.save_model()
# --8<-- [end:trainer]
outer_hash = callback.engine.outer_hash()
