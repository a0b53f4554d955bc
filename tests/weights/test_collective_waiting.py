"""Waits that end: when it is done, in time, when the other side is gone, when somebody stops them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from asyncrl.weights.collective.framing import Frame, FrameKind
from asyncrl.weights.collective.links import Link
from asyncrl.weights.collective.waiting import Stopped, Waiter

LONG_S = 60.0


@pytest.fixture
def waiter() -> Iterator[Waiter]:
    made = Waiter(LONG_S)
    yield made
    made.close()


@pytest.fixture
def connection() -> tuple[socket.socket, socket.socket]:
    """Two sockets that are connected; their links close them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]


@pytest.fixture
def ends(connection) -> Iterator[tuple[Link, Link]]:
    near, far = Link(connection[0], "the learner"), Link(connection[1], "rank 1")
    yield near, far
    near.end("over")
    far.end("over")


def never() -> bool:
    return False


def send_on(link: Link) -> None:
    for _ in range(100_000):
        link.send(Frame(kind=FrameKind.BUCKET, text=b"x" * 1000))


def later(work) -> None:
    threading.Timer(0.05, work).start()


def test_timeout_says_for_what(waiter: Waiter) -> None:
    waiter.timeout_s = 0.05
    with pytest.raises(TimeoutError, match=r"waited 0.05 s for ranks 2, 3"):
        waiter.until(never, lambda: "ranks 2, 3")


def test_stop_ends_this_wait_and_the_next(waiter: Waiter) -> None:
    later(lambda: waiter.stop("enough"))
    for _ in range(2):
        with pytest.raises(Stopped, match="enough"):
            waiter.until(never, "it")
    with pytest.raises(Stopped):
        waiter.check([])
    # Too late for anybody, but harmless.
    waiter.close()
    waiter.stop("again")
    waiter.wake()


@pytest.mark.parametrize("unread", [0, 3])
def test_end_of_a_watched_link_is_noticed_behind_unread_frames(waiter: Waiter, ends, unread: int) -> None:
    near, far = ends
    for _ in range(unread):
        far.send(Frame(kind=FrameKind.BUCKET))
    waiter.check([near])
    later(lambda: far.end("no memory left"))
    with pytest.raises(ConnectionError, match="^the learner: no memory left$"):
        waiter.explain([near])
    with pytest.raises(ConnectionError, match="^the learner: no memory left$"):
        waiter.until(never, "it", watching=[near])
    with pytest.raises(ConnectionError, match="no memory left"):
        waiter.check([near])


def test_end_without_a_word_is_noticed(waiter: Waiter, ends, connection) -> None:
    near, _ = ends
    later(connection[1].close)
    with pytest.raises(ConnectionError, match="the learner is gone"):
        waiter.until(never, "it", watching=[near])
    with pytest.raises(ConnectionError, match="the learner is gone"):
        send_on(near)


def test_who_has_long_read_nothing_is_hung_up_on_all_the_same(ends, connection) -> None:
    near, _ = ends
    with pytest.raises(ConnectionError, match="does not read"):
        send_on(near)
    near.hang_up("the learner called it off")
    connection[1].settimeout(LONG_S)
    while connection[1].recv(1 << 20):
        pass


def test_whoever_has_done_may_leave(waiter: Waiter, ends) -> None:
    near, far = ends
    near.send(Frame(kind=FrameKind.DONE, number=3))
    near.end("closed")
    waiter.timeout_s = 0.1
    with pytest.raises(TimeoutError):
        waiter.until(never, "the others", watching=[far])
    assert far.receive() == Frame(kind=FrameKind.DONE, number=3)
    # Only for as long as that is still to be read.
    with pytest.raises(ConnectionError, match="rank 1: closed"):
        waiter.check([far])


def test_frames_come_before_the_end(ends) -> None:
    near, far = ends
    frames = [Frame(kind=FrameKind.BUCKET, index=index, text=b"x" * 500) for index in range(300)]
    for frame in frames:
        far.send(frame)
    far.end("that was all")
    assert [near.receive() for _ in frames] == frames
    with pytest.raises(ConnectionError, match="the learner: that was all"):
        near.receive()


def test_work_gives_what_comes_of_it(waiter: Waiter, ends) -> None:
    done: list[int] = []
    assert waiter.call(lambda: 7, "it", discard=print) == 7
    waiter.guard(lambda: done.append(1), "it", abort=lambda: done.append(2), watching=[ends[0]])

    def fail() -> None:
        raise KeyError("it")

    with pytest.raises(KeyError):
        waiter.call(fail, "it", discard=print)
    with pytest.raises(KeyError):
        waiter.guard(fail, "it", abort=lambda: done.append(2), watching=[ends[0]])
    assert done == [1]


def test_call_that_is_left_discards_what_comes_late(waiter: Waiter, ends) -> None:
    near, far = ends
    go_on, discarded = threading.Event(), []

    def work() -> str:
        go_on.wait(LONG_S)
        return "late"

    later(lambda: far.end("gone"))
    with pytest.raises(ConnectionError, match="gone"):
        waiter.call(work, "it", discard=discarded.append, watching=[near])
    assert not discarded
    [thread] = [each for each in threading.enumerate() if each.name == "asyncrl: it"]
    go_on.set()
    thread.join(LONG_S)
    assert discarded == ["late"]


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("why", ["gone", "time", "stopped"])
def test_guard_aborts_what_would_never_end(waiter: Waiter, ends, raises: bool, why: str) -> None:
    near, far = ends
    aborted = threading.Event()

    def work() -> None:
        assert aborted.wait(LONG_S)
        # An aborted NCCL broadcast returns as if nothing had happened.
        if raises:
            raise RuntimeError("unhandled system error")

    if why == "time":
        waiter.timeout_s = 0.05
    else:
        later(lambda: far.end("rank 2 is gone") if why == "gone" else waiter.stop("enough"))
    expected = {"gone": ConnectionError, "time": TimeoutError, "stopped": Stopped}[why]
    with pytest.raises(expected):
        waiter.guard(work, "it", abort=aborted.set, watching=[near])
