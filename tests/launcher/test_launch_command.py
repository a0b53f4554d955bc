"""asyncrl-launch as a command: help, wrong usage, wrong configuration, dry run, resume."""

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from gpu.cards import card
from launcher.run_folder.test_resume import write_checkpoint

from asyncrl.cli import launch
from asyncrl.config.keys import known_keys
from asyncrl.config.load import load_config
from asyncrl.core.errors import UsageError
from asyncrl.dataloader.prompts import load_dataset
from asyncrl.gpu import shared_gpus
from asyncrl.launcher.checks import check_list
from asyncrl.launcher.hosts.hostfile import HostLine
from asyncrl.launcher.hosts.start import LocalStart
from asyncrl.launcher.launch import Launch
from asyncrl.launcher.run_folder.folders import create_run_folder
from asyncrl.rpc.linux import children_of
from tools.learn.chat_model import make_model, make_tokenizer, save
from tools.learn.recipe import Settings
from tools.waiting import wait_until

SIM = """
[data]
source = "synthetic"
[rollout]
engine = "sim"
replicas = 2
concurrency = 8
[learner]
backend = "sim"
groups_per_step = 4
steps_per_version = 2
"""


@pytest.fixture(autouse=True)
def keep_signal_handlers(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "sim.toml"
    path.write_text(SIM + f'[run]\ndir = "{tmp_path / "runs"}"\n')
    return str(path)


def test_help_loads_nothing_heavy():
    code = (
        "import sys, asyncrl.cli.actor\n"
        "heavy = {'torch', 'vllm', 'transformers', 'numpy', 'zmq', 'pydantic'}\n"
        "assert not heavy & set(sys.modules), 'an actor handles signals before it imports'\n"
        "from asyncrl.cli.launch import main\n"
        "try: main(['--help'])\nexcept SystemExit as end: assert not end.code\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "import asyncrl.launcher.hosts.remote\n"
        "heavy.remove('zmq')\n"
        "assert not heavy & set(sys.modules), 'a host answers before it needs the configuration'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in ("--learner.lr 1e-6", "--help-config", "--join RUN --hosts FILE"))


def test_every_key_is_listed(capsys):
    assert launch.main(["--help-config"]) == 0
    shown = capsys.readouterr().out
    for key, _, _, description in known_keys():
        assert f"{key}  (" in shown
        assert textwrap.indent(description, "    ") in shown


JOIN = ["--join", "runs/x", "--hosts", "f"]
LEAVE = ["--leave", "a", "runs/x"]
STOP = ["--stop", "runs/x"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "no CONFIG file"),
        (["c.toml", "--resume"], "--resume: expected one argument"),
        (["c.toml", "--include", "a,b"], "--include, --exclude and --ssh-args belong to --hosts FILE"),
        (["c.toml", "--detach", "--dry-run"], "--detach starts a run from here"),
        (["c.toml", "--detach", "--inside-slurm"], "--detach starts a run from here"),
        (["c.toml", "--learner.lr", "--dry-run"], "--learner.lr: a value is missing"),
        (["c.toml", "--learner.=3"], "not a key"),
        (
            ["c.toml", "--learning-rate", "1"],
            "--learning-rate: asyncrl has --learner.lr for it; flags of the configuration",
        ),
        (["c.toml", "--typical_p=0.9"], "--typical_p: asyncrl has no such setting: the learner scores"),
        (["c.toml", "--bogus"], "unrecognized arguments: --bogus; flags of the configuration are dotted keys"),
        (["c.toml", "--slurm"], "--nodes"),
        (["c.toml", "--nodes", "2"], "--slurm"),
        (["c.toml", "--container", "x"], "--slurm"),
        (["c.toml", "--slurm", "--nodes", "2", "--inside-slurm"], "--inside-slurm"),
        (["c.toml", "--inside-slurm", "--hosts", "hosts"], "--inside-slurm"),
        (["--join", "runs/x"], "--join RUN: name the hosts by --hosts FILE"),
        ([*JOIN, "c.toml"], "--join RUN --hosts FILE: only"),
        ([*JOIN, "--learner.lr", "1"], "so --learner.lr has no place here"),
        ([*JOIN, "--resume", "auto"], "--join is for a live run"),
        (["--leave", "a"], "--leave HOST RUN: name one run folder after the host"),
        ([*LEAVE, "--ssh-args", "-F x"], "only --within SECONDS goes with it"),
        ([*LEAVE, "--within", "-1"], "--within: -1: must be 0 to 86400 seconds"),
        ([*LEAVE, "--within", "nan"], "--within: nan: must be 0 to 86400 seconds"),
        (["--within", "3", "runs/x"], "--within SECONDS belongs to --leave HOST"),
        (["--bring-back", "rollouter/1"], "--bring-back NAME RUN: name one run folder after the replica"),
        ([*STOP, "--leave", "a"], "--stop RUN: name one run folder, and nothing else"),
    ],
)
def test_wrong_usage(argv, said, capsys):
    with pytest.raises(SystemExit) as end:
        launch.main(argv)
    assert end.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_every_problem_is_listed_cheap_checks_first_with_advice_in_the_last_line(config, tmp_path, capsys):
    assert launch.main([config, "--learner.lrr", "1", "--rollout.replicas=-1", "--model.path", "/nowhere"]) == 78
    *problems, last = capsys.readouterr().err.splitlines()
    assert any("learner.lrr: unknown key; did you mean lr?" in line for line in problems)
    assert any("rollout.replicas" in line for line in problems)
    assert last.startswith("asyncrl-launch: 2 problems in the configuration") and "--help-config" in last
    argv = [config, "--model.path", "/nowhere", "--learner.backend", "fsdp2", "--rollout.engine", "vllm"]
    assert launch.main([*argv, "--rollout.gpus_per_replica", "1000"]) == 78
    shown = capsys.readouterr().err
    assert "model.path: /nowhere is not a folder" in shown and "GPUs: " in shown
    assert "2 problems in the configuration" in shown and not (tmp_path / "runs").exists()


