import threading
import time

import pytest

from diloco.engine.lanes import ThreadLane


def test_work_goes_on_while_its_starter_does_something_else():
    go_on = threading.Event()
    handle = ThreadLane("work").run(lambda: (go_on.wait(10), threading.current_thread().name))
    go_on.set()
    assert handle.wait() == (True, "work") and handle.wait() == (True, "work")


def test_what_the_work_raises_is_raised_where_it_is_waited_for():
    def fail() -> None:
        raise OSError("the link is gone")

    handle = ThreadLane("work").run(fail)
    time.sleep(0.01)
    for _ in range(2):
        with pytest.raises(OSError, match="the link is gone"):
            handle.wait()
