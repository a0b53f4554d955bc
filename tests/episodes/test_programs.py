import contextlib
import json
import os
import secrets
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from episodes.hosted import config_with, hosting, until

from asyncrl.episodes.playing.client import Task
from asyncrl.episodes.programs import described, environment, outcome_of
from asyncrl.messages.reward import BadOutcome

RUN = uvloop.run
"""As an actor's process does."""
SECONDS = f"1000.{secrets.randbelow(10**9):09d}"
"""For which what a program starts sleeps; by it the processes of this run are known."""
KEEPER = "asyncrl.workers.keeper"
PROGRAM = """
import fcntl, json, os, signal, subprocess, sys, termios, time
with open(os.environ["ASYNCRL_TASK_FILE"]) as file:
    task = json.load(file)
how, *words = task["prompt"].split()
if how == "env":
    print(json.dumps({"seed": task["seed"], "sample": task["sample"], "row": int(task["row"]["answer"])}))
if how == "file":
    path = os.environ["ASYNCRL_TASK_FILE"]
    print(path)
    fits = "ASYNCRL_TASK" in os.environ
    assert not fits or json.loads(os.environ["ASYNCRL_TASK"]) == task
    print(json.dumps({"fits": fits + 0, "mode": os.stat(path).st_mode & 0o777, "size": len(task["row"]["answer"])}))
if how == "key":
    print("key", os.environ["OPENAI_API_KEY"], "f" * 32)
    sys.exit(1)
if how == "number":
    print("thinking"); print(words[0]); print("warned", file=sys.stderr)
if how == "exit":
    print("one"); print("bad input", file=sys.stderr); sys.exit(3)
if how == "warns_first":
    print(*range(6), sep="\\n", file=sys.stderr)
    # Until all of it is read.
    while any(fcntl.ioctl(2, termios.FIONREAD, bytes(4))):
        time.sleep(0.001)
    print("last"); sys.exit(3)
if how == "killed":
    os.kill(os.getpid(), signal.SIGSEGV)
if how == "family":
    subprocess.Popen(["sleep", SECONDS])
    again = f"import subprocess; subprocess.Popen(['sleep', {SECONDS!r}], start_new_session=True)"
    subprocess.Popen([sys.executable, "-c", again])
    open(words[0], "w").close()
    if words[1:]:
        time.sleep(1000)
if how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", SECONDS])
    open(words[0], "w").close()
    time.sleep(1000)
if how == "polite":
    def leave(*_):
        print("leaving"); sys.exit(0)
    signal.signal(signal.SIGTERM, leave)
    open(words[0], "w").close()
    time.sleep(1000)
if how == "flood":
    for _ in range(3000):
        print("x" * 1000)
    print(5)
    if words:
        sys.exit(words[0])
if how == "mixed":
    for number in range(20):
        for part in ("text ", str(number), "\\n"):
            os.write(1, part.encode())
            os.write(2, part.replace("text", "error").encode())
    print(1)
if how == "eat":
    held = bytearray(int(words[0]))
    held[::4096] = b"x" * len(held[::4096])
    time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def agent(tmp_path, plays):
    (tmp_path / "agent.py").write_text(f"SECONDS = {SECONDS!r}\n{PROGRAM}")


def command(**episode: Any) -> Any:
    return config_with(command=[sys.executable, "agent.py"], close_timeout_s=20.0, **episode)


def running(words: str, folder: Path | None = None) -> list[psutil.Process]:
    """Processes whose command line has the words, and which run in the folder."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if words in each.cmdline() and (folder is None or each.cwd() == str(folder)):
                found.append(each)
    return found


def sleepers() -> int:
    return len(running(SECONDS))


async def test_a_program_ends_its_episode_by_its_exit(tmp_path):
    async with hosting(command(), tmp_path) as host:
        done = await host.play("env", sample=4)
        assert done.components == {"seed": 7.0, "sample": 4.0, "row": 1.0}
        for prompt, reward in (("number 0.5", 0.5), ("number good", None), ("silent", None)):
            done = await host.play(prompt)
            assert (done.reward, done.error) == (reward, "")
        done = await host.play("number NaN")
        assert done.error == "the program returned nan; a finite number is expected, by the last line of its output"
        done = await host.play("exit")
        reported = "the program ended with exit code 3: "
        assert done.error in (f"{reported}one | bad input", f"{reported}bad input | one")
        assert done.blame == "episode"
        assert "SIGSEGV" in (await host.play("killed")).error
        assert [count for count, _ in host.notices().values()] == [1, 1, 1]
        assert host.figure("failed") == 3
        printed = host.watch_output()
        for size, fits in ((1000, 1.0), (3_000_000, 0.0)):
            done = await host.play("file", row={"answer": "x" * size})
            assert done.components == {"fits": fits, "mode": 0o600, "size": size}
        lines = "".join(text for _, text, _ in printed).splitlines()
        assert len(lines) == 4 and not any(map(os.path.exists, lines[::2])), "a task's file goes with the program"


async def test_the_error_of_a_program_ends_with_what_it_printed_last_on_either_output(tmp_path):
    async with hosting(command(), tmp_path) as host:
        done = await host.play("warns_first")
        assert done.error == "the program ended with exit code 3: 2 | 3 | 4 | 5 | last"


async def test_the_key_of_an_episode_is_in_no_log_and_no_error(tmp_path):
    async with hosting(command(), tmp_path) as host:
        printed = host.watch_output()
        done = await host.play("key", session="cd" * 16)
        reported = f"key (key of the episode) {'f' * 32}"
        assert done.error.endswith(reported)
        assert [text for _, text, _ in printed] == [f"{reported}\n"]
        ((_, text),) = host.notices().values()
        assert reported in text


