"""An SFTTrainer of one replica, with a LoRA adapter."""

import os

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

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
words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, **{str(i): i for i in range(2, 64)}}, "<eos>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
texts = [" ".join(str(2 + (start + i) % 62) for i in range(16)) for start in range(64)]
dataset = Dataset.from_dict({"text": texts})
training_args = SFTConfig(
    output_dir=f"tuned/replica-{replica}", max_steps=20, report_to="none", use_cpu=True, bf16=False
)


def engine(model: torch.nn.Module) -> diloco.StreamingDiLoCo:
    return diloco.StreamingDiLoCo(
        model, fragments="strided", sync_every=5, overlap_steps=2, exchange=diloco.connect()
    )


# --8<-- [start:trainer]
callback = DiLoCoCallback(engine)
trainer = SFTTrainer(
    model,
    args=training_args,
    train_dataset=dataset.shard(num_replicas, replica),  # changed
    processing_class=tokenizer,
    peft_config=LoraConfig(),
    callbacks=[callback],  # added
)
trainer.train()
trainer.save_model()
# --8<-- [end:trainer]
outer_hash = callback.engine.outer_hash()
