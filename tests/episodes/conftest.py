from pathlib import Path

import pytest

PLAYS = '''
import asyncio, ctypes, functools, json, os, subprocess, sys, threading, time

import pydantic

from asyncrl.episodes import Client, EpisodeOver, Task

while os.path.exists("hang"):
    time.sleep(0.05)


def asks(text):
    return [{"role": "user", "content": text}]


async def play(task: Task, client: Client, **options):
    how, *words = task.prompt.split()
    if how == "reply":
        return float(len((await client.chat(asks(task.prompt), **options)).content))
    if how == "turns":
        messages = asks("go")
        for turn in range(int(words[0])):
            reply = await client.chat(messages)
            client.reward(turn)
            messages += [reply.message, *asks("more")]
        return None
    if how == "components":
        return {"a": 1, "b": 0.5}
    if how == "seen":
        return {"seed": task.seed, "sample": task.sample, "attempt": task.attempt, "row": int(task.row["answer"])}
    if how == "odd":
        return "good"
    if how == "malformed":
        value = json.loads(words[1])
        if words[0] == "messages":
            await client.chat(asks({"text": chr(0xD83D), "object": object()}[value]))
        await client.chat(asks("x"), **{words[0]: value})
    if how == "give-up":
        asking = asyncio.create_task(client.chat(asks("slow")))
        while not os.path.exists("asked"):
            await asyncio.sleep(0.01)
        asking.cancel()
        await client.chat(asks("again"))
        await asyncio.sleep(1000)
    if how == "surrogate":
        if words[0] == "raise":
            raise ValueError("file \\udcff.txt")
        if words[0] == "print":
            print("half \\ud83d", end="")
            return 1.0
        return type("Half", (), {"__repr__": lambda self: "\\ud83d"})()
    if how == "raise":
        raise ValueError("no luck")
    if how == "leave":
        sys.exit(3)
    if how == "exit":
        os._exit(1)
    if how == "print":
        print("hello from", task.uid)
        sys.stderr.write("and on the error stream\\n")
        return 0
    if how == "flood":
        for _ in range(2000):
            print("x" * 1000)
        return 0
    if how == "write":
        os.write(1, b"x" * int(words[0]))
        return 0
    if how == "write-later":
        threading.Timer(0.5, lambda: [(os.write(1, b"x" * 60000), time.sleep(0.5)) for _ in range(3)]).start()
        return 0
    if how == "spin":
        while True:
            pass
    if how == "native":
        # Keeps the interpreter, as a C extension would.
        ctypes.PyDLL(None).sleep(1000)
    if how == "fork":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        if os.fork() == 0:
            time.sleep(1000)
        return 1
    if how == "where":
        print(os.getpid())
        await asyncio.sleep(1000)
    if how == "wait":
        try:
            await asyncio.sleep(1000)
        finally:
            print("closed", task.uid)
    if how == "deaf":
        await deaf()
    if how == "after":
        # Calls on behind its end.
        async def later():
            try:
                while True:
                    await client.chat(asks("again"))
            except EpisodeOver:
                print("over")
        await client.chat(asks("once"))
        asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(later()))
        return 1
    if how == "leak":
        tasks = [asyncio.create_task(asyncio.sleep(1000)) for _ in range(3)]
        return 1
    if how == "deaf-task":
        asyncio.create_task(deaf())
        await asyncio.sleep(0)
        return 1
    if how == "tasks":
        # Those of other episodes that go on.
        return sum(not each.done() for each in asyncio.all_tasks() if "sleep" in repr(each.get_coro())) + 1
    if how == "big":
        try:
            await client.chat(asks("x" * int(words[0])))
        except ValueError as error:
            print("refused", str(error)[:80])
            return -1
        return 1
    if how == "eat":
        held = bytearray(int(words[0]))
        held[::4096] = b"x" * len(held[::4096])
        await asyncio.sleep(1000)
    raise AssertionError(task.prompt)


async def deaf():
    while True:
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            pass


def plain(task, client):
    if task.prompt == "sleep":
        time.sleep(1000)
    reply = client.chat(asks(task.prompt))
    client.reward(2.0)
    again = client.chat([*asks(task.prompt), reply.message])
    return len(reply.content) + len(again.content)


def traced(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


@traced
async def decorated(task, client):
    return len((await client.chat(asks(task.prompt))).content)


def embedded(task, client):
    async def inner():
        return client.chat(asks(task.prompt)).content

    return len(asyncio.run(inner()))


class Counting:
    open = 0

    def __init__(self, *, least=0):
        self.least = least
        Counting.open += 1

    def reset(self, task):
        if task.prompt == "wrong":
            return 7
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


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b (int): the second
    """
    return a + b


def character(code: int) -> str:
    """Give the character of a code."""
    return chr(code)


def check(key: str) -> str:
    """Check a key."""
    return str(pydantic.TypeAdapter(int).validate_python(key))


async def look_up(key: str) -> dict:
    """Find a secret."""
    return {"found": {"gold": 42}[key]}


class Jammed:
    """Fails to close."""

    def open(self) -> str:
        """Open it."""
        return "no"

    def close(self):
        raise OSError("it is jammed")


class Box:
    """State of an episode."""

    def __init__(self, task: Task, *, size: int = 2):
        self.size, self.things, self.uid = size, [], task.uid
        self.grade = lambda answer: answer == task.row["answer"]

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


def lock(it: threading.Lock):
    """No error that the policy may see."""
'''


@pytest.fixture(autouse=True)
def plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's module, in the working directory."""
    path = tmp_path / "plays.py"
    path.write_text(PLAYS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return path
