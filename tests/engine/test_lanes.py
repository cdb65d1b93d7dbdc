import threading

import pytest

from diloco.engine.lanes import ThreadLane


def test_work_goes_on_while_its_starter_does_something_else():
    go_on = threading.Event()
    handle = ThreadLane().run(lambda: go_on.wait(10))
    go_on.set()
    assert handle.wait() and handle.wait()


def test_what_the_work_raises_is_raised_where_it_is_waited_for():
    for error in (OSError("the link is gone"), SystemExit("the link is gone")):

        def fail(error: BaseException = error) -> None:
            raise error

        handle = ThreadLane().run(fail)
        for _ in range(2):
            with pytest.raises(type(error), match="the link is gone"):
                handle.wait()
