"""Refuse sizes that no memory, or not this machine's, can hold, before anything of them is allocated."""

from collections.abc import Mapping

from diloco.errors import UserError
from diloco.files import memory_bytes
from diloco.models.spec import ModelConfig
from diloco.training.config import TrainConfig


def check_sizes(config: TrainConfig, *, here: bool) -> None:
    """Compare the model's parameters, a batch and its logits with a machine's memory.

    These are lower bounds: optimizer, gradients and activations take several times as much.

    Args:
        config: with its vocabulary, as `resolve` fills it in.
        here: True compares with the memory of this machine, on which the run takes place; False with the largest
            that a machine may have.

    Raises:
        UserError: with the fields and the bytes that they ask for.
    """
    model, length = config.model, config.sequence_length
    micro_batch = config.micro_batch or config.process_batch
    needs = {
        ("sequence_length", "global_batch"): (8 * config.process_batch * (length + 1), "tokens of one step"),
        ("sequence_length", "micro_batch", "model.vocab_size"): (
            logit_bytes(config) * micro_batch * length * model.vocab_size,
            "logits of one pass",
        ),
        ("evaluation.batch", "sequence_length", "model.vocab_size"): (
            logit_bytes(config) * config.evaluation.batch * length * model.vocab_size,
            "logits of one batch of the evaluation",
        ),
    }
    check_model(model, here=here)
    values = {
        **{
            "model.vocab_size": model.vocab_size,
            "sequence_length": length,
            "global_batch": config.global_batch,
            "micro_batch": micro_batch,
        },
        **{"evaluation.batch": config.evaluation.batch},
    }
    for fields, (num_bytes, content) in needs.items():
        _check({name: values[name] for name in fields}, num_bytes, content, here=here)


def logit_bytes(config: TrainConfig) -> int:
    """Bytes of a logit; where a device decides on autocast, the fewer."""
    return 4 if config.precision == "fp32" else 2


def check_model(model: ModelConfig, *, here: bool) -> None:
    """Compare a model's parameters alone; arguments and errors as those of `check_sizes`."""
    values = {f"model.{name}": getattr(model, name) for name in model.size_fields}
    _check(values, 4 * model.num_matrix_params, "parameters", here=here)


def _check(values: Mapping[str, int | str], num_bytes: int, content: str, *, here: bool) -> None:
    memory = memory_bytes() if here else _LARGEST_MEMORY_BYTES
    whose = "this machine has" if here else "no machine has more than"
    if num_bytes > memory:
        asked = ", ".join(f"{name}={value}" for name, value in values.items())
        raise UserError(
            f"{asked}: the {content} alone take {num_bytes:,} bytes, and {whose} {memory:,} bytes of memory: "
            "choose smaller sizes",
            *sorted(values, key=lambda name: (isinstance(size := values[name], int) and size) or 0, reverse=True),
        )


_LARGEST_MEMORY_BYTES = 1 << 46