def test_a_dry_run_shows_everything_and_starts_nothing(config, tmp_path, capsys):
    argv = [config, "--dry-run", "--learner.lr", "0.5", "--learner.lr=1e-3"]
    assert launch.main([*argv, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert (tree["learner"]["lr"], tree["rollout"]["gpus_per_replica"]) == (0.001, 0)
    (tmp_path / "runs" / "run").mkdir(parents=True)
    assert launch.main(argv) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == f"run folder: {tmp_path}/runs/run-2"
    assert f"{tmp_path}/runs/run has" not in shown and f"{tmp_path}/runs/run-2 has" in shown
    assert '"lr"' not in shown and "rollouter/1" in shown
    assert "8 = learner.groups_per_step 4 x learner.steps_per_version 2" in shown
    assert "16 = (staleness.max 1 + 1) x G" in shown
    assert "16 = rollout.concurrency 8 x rollout.replicas 2" in shown
    checks = [row.split()[:2] for row in shown[shown.index("checks:") :].splitlines()[1:]]
    assert ["ok", "reward"] in checks and ["ok", "data"] in checks and ["ok", "ports"] in checks
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]


@pytest.mark.parametrize(("names", "start"), [(("localhost", "127.0.0.1"), None), (("x", "y"), LocalStart())])
def test_two_names_of_one_machine_are_refused(config, tmp_path, names, start):
    with pytest.raises(UsageError, match=f"{names[1]} and {names[0]} are one machine .*; fix: name each host once"):
        Launch(load_config([config], {}), [HostLine(name) for name in names], start).launch()
    assert not (tmp_path / "runs").exists()


def test_a_host_with_one_gpu_shares_it(config, tmp_path, monkeypatch, capsys):
    tokenizer = make_tokenizer()
    save(
        make_model(Settings(layers=2, width=64, heads=2, intermediate=128), len(tokenizer)),
        tokenizer,
        tmp_path / "model",
    )
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(shared_gpus, "read_gpu", lambda gpu: {"0": card(24 << 30)}[gpu])
    argv = [config, "--hosts", str(tmp_path / "hosts"), "--model.path", str(tmp_path / "model"), "--dry-run"]
    argv += ["--learner.backend", "fsdp2", "--rollout.engine", "vllm", "--rollout.replicas", "1"]
    argv += ["--data.max_prompt_tokens", "64", "--rollout.max_tokens", "64"]
    code, (shown, problems) = launch.main(argv), capsys.readouterr()
    lines = [line for line in shown.splitlines() if "GPU 0" in line]
    assert code == 0, problems
    assert [line.split()[0] for line in lines] == ["learner/0", "rollouter/0", "ok"]
    assert "GPU 0 with rollouter/0" in lines[0] and "GPU 0 with learner/0" in lines[1]
    shared = "GPU 0 is shared by learner/0 and rollouter/0 (there are too few GPUs for one each): "
    assert f"{shared}the learner's rank may take" in lines[2]
    assert launch.main([*argv, "--placement.share", "always"]) == 0
    assert 'rollouter/0 (placement.share = "always"): the learner\'s rank' in capsys.readouterr().out
    assert launch.main([*argv, "--placement.share", "never"]) == 78
    assert 'or set placement.share = "auto"' in capsys.readouterr().err
    monkeypatch.setattr(check_list, "read_gpu", lambda gpu: card(24 << 30, 2 << 30))
    assert launch.main(argv) == 0
    assert "other processes use 2.15 GB of GPU 0" in capsys.readouterr().out
    monkeypatch.setattr(shared_gpus, "read_gpu", lambda gpu: card(1 << 30))
    assert launch.main(argv) == 78
    assert f"placement.share: {shared}a rank" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["the key", "the working folder", "a run to resume", "a job"])
