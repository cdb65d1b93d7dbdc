"""Ray Train: each replica is a `TorchTrainer` of its own, and all resume from the same step."""

from diloco.errors import UserError
from diloco.exchange.transport import Transport, share
from diloco.files import requiring

with requiring("ray", extra="ray"):
    import ray.train

STEP = "num_steps"
"""The metric that must be reported with each checkpoint: `engine.num_steps`."""


def common_checkpoint(exchange: Transport) -> ray.train.Checkpoint | None:
    """The newest checkpoint whose step every replica has reported; None if one has reported none.

    `ray.train.get_checkpoint()` gives this replica's newest, and the others' may be of another step: Ray restarts
    each TorchTrainer by itself. Every process of every replica calls this inside its train_loop_per_worker.

    Args:
        exchange: what `diloco.connect` returned.

    Raises:
        UserError: if a checkpoint was reported without the metric `num_steps`, or Ray keeps too few of them.
    """
    by_step = {}
    for reported in ray.train.get_all_reported_checkpoints():
        if STEP not in reported.metrics:
            raise UserError("report {'num_steps': engine.num_steps} with each checkpoint, as its metrics", STEP)
        by_step[reported.metrics[STEP]] = reported.checkpoint
    everyones = share(exchange, sorted(by_step), list[int])
    common = set(by_step).intersection(*everyones)
    if not common and all(everyones):
        raise UserError(
            f"the replicas have kept no checkpoint of the same step: theirs are of {everyones}; raise num_to_keep "
            "of ray.train.CheckpointConfig, and, to begin anew, give RunConfig another name",
            "num_to_keep",
        )
    return by_step[max(common)] if common else None
