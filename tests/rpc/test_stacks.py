"""The stacks that a process writes of itself on SIGUSR1, and how another process requests them."""

import asyncio
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from asyncrl.launcher.node import stuck_actors as taking
from asyncrl.launcher.node.child import Child
from asyncrl.launcher.node.stuck_actors import process_state, take_stacks
from asyncrl.rpc.stack_requests import TASKS_BEGIN, TASKS_END, describe_tasks
from tools.waiting import wait_until

ACTOR = """
import asyncio, sys, threading, time
from asyncrl.rpc import stack_requests

stack_requests.requests.install()

async def parked_for_ever(event):
    await event.wait()

def block_the_loop():
    print("up", flush=True)
    time.sleep(600)

async def main():
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    tasks = [asyncio.create_task(parked_for_ever(event), name=f"lease-{i}") for i in range(5)]

    def beat():
        seen = 0
        while True:
            if stack_requests.requests.count != seen:
                seen = stack_requests.requests.count
                sys.stderr.write(stack_requests.describe_tasks(loop))
                sys.stderr.flush()
            time.sleep(0.02)

    threading.Thread(target=beat, daemon=True).start()
    await asyncio.sleep(0.05)
    if sys.argv[1] == "block":
        block_the_loop()
    print("up", flush=True)
    await event.wait()

asyncio.run(main())
"""


def child(pid, log):
    return Child("reward/0", 1, pid, log, 0, -1)


class Process:
    def __init__(self, folder, how):
        self.log = folder / "actor.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", ACTOR, how], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        wait_until(lambda: "up" in self.log.read_text(), self.log.read_text)
        self.pid = self.process.pid

    def stop(self):
        os.kill(self.pid, signal.SIGSTOP)
        wait_for_state(self.pid, "T")
        return self

    def go_on(self):
        os.kill(self.pid, signal.SIGCONT)
        wait_for_state(self.pid, "SR")

    def take(self, timeout_s=10.0, log=None):
        async def within_reason():
            async with asyncio.timeout(60.0):
                return await take_stacks(child(self.pid, log or self.log), timeout_s)

        return asyncio.run(within_reason())


@pytest.fixture
def process(tmp_path):
    started = []

    def start(how="wait"):
        started.append(Process(tmp_path, how))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def test_threads_and_tasks_are_written_even_while_the_loop_is_blocked(process, tmp_path, monkeypatch):
    monkeypatch.setattr(taking, "_find_py_spy", lambda: None)
    one = process("block")
    taken = one.take()
    assert "most recent call first" in taken
    assert TASKS_BEGIN in taken and taken.endswith(TASKS_END)
    assert "5 x lease-0, lease-1, lease-2, ..." in taken
    assert "in parked_for_ever" in taken and "in block_the_loop" in taken
    assert taken.count(TASKS_END) == one.take().count(TASKS_END) == 1
    assert one.process.poll() is None, "it continues as before"
    # A process that does not answer is reported within the deadline.
    empty = tmp_path / "other.log"
    empty.write_text("")
    assert "unknown: not within 0.3 s" in one.take(0.6, empty)
    # A stopped process gets no signal. Before, it has written all that it was asked for.
    wait_until(lambda: one.log.read_text().count(TASKS_END) == 3, one.log.read_text)
    before = one.stop().log.read_text()
    taken = one.take()
    assert "T (stopped)" in taken and "SIGSTOP" in taken
    one.go_on()
    assert one.log.read_text() == before
    one.process.kill()
    one.process.wait()
    taken = one.take(2.0)
    assert "gone" in taken and "could not be asked" in taken


def test_py_spy_is_tried_first_under_a_deadline_and_leaves_no_process(process, tmp_path, monkeypatch):
    spy = tmp_path / "py-spy"
    spy.write_text('#!/bin/sh\necho "$$ $@" >> "$(dirname "$0")/calls"\necho "Thread 1: in a dream"\n')
    spy.chmod(0o755)
    monkeypatch.setattr(taking, "_find_py_spy", lambda: str(spy))
    one = process()
    before = one.log.read_text()
    taken = one.take()
    assert taken.endswith("Thread 1: in a dream")
    assert one.log.read_text() == before
    one.stop()
    assert "in a dream" in one.take()
    calls = [line.split(" ", 1) for line in (tmp_path / "calls").read_text().splitlines()]
    asked = f"dump --subprocesses --pid {one.pid}"
    assert [call for _, call in calls] == [asked, f"{asked} --nonblocking"]
    # A py-spy that hangs is killed, and the process itself is asked.
    spy.write_text('#!/bin/sh\necho "$$" >> "$(dirname "$0")/hung"\nexec sleep 600\n')
    one.go_on()
    assert TASKS_END in one.take(timeout_s=4.0)
    hung = int((tmp_path / "hung").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(hung, 0)


async def test_a_task_that_waits_for_a_call_names_its_peer():
    class Score(asyncio.Future):
        peer, kind = SimpleNamespace(name="reward/0"), SimpleNamespace(__name__="Score")

    async def asks():
        await call

    call = Score()
    task = asyncio.create_task(asks(), name="0-17")
    await asyncio.sleep(0)
    text = describe_tasks(asyncio.get_running_loop())
    call.set_result(None)
    await task
    assert "awaits reward/0 for Score" in text and "0-17" in text


def wait_for_state(pid, states):
    wait_until(lambda: process_state(pid)[0] in states, f"a state of {states}")