def test_a_run_folder_with_an_undecodable_name_is_refused(config, tmp_path, by, monkeypatch, capsys):
    folder = tmp_path / "caf\udce9"
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "config.json").write_text("{}")
    monkeypatch.chdir(folder)
    key = "--resume" if by == "a run to resume" else "run.dir"
    flags = {
        "the key": ["--run.dir", str(folder)],
        "the working folder": ["--run.dir", "."],
        "a run to resume": ["--resume", str(folder / "run")],
        "a job": ["--run.dir", str(folder), "--slurm", "--nodes", "1", "--dry-run"],
    }
    assert launch.main([config, *flags[by]]) == 2
    said = capsys.readouterr().err
    assert f"{key}: {tmp_path}/caf\\udce9" in said and "is not UTF-8" in said
    assert [path.name for path in folder.rglob("*")] == ["run", "config.json"]


def test_a_broken_reward_function_is_refused_before_the_start(config, tmp_path, monkeypatch, capsys):
    """Not even the launcher: what the function does happens in a process of its own."""
    (tmp_path / "mine.py").write_text('\ndef reward(*, completion, row):\n    return row["anwser"]\n')
    monkeypatch.chdir(tmp_path)
    assert launch.main([config, "--reward.function", "mine:reward"]) == 78
    assert f"raised KeyError: 'anwser' ({tmp_path}/mine.py:3), on synthetic:1" in capsys.readouterr().err
    assert "mine" not in sys.modules and not (tmp_path / "runs").exists()


def test_a_signal_ends_the_checks_and_their_processes(config, tmp_path):
    (tmp_path / "slow.py").write_text("import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(600)\n")
    argv = [sys.executable, "-m", "asyncrl.cli.launch", config, "--reward.function", "slow:reward"]
    launching = subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        wait_until((tmp_path / "begun").exists, "the import of the reward function")
        (worker,) = children_of(launching.pid)
        launching.send_signal(signal.SIGINT)
        assert launching.communicate(timeout=60)[1] == "asyncrl-launch: ended by SIGINT\n"
    finally:
        launching.kill()
        launching.communicate()
    assert launching.returncode == 130 and not Path("/proc", str(worker)).exists()


# --- resume ---


