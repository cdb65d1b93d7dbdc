"""One job: which failures are final."""

import pytest

from diloco.errors import CheckpointError, UserError, exit_code_of
from diloco.experiments.runner import job
from diloco.training.recipes import recipe


def test_a_damaged_checkpoint_is_no_final_failure(monkeypatch):
    """The error names a file to delete; the checkpoint before it is good."""

    def damaged(*_, **__):
        raise CheckpointError("delete it")

    monkeypatch.setattr("diloco.training.loop.train", damaged)
    with pytest.raises(OSError, match="delete it") as caught:
        job._train(recipe("tiny"), resume=True)
    assert exit_code_of(caught.value) != UserError.exit_code
