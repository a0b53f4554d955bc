from pathlib import Path

import pytest

PLAYS = '''
import asyncio, ctypes, json, os, subprocess, sys, threading, time

import pydantic

from asyncrl.episodes import Client, EpisodeOver, Task

if os.path.exists("hang"):
    time.sleep(1000)


async def play(task: Task, client: Client, **options):
    words = task.prompt.split()
    if words[0] == "reply":
        reply = await client.chat([{"role": "user", "content": task.prompt}], **options)
        return float(len(reply.content))
    if words[0] == "turns":
        messages = [{"role": "user", "content": "go"}]
        for turn in range(int(words[1])):
            reply = await client.chat(messages)
            client.reward(turn)
            messages += [reply.message, {"role": "user", "content": "more"}]
        return None
    if words[0] == "components":
        return {"a": 1, "b": 0.5}
    if words[0] == "odd":
        return "good"
    if words[0] == "malformed":
        field, value = words[1], json.loads(words[2])
        if field == "messages":
            await client.chat([{"role": "user", "content": {"text": chr(0xD83D), "object": object()}[value]}])
        else:
            await client.chat([{"role": "user", "content": "x"}], **{field: value})
    if words[0] == "give-up":
        asking = asyncio.create_task(client.chat([{"role": "user", "content": "slow"}]))
        while not os.path.exists("asked"):
            await asyncio.sleep(0.01)
        asking.cancel()
        await client.chat([{"role": "user", "content": "again"}])
        await asyncio.sleep(1000)
    if words[0] == "surrogate":
        if words[1] == "raise":
            raise ValueError("file \\udcff.txt")
        if words[1] == "print":
            print("half \\ud83d", end="")
            return 1.0
        return {"part \\ud83d": 1.0}
    if words[0] == "raise":
        raise ValueError("no luck")
    if words[0] == "leave":
        sys.exit(3)
    if words[0] == "exit":
        os._exit(1)
    if words[0] == "print":
        print("hello from", task.uid)
        sys.stderr.write("and on the error stream\\n")
        return 0
    if words[0] == "flood":
        for _ in range(2000):
            print("x" * 1000)
        return 0
    if words[0] == "spin":
        while True:
            pass
    if words[0] == "native":
        # Keeps the interpreter, as a C extension would.
        ctypes.PyDLL(None).sleep(1000)
    if words[0] == "fork":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        if os.fork() == 0:
            time.sleep(1000)
        return 1
    if words[0] == "wait":
        try:
            await asyncio.sleep(1000)
        finally:
            print("closed", task.uid)
    if words[0] == "deaf":
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
    if words[0] == "after":
        # Calls on behind its end.
        async def later():
            while True:
                try:
                    await client.chat([{"role": "user", "content": "again"}])
                except EpisodeOver:
                    print("over")
                    return
        await client.chat([{"role": "user", "content": "once"}])
        asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(later()))
        return 1
    if words[0] == "leak":
        tasks = [asyncio.create_task(asyncio.sleep(1000)) for _ in range(3)]
        return 1
    if words[0] == "deaf-task":
        async def deaf():
            while True:
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    pass
        asyncio.create_task(deaf())
        await asyncio.sleep(0)
        return 1
    if words[0] == "tasks":
        # Those of other episodes that go on.
        return sum(not each.done() for each in asyncio.all_tasks() if "sleep" in repr(each.get_coro())) + 1
    if words[0] == "big":
        try:
            reply = await client.chat([{"role": "user", "content": "x" * int(words[1])}])
        except ValueError as error:
            print("refused", str(error)[:80])
            return -1
        return 1
    if words[0] == "eat":
        held = bytearray(int(words[1]))
        held[::4096] = b"x" * len(held[::4096])
        await asyncio.sleep(1000)
    if words[0] == "seen":
        return {"seed": task.seed, "sample": task.sample, "attempt": task.attempt, "row": int(task.row["answer"])}
    raise AssertionError(words)


def plain(task, client):
    if task.prompt == "sleep":
        time.sleep(1000)
    reply = client.chat([{"role": "user", "content": task.prompt}])
    client.reward(2.0)
    again = client.chat([{"role": "user", "content": task.prompt}, reply.message])
    return len(reply.content) + len(again.content)


class Counting:
    open = 0

    def __init__(self, *, least=0):
        self.least = least
        Counting.open += 1

    def reset(self, task):
        self.left = int(task.prompt)
        return f"count down from {self.left}"

    async def step(self, message):
        self.left -= 1
        if message["content"] == "raise":
            raise RuntimeError("the world ends")
        return f"{self.left} left", 0.5 if self.left else None, self.left <= self.least, {"unused": 1}

    def close(self):
        Counting.open -= 1
        print("closed", Counting.open)


class Wrong:
    def reset(self, task):
        return 7

    def step(self, message):
        return None


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b (int): the second
    """
    return a + b


def check(key: str) -> str:
    """Check a key."""
    return str(pydantic.TypeAdapter(int).validate_python(key))


async def look_up(key: str) -> dict:
    """Find a secret."""
    return {"found": {"gold": 42}[key]}


class Box:
    """State of an episode."""

    def __init__(self, task: Task, *, size: int = 2):
        self.size, self.things, self.uid = size, [], task.uid

    def put(self, thing: str) -> str:
        """Put something in."""
        if len(self.things) == self.size:
            raise OverflowError("the box is full")
        self.things.append(thing)
        return ", ".join(self.things)

    def close(self):
        print("box closed with", len(self.things))

    def _inner(self):
        pass
'''


@pytest.fixture(autouse=True)
def plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's module, in the working directory."""
    path = tmp_path / "plays.py"
    path.write_text(PLAYS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return path
