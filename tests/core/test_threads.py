"""Work on a daemon thread."""

import gc
import threading
import weakref

import pytest

from asyncrl.core.errors import DeadlineExceeded
from asyncrl.core.threads import on_daemon, wait_for


def test_the_future_has_the_result_or_the_error():
    done = on_daemon("adds", lambda: 1 + 1)
    assert done.result(10.0) == 2
    wait_for(done, 0.0, who="learner/0", thread="adds")
    failed = on_daemon("fails", lambda: [][0])
    assert isinstance(failed.exception(10.0), IndexError)
    wait_for(failed, 0.0, who="learner/0", thread="fails")


def test_work_that_does_not_end_in_time_is_named():
    go = threading.Event()
    done = on_daemon("hangs", go.wait)
    assert not done.cancel()
    with pytest.raises(DeadlineExceeded, match=r"learner/0.*'hangs'"):
        wait_for(done, 0.01, who="learner/0", thread="hangs")
    go.set()
    wait_for(done, 10.0, who="learner/0", thread="hangs")


def test_no_work_has_ended():
    wait_for(None, 0.0, who="learner/0", thread="assembly")


def test_failed_work_is_freed_with_its_error():
    class Memory:
        """What the work holds."""

    held = Memory()

    def work(memory: Memory) -> None:
        raise OSError("no memory left")

    freed = weakref.ref(held)
    gc.disable()
    try:
        done = on_daemon("fails", lambda memory=held: work(memory))
        del held
        assert isinstance(done.exception(10.0), OSError)
        for thread in threading.enumerate():
            if thread.name == "fails":
                thread.join(10.0)
        assert freed() is not None
        del done
        assert freed() is None
    finally:
        gc.enable()