async def test_a_program_that_cannot_start_is_an_error(tmp_path):
    async with hosting(config_with(command=["no-such-agent"]), tmp_path) as host:
        done = await host.play()
        assert done.error.startswith("the program cannot be started: [Errno 2] No such file")
        assert done.blame == "episode"


async def test_a_program_ends_with_its_episode_and_is_asked_to_end_before_it_is_killed(tmp_path):
    async with hosting(command(), tmp_path) as host:
        printed, began = host.watch_output(), tmp_path / "began"
        assert (await host.play(f"family {began}")).error == ""
        assert sleepers() == 0
        began.unlink()
        for how, started, said in (("family {} wait", 2, []), ("polite {}", 0, ["leaving\n"]), ("deaf {}", 1, None)):
            call = host.run(how.format(began))
            await until(lambda least=started: began.exists() and sleepers() >= least)
            if said is None:
                # One whose keeper is killed goes with it, and is not to blame.
                (keeper,) = running(KEEPER, tmp_path)
                keeper.kill()
                assert (await call).blame == "host"
                await until(lambda: sleepers() == 0)
            else:
                call.cancel()
                await until(lambda: host.figure("open") == 0)
                assert (sleepers(), [text for _, text, _ in printed]) == (0, said)
            began.unlink()


async def test_programs_end_with_a_host_that_is_killed(tmp_path):
    """The keepers live in sessions of their own, and see it by the end of their sockets."""
    script = tmp_path / "host.py"
    script.write_text(
        f"""
import asyncio, sys
sys.path[:0] = {[str(Path(__file__).parents[at]) for at in range(3)]!r}
from pathlib import Path
from hosted import config_with, hosting

async def main():
    config = config_with(command=[sys.executable, "agent.py"])
    async with hosting(config, Path(".")) as host:
        await host.run("deaf began")

asyncio.run(main())
"""
    )
    host = subprocess.Popen([sys.executable, "host.py"], stdout=subprocess.DEVNULL)  # noqa: ASYNC220
    # A process that has just been started has no command line for a moment, and is not seen.
    await until(lambda: (tmp_path / "began").exists() and sleepers() == len(running(KEEPER, tmp_path)) == 1)
    host.kill()
    host.wait()
    await until(lambda: sleepers() == len(running(KEEPER, tmp_path)) == 0)


async def test_output_and_memory_are_bounded_and_the_reward_after_whole_lines_is_found(tmp_path):
    async with hosting(command(max_output_bytes=100_000, max_memory_bytes=100_000_000), tmp_path) as host:
        printed = host.watch_output()
        assert (await host.play("flood")).reward == 5.0
        assert sum(len(text) for _, text, _ in printed) == 100_000
        assert sum(dropped for *_, dropped in printed) == 3000 * 1001 + 2 - 100_000
        # The last output shows why it failed, even beyond the limit.
        failed = await host.play("flood enough")
        assert "enough" in failed.error.split(" | ") and len(failed.error) < 6000
        printed.clear()
        assert (await host.play("mixed")).reward == 1.0
        lines = "".join(text for _, text, _ in printed).splitlines()
        assert sorted(lines) == sorted([*(f"error {n}" for n in range(20)), *(f"text {n}" for n in range(20)), "1"])
        done = await host.play("eat 300000000")
        assert "took more than 100000000 bytes of memory (episode.max_memory_bytes" in done.error
        assert (done.blame, host.figure("out_of_memory")) == ("episode", 1)


def test_a_program_has_the_key_of_its_episode_and_its_task():
    task = Task(prompt="p", messages=[], row={"a": 1}, seed=7, uid="0-1", sample=2, attempt=1)
    inherited = {
        "PATH": "/bin",
        "ASYNCRL_PRIVATE": "x",
        "OPENAI_API_KEY": "mine",
        "OPENAI_BASE_URL": "https://elsewhere",
        "ANTHROPIC_API_KEY": "mine",
    }
    env = environment(inherited, described(task), base_url="http://127.0.0.1:1/v1", key="abc")
    assert json.loads(env.pop("ASYNCRL_TASK")) == asdict(task) | {"episode_id": "0-1/2"}
    urls = dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), "http://127.0.0.1:1/v1")
    urls["ANTHROPIC_BASE_URL"] = "http://127.0.0.1:1"
    assert env == {"PATH": "/bin", "OPENAI_API_KEY": "abc", "ANTHROPIC_API_KEY": "abc", **urls}


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        ("1", (1.0, {})),
        ("-0.5", (-0.5, {})),
        ('{"a": 1, "b": 2}', (3.0, {"a": 1.0, "b": 2.0})),
        ('{"reward": 1, "b": 2}', (1.0, {"b": 2.0})),
        *((line, None) for line in ("true", "[1]", "{}", '{"a": "x"}', "done", "[" * 100_000)),
    ],
)
def test_a_last_line_is_a_reward_or_none(line, outcome):
    assert outcome_of(line) == outcome


@pytest.mark.parametrize(
    "line", ["NaN", "1e400", "1e30", '{"reward": NaN}', '{"reward": 0.5, "steps": "3"}', '{"reward": null}']
)
def test_a_malformed_reward_in_the_last_line_is_refused(line):
    with pytest.raises(BadOutcome):
        outcome_of(line)
