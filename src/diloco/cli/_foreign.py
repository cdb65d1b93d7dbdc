"""Words of other programs, and what to type here: flags, their values, and commands."""

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from diloco.errors import nearest

NAMES = {
    "address": "bind host listen",
    "checkpoint.every_steps": "checkpoint_every checkpoint_interval interval save_every save_interval save_steps",
    "compile": "torch_compile",
    "config": "config_file",
    "data.held_out": "eval_file val_file validation_file",
    "data.tokenizer": "hf_assets_path tokenizer_name tokenizer_name_or_path tokenizer_path",
    "data.train": "corpus data data_dir data_path dataset dataset_name dataset_path text train_file",
    "device": "accelerator device_type",
    "diloco.mixing": "alpha fragment_update_alpha",
    "diloco.outer_learning_rate": "eta outer_lr server_lr",
    "diloco.outer_momentum": "mu server_momentum",
    "diloco.overlap_steps": "delay fragment_sync_delay tau",
    "diloco.sync_every": "h inner_steps local_steps num_inner_steps sync_interval",
    "diloco.wire": "codec compression quantization",
    "epochs": "max_epochs n_epochs num_epochs num_train_epochs",
    "evaluation.every_steps": "eval_every eval_interval eval_steps val_check_interval val_interval",
    "flops_per_second": "flops tflops",
    "global_batch": "batch_size bs global_batch_size total_batch_size train_batch_size",
    "latency_seconds": "latency",
    "link": "bandwidth link_gbit_s link_mbit_s network upload uplink",
    "max_tokens": "max_length max_new_tokens",
    "micro_batch": "device_batch_size local_batch_size micro_batch_size per_device_train_batch_size",
    "model.hf": "base_model checkpoint_path model model_id model_name model_name_or_path pretrained",
    "model.num_heads": "heads n_head n_heads num_attention_heads num_heads",
    "model.num_layers": "depth layers n_layer n_layers num_hidden_layers",
    "model.width": "d_model dim embed_dim hidden_size n_embd",
    "name": "experiment_name id replica_id replica_name run run_id run_name",
    "num_params": "model_size n_params num_parameters parameters params size",
    "num_replicas": "devices gpus nproc_per_node num_gpus num_processes replicas workers world_size",
    "num_tokens": "tokens",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.clip_norm": "clip clip_grad_norm grad_clip gradient_clip_val max_grad_norm max_norm",
    "optimizer.momentum": "muon_momentum",
    "optimizer.name": "inner_optimizer optim optimizer_name optimizer_type",
    "optimizer.learning_rate": "inner_lr lr matrix_lr max_lr peak_lr",
    "optimizer.schedule": "lr_schedule lr_scheduler lr_scheduler_type scheduler",
    "optimizer.warmup_steps": "num_warmup_steps warmup warmup_iters",
    "optimizer.weight_decay": "wd",
    "output": "dest out",
    "rendezvous": "bucket s3 store store_url",
    "resume": "ckpt_path load restore resume_from resume_from_checkpoint",
    "runs": "default_root_dir dump_folder log_dir logdir out out_dir output output_dir save_dir",
    "sequence_length": "block_size context_length max_length max_seq_len max_seq_length seq_len seqlen",
    "shards_per_replica": "fsdp",
    "ddp_per_replica": "ddp",
    "temperature": "temp",
    "to": "format type",
    "trackers": "logger report_to",
}
"""The names of other programs for a setting of ours."""
SENTENCES = {
    "accumulate_grad_batches grad_accum grad_accum_steps gradient_accumulation gradient_accumulation_steps": (
        "the sequences of a pass are given, not the passes: --micro-batch {micro_batch}"
    ),
    "iterations iters max_iters max_steps max_train_steps num_iterations num_steps steps train_steps": (
        "the length of a run is given in tokens: --num-tokens {num_tokens}"
    ),
    "ping rtt": "half of the round trip is given, in seconds: --latency-seconds 0.01 for 20 ms",
    "target_param_data_ratio": "the length of a run is given in tokens, the ratio times N: --num-tokens",
    "warmup_ratio": "the warm-up is given in steps: --optimizer.warmup-steps {warmup_steps}",
    "amp bf16 dtype mixed_precision torch_dtype": "type --precision bf16, auto or fp32",
    "fp16 half": "there is bf16 in its place: --precision bf16",
    "use_wandb wandb wandb_log wandb_project wandb_run_name": "type --trackers wandb",
    "tb tensorboard": "type --trackers tensorboard",
    "mlflow": "type --trackers mlflow",
    "lr_decay min_lr min_lr_ratio": "the last learning rate is a part of the peak: --optimizer.final-fraction 0.1",
    "dropout attention_dropout": "the models have no dropout: leave it out",
    "log_every log_interval logging_steps": "every step is in metrics-0.jsonl: leave it out",
    "deepspeed tensor_parallel tp zero": "type --shards-per-replica 2 to shard each replica over 2 processes",
    "activation_checkpointing gradient_checkpointing": (
        "there is none: for less memory type a smaller --micro-batch, or --diloco.offload"
    ),
    "debug n q quiet v verbose": "leave it out; DILOCO_TRACEBACK=1 shows where an error comes from",
    "backend": "--device decides: gloo on CPUs, NCCL within a replica of GPUs; leave it out",
    "address addr head_addr host hosts master_addr master_port nnodes node_rank peer port rank server": (
        "for several machines, torchrun takes these flags: torchrun … -m diloco train …; or each machine takes "
        "--rendezvous s3://bucket/run"
    ),
    "dataloader_num_workers num_workers": (
        "no other process reads the text: leave it out; replicas are set by --num-replicas"
    ),
    "init_from": "--resume RUN goes on with a run, --model.hf NAME with other weights",
    "override overrides set": "each setting has a flag of its own, such as --diloco.sync-every 5",
    "no_cuda use_cpu": "type --device cpu",
    "cuda gpu": "type --device cuda",
}
"""The flags of other programs that another flag does not simply replace, and what to do; in braces: numbers."""
VALUES = {
    "device": {"gpu": "cuda", "metal": "mps"},
    "precision": {
        **dict.fromkeys(("16", "16-mixed", "amp", "bfloat16", "bf16-mixed", "fp16", "half", "mixed"), "bf16"),
        **dict.fromkeys(("32", "float32", "full"), "fp32"),
    },
    "method": {
        **dict.fromkeys(("allreduce", "baseline", "ddp", "dp"), "data_parallel"),
        **dict.fromkeys(
            ("federated_averaging", "fedavg", "local_sgd", "localsgd", "post_local_sgd"),
            "type --method diloco --diloco.outer-learning-rate 1 --diloco.outer-momentum 0",
        ),
        **dict.fromkeys(("fsdp", "zero"), "type --shards-per-replica 2 to shard each replica of any method"),
        "opendiloco": "diloco",
        **dict.fromkeys(("streaming_diloco", "streamingdiloco"), "streaming_overlapped_fp4"),
    },
    "optimizer.name": {
        **dict.fromkeys(("adam", "adamw_torch", "adamw_torch_fused", "fused_adamw"), "adamw"),
        **dict.fromkeys(("adamw_schedule_free", "schedule_free_adamw", "schedulefree"), "schedule_free"),
    },
    "diloco.fragments": {"none": "whole", "all": "whole", "layers": "strided"},
    "to": {
        "gguf": "type --to hf, from which llama.cpp's convert_hf_to_gguf.py makes GGUF, if it knows the class",
        **dict.fromkeys(("huggingface", "onnx", "transformers"), "hf"),
    },
    "trackers": {"tb": "tensorboard", "none": ""},
}
"""The values of other programs for a setting of ours, or a sentence with what to do."""
COMMANDS = {
    "continue resume": "diloco train --resume {RUN}",
    "fine-tune finetune fit go launch pretrain run sft start": "diloco train {RECIPE}",
    "connect join peer worker": "diloco train --rendezvous {STORE} --name NAME",
    "benchmark_model evaluate lm_eval lm-eval score test validate": "diloco eval {RUN}",
    "complete infer inference prompt sample write": "diloco generate {RUN}",
    "ask talk": "diloco chat {RUN}",
    "dashboard info list log logs ls monitor ps show status tail tensorboard ui web": (
        "diloco watch {RUNS}, or diloco watch {RUNS} --serve for a page in the browser"
    ),
    "serve server": "diloco chat {RUN} --serve to talk to its model, or diloco watch {RUNS} --serve for curves",
    "graph plots plot": "diloco report {RUN}",
    "calc calculate estimate": "diloco plan",
    "predict": "diloco generate {RUN}, or diloco scaling predict for the loss to expect",
    "prepare preprocess tokenize download": "diloco data prepare --train FILES --output DIRECTORY",
    "convert push push_to_hub upload": "diloco export {RUN} --to hf --output DIRECTORY",
    "kill stop cancel": "Ctrl-C in the terminal of the run; diloco train --resume RUN goes on with it",
    "delete remove rm clean": "rm -r RUN, since a run is a directory",
    "config init login setup": "diloco train laptop, since there is nothing to set up",
    "accelerate python python3 torchrun": "diloco train RECIPE, or torchrun … -m diloco train RECIPE",
    "coordinator master": "diloco train RECIPE --rendezvous STORE, since no process is the master",
    "diloco": "diloco {rest}",
    "help": "diloco {rest} --help",
    "version": "diloco --version",
}
"""The commands of other programs, and what to type; in braces: the words that follow, or a name."""
CHOICES = {
    "add": "allow",
    "create": "new",
    "generate": "new",
    "grant": "allow",
    "remove": "revoke",
    "delete": "revoke",
    "list": "status",
    "ls": "status",
    "show": "status",
    "test": "check",
    "validate": "verify",
    "prep": "prepare",
    "tokenize": "prepare",
    "plot": "pictures",
    "codec": "wire",
}
"""The words of other programs for the second word of a command."""


