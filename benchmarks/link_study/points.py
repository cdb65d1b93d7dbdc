"""Medians of the rows of `links.py`: a point for each method and bandwidth.

Shapes: S steps, M replicas.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from diloco.training.config.config import TrainConfig

from .methods import PEER, UNLIMITED_MBIT_S, is_training, num_fragments
from .prediction import with_predictions
from .rows import Key, Row, key


def points(rows: Sequence[Row], alone: Mapping[Key, np.ndarray], config: TrainConfig) -> list[Row]:
    """Medians over the repeats for each method and bandwidth; Data-Parallel with its best bucket size."""
    by_key = {key(row): row for row in rows}
    repeats: dict[tuple[float, str], list[Row]] = defaultdict(list)
    own_seconds = _own_seconds(rows, alone, config)
    for row in rows:
        if is_training(row["method"]) and row["mbit_s"] != UNLIMITED_MBIT_S:
            wire = "bf16" if row["method"].startswith("data_parallel_bf16") else "fp32"
            all_reduce = by_key.get((row["repeat"], row["mbit_s"], f"all_reduce:{wire}"))
            predicted = with_predictions(row, alone[key(row)], all_reduce, config, own_seconds)
            predicted["seconds_per_step"] = row["wall_seconds"] / row["measured_steps"]
            steps = row["warm_steps"] + row["measured_steps"]
            predicted["megabytes_per_step"] = 1e-6 * row["interface_bytes"] / steps
            repeats[row["mbit_s"], row["method"]].append(predicted)
    best: dict[tuple[float, str], Row] = {}
    for point in map(_median, repeats.values()):
        name = point["method"]
        name = name.partition(":")[0] if name.startswith("data_parallel") else name
        at = point["mbit_s"], name
        if at not in best or point["seconds_per_step"] < best[at]["seconds_per_step"]:
            best[at] = point | {"method": name, "variant": point["method"]}
    return sorted(best.values(), key=lambda point: (point["mbit_s"], -point["seconds_per_step"]))


def _own_seconds(rows: Sequence[Row], alone: Mapping[Key, np.ndarray], config: TrainConfig) -> float:
    """The peer's own time at an outer step: its quorum, copies, votes and threads."""
    unlimited = [row for row in rows if row["method"] == PEER and row["mbit_s"] == UNLIMITED_MBIT_S]
    lost_a_step = [
        row["wall_seconds"] / row["measured_steps"] - float(alone[key(row)].mean()) for row in unlimited
    ]
    stretch = config.diloco.sync_every / num_fragments(PEER, config)
    return stretch * max(0.0, statistics.median(lost_a_step)) if lost_a_step else 0.0


def _median(rows: list[Row]) -> Row:
    point = {
        name: statistics.median(row[name] for row in rows)
        for name, value in rows[0].items()
        if isinstance(value, float | int) and all(row.get(name) not in ("", None) for row in rows)
    }
    utilizations = [row["utilization"] for row in rows]
    spread = {"lowest": min(utilizations), "highest": max(utilizations), "repeats": len(rows)}
    losses = [row["eval_loss"] for row in rows if row.get("eval_loss") not in ("", None)]
    known = {"eval_loss": losses[0]} if losses else {}
    return point | {"method": rows[0]["method"], "mbit_s": rows[0]["mbit_s"], **spread, **known}
