import threading

import pytest
import torch
from tests.fake_device import FakeDevice
from tests.processes import run_replicas

from diloco.engine.fixed import SenderThread, run_now
from diloco.engine.replica import DeviceLane, StreamLane, device_lane
from diloco.exchange.notices import in_thread


@pytest.mark.parametrize("start", [in_thread, SenderThread().start], ids=["thread", "queue"])
def test_work_goes_on_while_its_starter_does_something_else(start):
    go_on = threading.Event()
    handle = start(lambda: go_on.wait(10))
    assert not handle.done()
    go_on.set()
    assert handle.result() and handle.result() and handle.done()


def test_a_queue_does_one_piece_of_work_after_the_other():
    lane, go_on, done = SenderThread(), threading.Event(), []
    first = lane.start(lambda: (go_on.wait(10), done.append(1)))
    second = lane.start(lambda: done.append(2))
    go_on.set()
    first.result(), second.result()
    assert done == [1, 2]


def test_work_that_is_done_here_is_done_or_raises_at_once():
    done: list[int] = []
    assert run_now(lambda: done.append(1)).done() and done == [1]
    with pytest.raises(ZeroDivisionError):
        run_now(lambda: 1 / 0)


@pytest.mark.parametrize("start", [in_thread, SenderThread().start], ids=["thread", "queue"])
def test_what_the_work_raises_is_raised_where_it_is_waited_for(start):
    for error in (OSError("the link is gone"), SystemExit("the link is gone")):

        def fail(error: BaseException = error) -> None:
            raise error

        handle = start(fail)
        for _ in range(2):
            with pytest.raises(type(error), match="the link is gone"):
                handle.result()


def orders() -> list[list[str]]:
    """The races of work that is queued beside training with and without what orders it."""
    races = []
    with FakeDevice() as device:
        cpu = torch.device("cpu")
        assert isinstance(device_lane(device.device, cpu), StreamLane)
        assert type(device_lane(device.device, device.device)) is DeviceLane
        assert type(device_lane(cpu, cpu)) is DeviceLane
        for after_training, joins in [(True, True), (False, True), (True, False)]:
            lane, theta = StreamLane(device.device), device.wrapped(torch.zeros(3))
            theta.add_(1)
            host = lane.queue(lambda: lane.to_host(theta.add_(1)), after_training=after_training)  # noqa: B023
            assert (host != 2).all(), "the copy has not come"
            wait = lane.mark()
            if joins:
                lane.join()
            theta.add_(1)
            wait()
            assert (host == 2).all()
            races.append([*device.races])
            device.races.clear()
    return races


def test_a_stream_begins_after_training_and_training_goes_on_after_it_where_that_is_asked_for():
    [[in_order, too_early, not_joined]] = run_replicas(orders, 1)
    assert not in_order and too_early and not_joined
