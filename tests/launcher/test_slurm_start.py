"""Starting a run's parts under SLURM: the steps, the hosts of a job, the batch script. No SLURM is needed."""

import asyncio
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest

from asyncrl.cli.launch import main
from asyncrl.config.load import load_config, validate_config
from asyncrl.core.errors import HostFailed, UsageError
from asyncrl.launcher.agent_handle import AgentHandle
from asyncrl.launcher.common.agent_messages import HostOffer
from asyncrl.launcher.hosts.contact import Contact
from asyncrl.launcher.hosts.hostfile import HostLine
from asyncrl.launcher.hosts.start import SlurmStart
from asyncrl.launcher.slurm import batch_script, gpus_of_a_node, job_hosts, left_open, resume_of, start_of
from tools.waiting import wait_until

SCRIPTS = Path(__file__).parents[2] / "launch" / "slurm"
IN_JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[1-2]"}
CONFIG = """
[run]
name = "trial"
dir = "{folder}/runs"
[data]
source = "synthetic"
[rollout]
engine = "sim"
[learner]
backend = "sim"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "trial.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


@pytest.fixture
def config(file):
    return load_config([str(file)], {})


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Makes a command of this name and shell text; there is no other, so none of a SLURM that is installed here."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("grep", "sleep"):
        (folder / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(folder))

    def make(name, text):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)

    return make


# --- steps ---


@pytest.mark.parametrize("container", [None, "--container-image=/a.sqsh --container-mounts=/d:/d"])
def test_each_part_is_one_slurm_step_on_one_node_with_the_python_of_its_container(container):
    argv = start_of(container).argv("node-1")
    assert argv[0] == "srun"
    assert {"--nodes=1", "--ntasks=1", "--nodelist=node-1", "--overlap", "--export=ALL"} <= set(argv)
    led = [*shlex.split(container), "python3"] if container else [sys.executable]
    assert argv[-2 - len(led) :] == [*led, "-m", "asyncrl.launcher.hosts.remote"]


@pytest.mark.parametrize("container", ["   ", "apptainer 'exec"])
def test_a_container_that_cannot_be_read_is_refused(container):
    with pytest.raises(UsageError, match="--container"):
        start_of(container)


PYTHON = "slurmstepd: error: execve(): /opt/python: No such file or directory\nsrun: error: n2: task 0: Exited\n"
MODULE = "/opt/python: No module named asyncrl\nsrun: error: n2: task 0: Exited with exit code 1\n"


def test_a_failed_slurm_step_names_its_reason_and_whether_it_was_killed():
    for errors, reported in (
        (PYTHON, "no Python can run there at /opt/python"),
        (MODULE, "no asyncrl of this version is installed for /opt/python (No module named asyncrl)"),
        ("srun: error: Unable to create step for job 3: Invalid node name", "Unable to create step for job 3"),
        ("", "asyncrl did not start there"),
    ):
        assert reported in SlurmStart(python="/opt/python").explain("n2", 1, errors)
    killed = "srun: error: n2: task 0: Killed\n"
    assert [code for code in (0, 1, 75, 128, 137, 143, -9) if SlurmStart().is_lost(code, killed)] == [137, 143, -9]


def test_a_slurm_step_with_only_its_agent_killed_is_not_lost(tools, tmp_path):
    """Its guard has ended everything there, and reports the signal by its exit code."""
    found = []

    async def end(errors):
        facts = HostOffer(version=version("asyncrl"), hostname="n2", cpus=1, gpus=[], interfaces={})
        tools("srun", f"echo '{msgspec.json.encode(facts).decode()}'; echo '{errors}' >&2; exit 137")
        contact = Contact("n2", SlurmStart())
        await contact.reach()
        handle = AgentHandle(1, contact)
        await handle.hear(tmp_path, None, None)
        found.append((handle.lost, handle.exit_words))

    for errors in ("srun: error: n2: task 0: Exited with exit code 137", "srun: error: n2: task 0: Killed"):
        asyncio.run(end(errors))
    assert found == [(False, "killed by SIGKILL"), (True, "killed by SIGKILL")]


def test_the_nodes_of_a_job_are_its_hosts_in_order(tools):
    with pytest.raises(UsageError, match="not within a SLURM job"):
        job_hosts({})
    with pytest.raises(HostFailed, match="scontrol is not found"):
        job_hosts(IN_JOB)
    for script, said in (("exit 0", "knows no node"), ("echo scontrol: out of order >&2; exit 1", "out of order")):
        tools("scontrol", script)
        with pytest.raises(HostFailed, match=said):
            job_hosts(IN_JOB)
    tools("scontrol", 'echo "$*" >&2; [ "$*" = "show hostnames node-[1-2]" ] && echo node-1 && echo node-2')
    assert job_hosts(IN_JOB) == [HostLine("node-1"), HostLine("node-2")]


def test_a_job_resumes_its_run_if_the_run_exists(config):
    run = Path(config.run.dir) / config.run.name
    run.mkdir(parents=True)
    assert resume_of(config, None) is None
    (run / "config.json").write_text("{}")
    assert (resume_of(config, None), resume_of(config, "/else/where")) == ("auto", "/else/where")


# --- the script ---


def test_the_job_script_calls_the_command_with_its_arguments_and_equals_the_repositorys(config):
    script = batch_script(config, ["launch", "it's.toml", "--a.b=[1, 2]"], nodes=3, options="-p gpu --time=4:00:00")
    lines = script.splitlines()
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert lines[0] == "#!/bin/bash"
    assert f"#SBATCH --output={config.run.dir}/trial-%j.out" in options
    assert {"#SBATCH --requeue", "#SBATCH --signal=B:USR2@120", "#SBATCH --nodes=3"} <= set(options)
    # The user's options come last, so they win.
    assert options[-1] == "#SBATCH -p gpu --time=4:00:00"
    (words,) = [line for line in lines if line.startswith("set -- ")]
    assert shlex.split(words)[2:] == ["launch", "it's.toml", "--a.b=[1, 2]"]
    for nodes, asked, said in (
        (0, "", "--nodes 0"),
        (1, "-p gpu\nrm", "one line"),
        (1, "--comment='x", "--sbatch-args"),
    ):
        with pytest.raises(UsageError, match=said):
            batch_script(config, [], nodes=nodes, options=asked)
    file = SCRIPTS / "train.sbatch"
    text, made = file.read_text(), batch_script(config, [], nodes=2)
    for line in (line for line in made.splitlines() if line.startswith("#SBATCH")):
        assert any(key in line for key in ("job-name", "chdir", "output")) or line in text.splitlines()
    assert text.endswith(made[made.index("\nset -- \n") + len("\nset -- \n") :])
    assert "scontrol requeue" in text and stat.S_IMODE(file.stat().st_mode) & 0o111


def sized(ranks, replicas, each, device="auto", engine="vllm", share="auto"):
    return validate_config(
        {
            "model": {"path": "m"},
            "data": {"source": "synthetic"},
            "rollout": {"engine": engine, "replicas": replicas, "gpus_per_replica": each},
            "reward": {"workers": 2},
            "learner": {"ranks": ranks, "device": device},
            "placement": {"share": share},
        }
    )


@pytest.mark.parametrize(
    ("config", "nodes", "gpus", "cpus"),
    [
        # On one node: controller, dataloader, parameter server, reward and its workers, and a process for each GPU.
        (sized(4, 4, 1), 1, 8, 6 + 8),
        # On several the reward pool is not on the head.
        (sized(4, 4, 1), 2, 4, 3 + 4),
        (sized(1, 1, 2), 1, 3, 8),
        # An engine does not span nodes.
        (sized(1, 3, 2), 2, 4, None),
        (sized(2, 4, 1, device="cpu"), 1, 4, 12),
        (sized(2, 2, 0, device="cpu"), 1, 0, None),
        (sized(2, 2, None), 1, None, None),
        (sized(2, 2, None, engine="reference", device="cuda"), 2, 1, None),
        # On shared GPUs the larger side counts.
        (sized(1, 1, 1, share="always"), 1, 1, None),
        (sized(1, 4, 1, share="always"), 2, 2, None),
        (sized(1, 1, 1, share="never"), 1, 2, None),
    ],
)
def test_a_job_asks_for_the_gpus_that_the_run_takes_for_certain(config, nodes, gpus, cpus):
    assert gpus_of_a_node(config, nodes) == gpus
    lines = batch_script(config, [], nodes=nodes).splitlines()
    assert [line for line in lines if "gpus-per-node" in line] == [f"#SBATCH --gpus-per-node={gpus}"] * bool(gpus)
    asked = [line for line in lines if "cpus-per-task" in line]
    assert len(asked) == bool(gpus)
    if cpus is not None:
        assert asked == [f"#SBATCH --cpus-per-task={cpus}"]
    # Options of the user are not asked for again.
    for options in ("--gres=gpu:8 -c 64", "--gpus-per-node 8 --exclusive", "-G8 --cpus-per-gpu=8"):
        lines = batch_script(config, [], nodes=nodes, options=options).splitlines()
        assert [line for line in lines if "gpu" in line or "cpu" in line] == [f"#SBATCH {options}"]


@pytest.mark.parametrize(
    ("each", "options", "env", "open_"),
    [
        (1, "", {}, ["time"]),
        (1, "-t 60", {}, []),
        (1, "", {"SBATCH_TIMELIMIT": "60"}, []),
        (None, "", {}, ["GPUs", "CPUs", "time"]),
        (None, "--gpus-per-node=8 --time=60", {}, ["CPUs"]),
        (None, "--gres=gpu:8 --exclusive", {}, ["time"]),
    ],
)
def test_resources_left_to_the_defaults_of_the_cluster_are_printed(each, options, env, open_):
    found = left_open(sized(4, 4, each), nodes=1, options=options, env=env)
    assert [line.partition(":")[0] for line in found] == open_
    assert all("--sbatch-args" in line for line in found)


def run_script(env, *argv):
    return subprocess.Popen(
        ["/bin/bash", str(SCRIPTS / "train.sbatch"), *argv],
        env={**os.environ, **IN_JOB, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("number", "exit_code", "requeued"),
    [
        (signal.SIGUSR2, 75, True),
        (signal.SIGUSR2, 140, True),
        (signal.SIGUSR2, 1, False),
        # By SIGTERM SLURM itself ends the job, because it was cancelled perhaps: it alone knows what comes next.
        (signal.SIGTERM, 75, False),
    ],
)
def test_the_script_passes_the_signal_on_and_queues_the_job_again(tools, number, exit_code, requeued):
    tools("scontrol", 'echo "scontrol $*"')
    tools(
        "asyncrl-launch",
        f"trap 'reported=1' USR2; echo up; while [ -z $reported ]; do sleep 0.05; done; exit {exit_code}",
    )
    script = run_script({}, "x.toml")
    assert script.stdout.readline() == "job 7, start 1, on node-[1-2]\n"
    assert script.stdout.readline() == "up\n"
    script.send_signal(number)
    if number == signal.SIGTERM:
        # SLURM sends it to all processes; here the launcher hears of it in another way.
        pending = Path(f"/proc/{script.pid}/status")
        wait_until(lambda: "ShdPnd:\t0000000000000000" in pending.read_text(), "the trap")
        children = Path(f"/proc/{script.pid}/task/{script.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGUSR2)
    shown = script.communicate(timeout=30)[0]
    assert script.returncode == exit_code
    assert ("scontrol requeue 7" in shown) == requeued


def test_the_script_ends_as_the_run_does_in_the_container_of_the_site(tools):
    tools("scontrol", 'echo "scontrol $*"')
    for exit_code, container in ((0, ""), (75, "--image=/a b")):
        tools("asyncrl-launch", f'for word; do echo "<$word>"; done; exit {exit_code}')
        script = run_script({"SLURM_RESTART_COUNT": "2", "ASYNCRL_CONTAINER": container}, "x.toml")
        first, *words = script.communicate(timeout=30)[0].splitlines()
        led = [f"<--container={container}>"] if container else []
        assert (first, words) == ("job 7, start 3, on node-[1-2]", ["<--inside-slurm>", *led, "<x.toml>"])
        assert script.returncode == exit_code


# --- the command ---


def test_a_dry_run_shows_the_script_and_leaves_nothing(file, tools, capsys):
    flags = ["--slurm", "--nodes=2", "--sbatch-args=--partition=gpu", "--container=--image=/a.b=c", "--dry-run"]
    assert main([str(file), "--learner.steps", "9", *flags]) == 0
    shown, warned = capsys.readouterr()
    assert "#SBATCH --partition=gpu" in shown.splitlines()
    assert [line.split()[2] for line in warned.splitlines()] == ["CPUs:", "time:"]
    (words,) = [line for line in shown.splitlines() if line.startswith("set -- ")]
    command = [sys.executable, "-m", "asyncrl.cli.launch", "--inside-slurm", str(file)]
    assert shlex.split(words)[2:] == [*command, "--learner.steps=9", "--container=--image=/a.b=c"]
    assert not (file.parent / "runs").exists()


def test_a_job_is_submitted_and_named_or_the_reason_is_printed(file, tools, monkeypatch, capsys):
    argv = [str(file), "--slurm", "--nodes=2"]
    assert main(argv) == 1 and "sbatch is not found" in capsys.readouterr().err
    assert not (file.parent / "runs").exists()
    tools("sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    assert main(argv) == 1 and "invalid partition specified: x" in capsys.readouterr().err
    tools("sbatch", '[ "$1" = --parsable ] && grep -q inside-slurm "$2" && echo "12;cluster"')
    tools("scontrol", "echo JobId=12 JobState=PENDING StdOut=/there/trial-12.out")
    assert main(argv) == 0
    script = file.parent / "runs" / "trial.sbatch"
    assert script.is_file()
    assert capsys.readouterr().out == f"submitted job 12 ({script}); its output goes to /there/trial-12.out\n"
    for key in IN_JOB:
        monkeypatch.delenv(key, raising=False)
    assert main([str(file), "--inside-slurm"]) == 2 and "--slurm submits one" in capsys.readouterr().err
