import pytest
from tests.engine.cases import exchange
from tests.processes import run_replicas

from diloco.training.mean_loss import MeanLoss


def means(losses: list[list[float]]) -> list[float | None]:
    """The means of two syncs, sent after steps 2 and 4, of which both are in flight together."""
    transport = exchange()
    mean_loss = MeanLoss(transport)
    for step, loss in enumerate(losses[transport.replica], start=1):
        mean_loss.add(loss)
        if step % 2 == 0:
            mean_loss.send(step)
    return [mean_loss.receive(1), mean_loss.receive(2), mean_loss.receive(4), mean_loss.receive(4)]


def test_replicas_average_their_losses_since_the_last_sync():
    losses = [[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0], [0.1, 0.1, 0.1, 0.1]]
    first, second = (1.5 + 15 + 0.1) / 3, (3.5 + 35 + 0.1) / 3
    for result in run_replicas(means, 3, losses):
        assert result == [None, pytest.approx(first), pytest.approx(second), None]
