"""Rows of experiments that nobody has run."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from diloco.experiments.papers.experiment import Experiment


def made_up(
    one: Experiment, effect: Callable[[dict[str, Any]], float] = lambda labels: 1.0
) -> list[dict[str, Any]]:
    """A row for each run; losses fall with tokens and parameters, rise with the seed, and are multiplied by `effect`."""
    rows = []
    for number, run in enumerate(one.runs):
        config = run.config
        params = replace(config.model, vocab_size=config.model.vocab_size or 257).num_matrix_params
        loss = 30.0 * (params * config.num_tokens) ** -0.1 * (1 + 0.01 * run.labels["seed"]) * effect(run.labels)
        row = {**run.labels, "run": str(number), "eval_loss": loss, "num_params": params}
        row |= {"num_tokens": config.num_tokens}
        sign = 1 if effect(row) >= 1 else -1
        row |= {"eval_loss_replica": loss + 0.1 * sign, "eval_loss_average": loss + 0.01 * sign}
        row |= {f"cosine_{part}_third": 0.5 * sign for part in ("first", "middle", "last")}
        row |= {f"cosine_block_{block}": 0.4 for block in range(config.model.num_layers)}
        row |= {"piqa_val_acc": 0.5, "piqa_val_acc_replica": 0.4, "piqa_val_acc_average": 0.45}
        rows.append(row)
    return rows
