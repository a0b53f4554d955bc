"""The recipes of examples/ are complete: they are checked and run with a small model, by flags alone."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from judge_server import as_json, judge_server
from run_files import json_lines, metrics

from asyncrl import sandbox
from asyncrl.config.load import load_config

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAMES = sorted(folder.name for folder in EXAMPLES.iterdir() if (folder / "config.toml").exists())
MOST_WORDS = 80
needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")


def verdicts(body):
    """A judge that finds every criterion of the recipe fulfilled."""
    return as_json(
        [{"name": each, "reason": "so", "verdict": "yes"} for each in ("true", "reader", "length")], "verdicts"
    )


def flags(name, model, url):
    """Flags by which a recipe runs on CPUs: a small model, a simulated engine and learner, and all else as it is."""
    settings = {
        "model.path": model,
        "data.max_prompt_tokens": 8192,
        "rollout.engine": "sim",
        "rollout.replicas": 1,
        "rollout.gpus_per_replica": 0,
        "rollout.max_tokens": 24,
        "rollout.samples_per_prompt": 2,
        "rollout.sim.length_median": 12.0,
        "rollout.sim.decode_step_s": 0.001,
        "learner.backend": "sim",
        "learner.sim.step_s": 0.05,
        "learner.steps": 2,
        "learner.groups_per_step": 2,
        "learner.dynamic_sampling": "false",
    }
    if "eval" in (EXAMPLES / name / "config.toml").read_text():
        settings |= {"eval.heldout.every_versions": 0, "eval.heldout.at_end": "false", "eval.heldout.at_start": "false"}
    if name in ("tools", "agent", "swe"):
        settings["episode.max_context_tokens"] = 16_000
    if name == "judge":
        settings["reward.options.url"] = url
    if name == "distillation":
        # The simulated learner has no teacher.
        settings |= {"learner.teacher": model, "rollout.engine": "reference", "learner.backend": "fsdp2"}
        settings |= {"learner.device": "cpu", "learner.threads": 1}
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


async def launched(folder, model, *more):
    """The output of a launch that ended with exit code 0."""
    async with judge_server(verdicts) as server:
        command = [
            sys.executable,
            "-m",
            "asyncrl.cli.launch",
            "config.toml",
            *flags(folder.name, model, server.url),
            *more,
        ]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PATH": path}
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, env=environment, stdin=-3, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            output = (await process.communicate())[0].decode()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
    logs = "".join(f"\n--- {log.name}\n{log.read_text()[-1500:]}" for log in folder.glob("runs/*/logs/*/*.log"))
    assert process.returncode == 0, output + logs
    return output


def test_the_page_lists_each_recipe():
    assert sorted(re.findall(r"^\| \[(\w+)\]\(\1/\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_valid_and_its_page_short(name):
    config = load_config([EXAMPLES / name / "config.toml"])
    assert config.run.name == name
    page = (EXAMPLES / name / "README.md").read_text()
    assert len(re.sub(r"```.*?```", "", page, flags=re.DOTALL).split()) <= MOST_WORDS
    assert f"cd examples/{name}\n" in page
    assert ("python make_data.py\n" in page) == (EXAMPLES / name / "make_data.py").exists()
    assert "asyncrl-launch config.toml\n" in page


@pytest.mark.parametrize("name", [pytest.param(name, marks=[needs_bubblewrap] * (name == "swe")) for name in NAMES])
async def test_a_recipe_passes_the_checks_before_a_start(example, model, name):
    output = await launched(example(name), model, "--dry-run")
    assert "problem" not in output


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[needs_bubblewrap] * (name == "swe")) for name in NAMES])
async def test_a_recipe_runs(example, model, name):
    folder = example(name)
    await launched(folder, model)
    steps = metrics(folder / "runs" / name, "train")
    assert [line["step"] for line in steps] == [1, 2]
    assert all("reward/trained_mean" in line for line in steps)


class Reply:
    """An answer of a scripted policy: calls of tools, or text."""

    content = ""

    def __init__(self, *calls):
        self.tool_calls = [Call(f"call_{n}", name, json.dumps(given)) for n, (name, given) in enumerate(calls)]
        self.message = {"role": "assistant", "content": "", "tool_calls": calls}


class Call:
    def __init__(self, id, name, arguments):
        self.id, self.name, self.arguments = id, name, arguments


class Scripted:
    """A client that gives these replies, and keeps the conversation."""

    def __init__(self, *replies):
        self._replies = iter(replies)

    async def chat(self, messages, tools):
        self.messages = messages
        return next(self._replies, Reply())


class Task:
    def __init__(self, row):
        self.row, self.messages = row, [{"role": "user", "content": row["prompt"]}]


@pytest.fixture
def repairs(example, monkeypatch):
    """The module of the software recipe, and its rows."""
    folder = example("swe")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "episode", raising=False)
    import episode

    yield episode, [row for file in ("train", "heldout") for row in json_lines(folder / f"{file}.jsonl")]
    sys.modules.pop("episode")


@needs_bubblewrap
async def test_each_bug_is_found_by_its_tests(repairs):
    episode, rows = repairs
    for row in rows:
        path = next(iter(row["files"]))
        broken, repaired = episode.Repository(row), episode.Repository(row | {"files": {path: row["repaired"]}})
        (fails, said), (passes, _) = await asyncio.gather(broken.test(), repaired.test())
        assert (fails, passes) == (False, True), said


@needs_bubblewrap
async def test_a_repair_is_rewarded(repairs):
    episode, (row, *_) = repairs
    path, test = next(iter(row["files"])), next(iter(row["tests"]))
    client = Scripted(
        Reply(("read_file", {"path": path}), ("read_file", {"path": "no"}), ("read_file", {"path": test})),
        Reply(
            ("run_tests", {}), ("write_file", {"path": "../../etc/x", "content": ""}), ("run", {}), ("read_file", [])
        ),
        Reply(("write_file", {"path": path, "content": row["repaired"]}), ("run_tests", {})),
    )
    assert await episode.play(Task(row), client, turns=10) == {"reward": 1.0, "refused_calls": 2}
    said = [message["content"] for message in client.messages if message["role"] == "tool"]
    assert said[0] == row["files"][path]
    assert said[1].startswith("there is no file 'no'; there are ")
    assert "FAILED" in said[3]
    assert "not a path below the work folder" in said[4]
    assert said[-1].endswith("OK\n")


CHEATS = {
    "an exit": "import sys; sys.exit(0)",
    "an exit at once": "import os; os._exit(0)",
    "a print": "print('\\nOK'); import os; os._exit(0)",
    "other tests": "import unittest; unittest.TestCase.run = lambda *_: None",
    "endless": "while True: pass",
}


@needs_bubblewrap
@pytest.mark.parametrize("name", CHEATS)
async def test_code_that_ends_the_tests_is_not_rewarded(repairs, name, monkeypatch):
    episode, (row, *_) = repairs
    if name == "endless":
        run_async = sandbox.run_async
        monkeypatch.setattr(sandbox, "run_async", lambda *words, **named: run_async(*words, **named | {"timeout": 2.0}))
    path, test = next(iter(row["files"])), next(iter(row["tests"]))
    cheat = CHEATS[name]
    client = Scripted(
        Reply(("write_file", {"path": path, "content": cheat}), ("write_file", {"path": test, "content": "pass"})),
        Reply(("write_file", {"path": "check.py", "content": "print('passed')"})),
    )
    assert (await episode.play(Task(row), client, turns=10))["reward"] == 0.0
