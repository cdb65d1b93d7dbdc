"""Rows of experiments that nobody has run."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from diloco.experiments.papers.experiment import Experiment
from diloco.experiments.runner.rows import CURVE, EMBEDDING_CURVE, LOSS, TENTHS


def made_up(
    one: Experiment, effect: Callable[[dict[str, Any]], float] = lambda labels: 1.0
) -> list[dict[str, Any]]:
    """A row for each run; its loss falls with tokens and parameters, rises with the seed, and has an effect."""
    rows = []
    for number, run in enumerate(one.runs):
        config = run.config
        params = replace(config.model, vocab_size=config.model.vocab_size or 257).num_matrix_params
        row = {**run.labels, "run": str(number), "num_params": params}
        row |= {"num_tokens": config.num_tokens, "num_steps": config.num_steps}
        loss = 30.0 * (params * config.num_tokens) ** -0.1 * (1 + 0.01 * run.labels["seed"]) * effect(row)
        row["eval_loss"] = loss
        row |= {f"{LOSS}{percent}": loss * (1.5 - percent / 200) for percent in (25, 50, 75)}
        row |= {"bytes_sent_per_replica": 1 + number, "data_parallel_bytes_per_replica": 10**6}
        sign = 1 if effect(row) >= 1 else -1
        row |= {"eval_loss_replica": loss + 0.1 * sign, "eval_loss_average": loss + 0.01 * sign}
        row |= {
            f"{curve}{at:02}": sign * (0.1 * (1 - at / 50) - 0.001 * math.log10(params))
            for curve in (CURVE, EMBEDDING_CURVE)
            for at in TENTHS
        }
        row |= {f"cosine_block_{block}": sign * (0.4 - 0.01 * block) for block in range(config.model.num_layers)}
        row |= {"piqa_val_acc": 0.5, "piqa_val_acc_replica": 0.4, "piqa_val_acc_average": 0.45}
        rows.append(row)
    return rows