def our_names(name: str) -> Iterator[str]:
    """The settings that other programs call so, in any section."""
    last = name.rpartition(".")[2].lower()
    return (ours for ours, theirs in NAMES.items() if last in theirs.split())


def sentence(name: str, numbers: Mapping[str, str]) -> str | None:
    """The answer to a flag that no other flag replaces; None where there is none.

    Args:
        name: the flag's dotted name.
        numbers: the values in braces; those that are not known stand as capitals.
    """
    last = name.rpartition(".")[2].lower()
    text = next((text for theirs, text in SENTENCES.items() if last in theirs.split()), None)
    return text and text.format_map(_Named(numbers))


def value(field: str, word: str, choices: Collection[str]) -> str:
    """The words after a value that a setting does not take: the choice that it was meant for, if one is known.

    >>> value("device", "cuda:1", ["auto", "cpu", "cuda"]), value("method", "data-parallel", ["data_parallel"])
    (': did you mean cuda?', ': did you mean data_parallel?')
    """
    plain = word.lower().partition(":")[0].replace("-", "_")
    table = VALUES.get(field, {})
    meant = table.get(word.lower()) or table.get(plain) or ""
    if "--" in meant:
        return f": {meant}"
    return f": did you mean {meant}?" if meant in choices else nearest(plain, choices)


def command(words: Sequence[str]) -> str | None:
    """The command to type in the place of one that another program has; None where there is none.

    >>> command(["resume", "runs/a"]), command(["resume"])
    ('diloco train --resume runs/a', 'diloco train --resume RUN')
    """
    text = next((text for theirs, text in COMMANDS.items() if words[0].lower() in theirs.split()), None)
    rest = [word for word in words[1:] if words[0] in ("diloco", "help") or not word.startswith("-")]
    if text is None or (words[0] in ("diloco", "help") and not rest):
        return text and "diloco --help"
    following = shlex.join(rest)
    names = {"RUNS": "runs", "rest": ""} if not following else dict.fromkeys(("RUNS", "rest"), following)
    own = {name: following for name in ("RUN", "RECIPE", "STORE") if following}
    return text.format_map(_Named(names | own))


class _Named(dict[str, Any]):
    """Values for a text; one that is missing stands as its own name in capitals."""

    def __missing__(self, name: str) -> str:
        return name.upper()
