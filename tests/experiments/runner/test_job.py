"""One job: which failures are final."""

import pytest

from diloco.errors import (
    CheckpointError,
    NonFiniteError,
    ReplicaFailedError,
    TrainingError,
    UserError,
    exit_code_of,
)
from diloco.experiments.runner import job
from diloco.training.config.recipes import recipe


def test_a_damaged_checkpoint_is_no_final_failure(monkeypatch):
    """The error names a file to delete; the checkpoint before it is good."""

    def damaged(*_, **__):
        raise CheckpointError("delete it")

    monkeypatch.setattr("diloco.training.loop.train", damaged)
    with pytest.raises(OSError, match="delete it") as caught:
        job._train(recipe("tiny"), resume=True)
    assert exit_code_of(caught.value) != UserError.exit_code


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (TrainingError("lower it", "optimizer.learning_rate"), True),
        (TrainingError("no memory", "micro_batch", "evaluation.batch"), False),
        (UserError("wandb can't start", "trackers"), False),
        (UserError("there is no GPU", "device"), False),
        (NonFiniteError("the outer gradient is not finite: lower the learning rate"), True),
        (ReplicaFailedError("lower it", exit_code=2, fields=("optimizer.learning_rate",)), True),
        (ReplicaFailedError("was killed", exit_code=1), False),
    ],
)
def test_a_failure_that_this_machine_caused_is_not_final(error, is_final):
    assert job._is_final(error) is is_final
