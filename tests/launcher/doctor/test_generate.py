"""Responses before a run starts: real engines, real reward workers, in a process of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from model_files import write_model
from published_weights import open_memory
from safetensors import safe_open
from safetensors.numpy import save_file
from tiny_models import make_model, save_model

from asyncrl.cli import launch
from asyncrl.config.load import validate_config
from asyncrl.core.errors import ConfigError
from asyncrl.launcher.doctor.generate import generate, stage_model

LAUNCH = (sys.executable, "-m", "asyncrl.cli.launch")
REWARDS = """
def each(*, completion, finish_reason):
    return {"short": float(len(completion) < 5), "cut": -0.5 * (finish_reason == "length")}

def group(*, completions):
    return [{"rank": float(number)} for number in range(len(completions))]

def fails(*, completion):
    raise LookupError("no judge today")
"""
PLAYS = """
async def play(task, client):
    messages = list(task.messages)
    messages.append((await client.chat(messages)).message)
    messages.append({"role": "user", "content": "again"})
    await client.chat(messages)
    return 0.75
"""


def sim(**tables):
    """A simulated run whose user's code lies in the working directory."""
    tree = {
        "data": {"source": "jsonl", "path": "p.jsonl"},
        "rollout": {"engine": "sim", "samples_per_prompt": 3, "max_tokens": 8, "sim": {"length_median": 6.0}},
        "reward": {"function": "my_rewards:each"},
        "learner": {"backend": "sim"},
    }
    for name, table in tables.items():
        tree[name] = tree.get(name, {}) | table
    return validate_config(tree)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "plays.py").write_text(PLAYS)
    rows = ['{"prompt": "one"}', '{"prompt": 7}', '{"prompt": "%s"}' % ("long" * 1000), '{"prompt": "two"}']
    (tmp_path / "p.jsonl").write_text("".join(f"{row}\n" for row in rows))
    # Processes that other tests of this worker share may live.
    before = set(psutil.Process().children(recursive=True))
    yield tmp_path
    assert not set(psutil.Process().children(recursive=True)) - before


def responses(answer):
    return [(group.prompt, [(each.reward, each.components) for each in group.trajectories]) for group in answer.groups]


async def test_each_of_the_first_short_prompts_gets_a_response_with_its_score():
    answer = await generate(sim(), 5)
    assert not answer.problems
    assert [group.prompt for group in answer.groups] == ["one", "two"]
    for group in answer.groups:
        [response] = group.trajectories
        assert (group.kind, group.step) == ("generated", None)
        assert response.text and response.length and response.finish_reason in ("stop", "length")
        assert response.reward == response.components["short"] + response.components["cut"]


async def test_a_group_reward_gets_a_whole_group():
    answer = await generate(sim(reward={"per": "group", "function": "my_rewards:group"}), 1)
    assert responses(answer) == [("one", [(float(rank), {"rank": float(rank)}) for rank in range(3)])]


async def test_an_episode_is_played_with_the_engine_as_its_policy():
    config = sim(
        episode={"function": "plays:play", "max_context_tokens": 200},
        reward={"function": "episode"},
        learner={"backend": "sim"},
    )
    answer = await generate(config, 1)
    assert not answer.problems
    [response] = answer.groups[0].trajectories
    assert (response.reward, response.turns) == (0.75, 2)
    assert [message["role"] for message in response.messages] == ["user", "assistant", "user", "assistant"]


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"reward": {"function": "my_rewards:fails"}}, "my_rewards:fails: raised LookupError: no judge today"),
        ({"reward": {"function": "my_rewards:nothing"}}, "has no 'nothing'"),
        (
            {"data": {"source": "jsonl", "path": "p.jsonl", "max_prompt_tokens": 1}},
            "none of its first rows is a prompt that fits",
        ),
        ({"rollout": {"engine": "sim", "max_tokens": 8, "sim": {"crash_probability": 1.0}}}, "rollouter/0"),
    ],
)
async def test_a_failure_is_reported_and_ends_the_wait(tables, said):
    answer = await generate(sim(**tables), 2)
    assert not answer.groups and len(answer.problems) == 1
    assert said in answer.problems[0]