@pytest.fixture
def left(config):
    """A run that was left with a checkpoint of version 3, step 3."""
    settings = load_config([config], {})
    run = create_run_folder(settings).path
    prompts = load_dataset(settings.data)
    write_checkpoint(settings, run, 3, fingerprint=prompts.fingerprint, prompts=len(prompts.rows))
    (run / "export").mkdir()
    return run


@pytest.mark.parametrize("resume", [[], ["--resume", "auto"], ["--resume=runs/my run"]])
def test_the_printed_command_omits_the_resume_flag(resume):
    argv = ["my run.toml", *resume, "--learner.steps", "9"]
    assert launch.without_resume(argv) == "asyncrl-launch 'my run.toml' --learner.steps 9"


def test_a_run_that_cannot_be_resumed_names_the_reason(config, left, capsys):
    resume, fewer = ["--resume", "auto"], "3 rows now; it had 1,024 rows"
    before = {path: path.stat().st_mtime_ns for path in left.rglob("*")}
    for flags, code, said in (
        ([*resume, "--run.name", "other"], 2, "runs/other holds no run"),
        (["--resume", "/nowhere"], 2, "--resume /nowhere: there is no such folder"),
        ([*resume, "--run.seed", "7"], 78, "run.seed: was 0 when the run stopped, is 7 now"),
        ([*resume, "--data.size", "3"], 78, fewer),
        ([*resume, "--data.size", "3", "--dry-run"], 78, "--allow-changed-data"),
    ):
        assert launch.main([config, *flags]) == code
        shown = capsys.readouterr().err
        assert said in shown and "--help-config" not in shown, shown
    assert {path: path.stat().st_mtime_ns for path in left.rglob("*")} == before
    write_checkpoint(load_config([config], {}), left, 4, fingerprint="f", prompts=1024)
    assert launch.main([config, *resume]) == 78
    assert "it had as many, but others" in capsys.readouterr().err
    (left / "checkpoints" / "v00000003" / "state.json").write_text("{")
    (left / "checkpoints" / "v00000004" / "state.json").write_text("{")
    assert launch.main([config, *resume]) == 1
    assert "state.json" in capsys.readouterr().err


def test_allowed_changes_are_part_of_the_configuration(config, left, capsys):
    changed = ["--run.seed", "7", "--rollout.samples_per_prompt", "2"]
    argv = [config, "--dry-run", "--resume", "auto", *changed, "--allow-changed-seed", "--allow-changed-batch"]
    assert launch.main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["resume"]["allow"] == ["seed", "batch"]
    assert launch.main([*argv, "--data.size", "3", "--allow-changed-data"]) == 0
    assert f"resuming {left} from version 3, step 3: {left}/checkpoints/v00000003" in capsys.readouterr().out
    assert sorted(entry.name for entry in (left / "logs").iterdir()) == ["attempt_1"]


def test_a_finished_run_without_more_steps_is_not_resumed(config, left, tmp_path, capsys):
    """It needs nothing any more, so nothing is checked, here or on other hosts."""
    (tmp_path / "hosts.txt").write_text("localhost\n")
    argv = [config, "--resume", "auto", "--learner.steps", "2", "--data.source=jsonl", "--data.path=/nowhere.jsonl"]
    said = f"{left} is finished: step 3 of 2; raise learner.steps to train more\n"
    for more in ([], ["--hosts", str(tmp_path / "hosts.txt")]):
        assert launch.main([*argv, *more]) == 0
        assert capsys.readouterr() == (said, "")
        assert launch.main([*argv, *more, "--dry-run"]) == 0
        plan = capsys.readouterr().out
        assert plan.endswith(said) and "placement:" in plan and "checks:" not in plan
        assert ("hosts:" in plan) == bool(more)
    assert launch.main([*argv, "--dry-run", "--learner.steps", "4"]) == 78
    assert "/nowhere.jsonl: no such file" in capsys.readouterr().err
    assert sorted(entry.name for entry in (left / "logs").iterdir()) == ["attempt_1"]