def assert_staged_as_written(config, model):
    """Each tensor is in memory as it is in the file."""
    staged = stage_model(config)
    with safe_open(f"{model}/model.safetensors", "numpy") as file:
        for bucket in staged.manifest.buckets:
            content = Path(bucket.path).read_bytes()
            for spec in bucket.tensors:
                expected = file.get_tensor(spec.name).tobytes()
                assert content[spec.offset : spec.offset + len(expected)] == expected
        assert set(staged.layout) == set(file.keys())
    staged.close()


def test_a_broken_file_of_weights_leaves_no_memory_of_the_files_before_it(tmp_path):
    save_file({"a": np.zeros(8, np.float32)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": np.zeros(8, np.uint32)}, tmp_path / "model-00002-of-00002.safetensors")
    index = {"weight_map": {name: f"model-0000{part}-of-00002.safetensors" for part, name in enumerate("ab", 1)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    before = open_memory()
    with pytest.raises(ConfigError, match="b has the dtype"):
        stage_model(sim(model={"path": str(tmp_path)}))
    assert open_memory() == before


async def test_a_model_is_sampled_with_the_weights_in_its_folder(tmp_path):
    model = save_model(tmp_path / "model", make_model(3))
    (tmp_path / "model" / "tokenizer.json").write_bytes(
        (write_model(tmp_path / "other") / "tokenizer.json").read_bytes()
    )
    tables = {
        "model": {"path": model},
        "learner": {"backend": "fsdp2", "device": "cpu"},
        "lora": {"rank": 4, "alpha": 9},
    }
    tables["data"] = {"max_prompt_tokens": 100}
    config = sim(**tables, rollout={"engine": "reference", "samples_per_prompt": 2, "max_tokens": 4})
    assert_staged_as_written(config, model)
    answer = await generate(config, 1)
    assert not answer.problems, answer.problems
    os.rename(f"{model}/model.safetensors", f"{model}/pytorch_model.bin")
    assert "has no safetensors files" in (await generate(config, 1)).problems[0]


CONFIG = """
[data]
path = "p.jsonl"
on_bad_row = "skip"
[rollout]
engine = "sim"
samples_per_prompt = 2
max_tokens = 8
[rollout.sim]
decode_step_s = {step_s}
[reward]
function = "my_rewards:each"
[learner]
backend = "sim"
"""


def test_a_dry_run_prints_the_responses_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "c.toml").write_text(CONFIG.format(step_s=0.001))
    done = subprocess.run(
        [*LAUNCH, "c.toml", "--dry-run", "--generate", "2"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("run folder: ") < done.stdout.index("== generated  prompt 0-0  reward ")
    assert "\nprompt\n  two\n\nresponse  reward " in done.stdout
    assert not (tmp_path / "runs").exists()


def is_sampler(process):
    try:
        return "asyncrl.launcher.doctor.generate:generate_here" in process.cmdline()
    except psutil.NoSuchProcess:
        # Another check's process that has just ended.
        return False


def test_a_signal_ends_the_process_that_samples(tmp_path):
    (tmp_path / "c.toml").write_text(CONFIG.format(step_s=1000.0))
    argv = [*LAUNCH, "c.toml", "--dry-run", "--generate", "2"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watched = psutil.Process(process.pid)
    end = time.monotonic() + 200
    while not (found := [each for each in watched.children() if is_sampler(each)]):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    while not found[0].children():
        assert time.monotonic() < end
        time.sleep(0.05)
    below = found[0].children(recursive=True)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGTERM and "ended by SIGTERM" in err
    _, left = psutil.wait_procs([*found, *below], timeout=60)
    assert not left


def test_a_deadline_ends_the_sampling_with_an_error(tmp_path, monkeypatch):
    from asyncrl.launcher.doctor import generate as generating

    monkeypatch.setattr(generating, "longest_s", lambda config, count: 0.5)
    with pytest.raises(ConfigError) as caught:
        generating.print_generated(sim(), 1)
    assert caught.value.problems == ["--generate: the engine sim did not answer 1 prompts within 0.5 s"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--generate", "2"), "--generate belongs to --dry-run"),
        (("--dry-run", "--json", "--generate", "2"), "--generate belongs to --dry-run, without --json"),
        (("--dry-run", "--generate", "0"), "--generate takes 1 to 100 prompts, got 0"),
        (("--dry-run", "--generate", "2", "--resume", "auto"), "leave out --resume"),
        (("--dry-run", "--generate", "2", "--hosts", "h"), "leave out --hosts and --slurm"),
    ],
)
def test_wrong_usage_is_named(capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        launch.main(["c.toml", *words])
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())
