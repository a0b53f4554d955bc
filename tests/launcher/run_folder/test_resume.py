"""Checkpoints that a run is resumed from, and reasons that keep it from being resumed."""

import asyncio
import io
import os
import shutil
from pathlib import Path

import msgspec
import pytest
from disks import flip, tear
from made_group import make_group
from run_settings import simulated_run

from asyncrl.checkpoint import DIGESTS
from asyncrl.checkpoint.contents import CheckpointState, TrainerContents, write_contents
from asyncrl.checkpoint.folder import COMPLETE, CheckpointFolder, checkpoint_dir
from asyncrl.checkpoint.origin import Origin
from asyncrl.config.load import config_from_json
from asyncrl.core.errors import CheckpointError, ConfigError, RunChanged, UsageError
from asyncrl.core.files import write_file
from asyncrl.launcher.common import placement
from asyncrl.launcher.host_part import host_spec
from asyncrl.launcher.hosts.hostfile import HostLine
from asyncrl.launcher.launch import Launch, begin, plan_rows
from asyncrl.launcher.run_folder import resume
from asyncrl.launcher.run_folder.folders import create_run_folder, private_folder
from asyncrl.launcher.run_folder.resume import find_resumption
from asyncrl.launcher.terminal.progress import TerminalProgress
from asyncrl.messages.ledger import LedgerState

FILES = ["state.json", "groups.msgpack", "trainer/contents.json"]


def config(tmp_path, **sections):
    tree = {
        "run": {"name": "trial", "dir": str(tmp_path / "runs"), "seed": 3},
        "rollout": {"samples_per_prompt": 2},
        "learner": {"steps": 10, "groups_per_step": 4},
    }
    return simulated_run(**tree | {name: tree.get(name, {}) | section for name, section in sections.items()})


def write_checkpoint(settings, run, version, **changes):
    """A complete checkpoint of a run, of ``version`` at the step of that number."""
    folder = CheckpointFolder(checkpoint_dir(settings, run))
    folder.claim(1)
    partial = folder.begin(version)
    trainer = partial / "trainer"
    trainer.mkdir()
    digest = write_file(trainer / "__0_0.distcp", [bytes(range(256)) * 16])
    contents = TrainerContents(steps=version, world_size=1, files={"__0_0.distcp": digest})
    write_file(trainer / "contents.json", [msgspec.json.encode(contents)])
    state = {
        "version": version,
        "step": version,
        "ledger": LedgerState(),
        "fingerprint": "f",
        "seed": settings.run.seed,
        "origin": Origin.of(settings),
    }
    buffered = changes.pop("buffered", [])
    write_contents(partial, CheckpointState(**state | changes), buffered, [])
    return folder.commit(partial, version=version, step=version, files=FILES)


@pytest.fixture
def left(tmp_path):
    """A run that was left with the checkpoints 2 and 4."""
    settings = config(tmp_path)
    folder = create_run_folder(settings)
    for version in (2, 4):
        write_checkpoint(settings, folder.path, version)
    return folder.path


def begun(settings, resumption):
    """Names of what a start of this resumption sets aside."""
    with private_folder(resumption.folder, settings):
        return [path.name for path in resumption.begin(settings)]


# --- which run and checkpoint ---


def test_a_run_resumes_by_its_name_its_folder_or_a_checkpoint(tmp_path, left, monkeypatch):
    found, resumption = find_resumption(config(tmp_path), "auto")
    assert (resumption.folder.path, resumption.folder.attempt) == (left, 2)
    assert (resumption.checkpoint.version, resumption.is_finished) == (4, False)
    assert resumption.describe() == f"resuming {left} from version 4, step 4: {left / 'checkpoints' / 'v00000004'}"
    assert found == config(tmp_path)
    # The configuration may name another run.
    other = config(tmp_path, run={"name": "another", "dir": str(tmp_path / "elsewhere")})
    monkeypatch.chdir(left.parent)
    for place in (str(left), "trial", str(left / "checkpoints" / "v00000004")):
        settings, resumption = find_resumption(other, place)
        assert (resumption.folder.path, resumption.checkpoint.version) == (left, 4)
        assert (settings.run.name, settings.run.dir, settings.run.seed) == ("trial", str(left.parent), 3)
    for place in ("nowhere", "runs", "runs/trial/checkpoints", "runs/trial/logs/attempt_1"):
        with pytest.raises((UsageError, CheckpointError)):
            find_resumption(config(tmp_path), str(tmp_path / place))


def test_auto_needs_a_run_but_no_checkpoint(tmp_path):
    settings = config(tmp_path)
    with pytest.raises(UsageError, match=r"runs/trial holds no run; .*without --resume"):
        find_resumption(settings, "auto")
    assert not (tmp_path / "runs").exists()
    path = create_run_folder(settings).path
    # An empty folder of that name is nothing that was trained.
    (path / "checkpoints" / "v00000009").mkdir(parents=True)
    _, resumption = find_resumption(settings, "auto")
    assert resumption.checkpoint is None
    assert "from the initial weights: it has no complete checkpoint" in resumption.describe()
    assert resumption.warnings == [f"{path} has no checkpoint: training begins from the initial weights, at step 1"]


def test_a_new_attempt_keeps_the_earlier_configuration_in_the_run_folder(tmp_path, left, monkeypatch):
    def refuse(*_):
        raise PermissionError("a file system without hard links")

    monkeypatch.setattr(os, "link", refuse)
    before = (left / "config.json").read_text()
    changed = config(tmp_path, learner={"steps": 20})
    settings, resumption = find_resumption(changed, "auto")
    assert begun(settings, resumption) == []
    assert config_from_json((left / "config.json").read_text()) == changed
    assert (left / "config_attempt_1.json").read_text() == before
    assert resumption.folder.logs == left / "logs" / "attempt_2"
    assert sorted(os.listdir(left)) == ["checkpoints", "config.json", "config_attempt_1.json", "logs"]
    assert find_resumption(changed, "auto")[1].folder.attempt == 3


@pytest.mark.parametrize("written", [(1 << 32) + 3, 1_770_000_000_000_000_000])
def test_incarnations_of_a_resumed_run_are_above_the_newest_writer(tmp_path, left, written):
    """And above those of an earlier version, which were times."""
    CheckpointFolder(left / "checkpoints").claim(written)
    settings, resumption = find_resumption(config(tmp_path, learner={"steps": 20}), "auto")
    with private_folder(resumption.folder, settings):
        above = begin(resumption.folder, resumption, settings, TerminalProgress(io.StringIO(), 20))
    assert written < above < 1 << 62
    CheckpointFolder(left / "checkpoints").claim(above + 1)


def test_a_resume_from_an_older_checkpoint_sets_newer_ones_aside(tmp_path, left):
    settings, resumption = find_resumption(config(tmp_path), str(left / "checkpoints" / "v00000002"))
    assert (resumption.folder.path, resumption.checkpoint.version) == (left, 2)
    # Nothing is changed by looking.
    assert CheckpointFolder(left / "checkpoints").newest().version == 4
    assert begun(settings, resumption) == ["abandoned-v00000004"]
    assert CheckpointFolder(left / "checkpoints").newest().version == 2


def test_checkpoints_outside_the_run_folder_belong_to_the_run_of_their_name(tmp_path):
    settings = config(tmp_path, checkpoint={"dir": str(tmp_path / "big")})
    run = create_run_folder(settings).path
    path = write_checkpoint(settings, run, 2)
    assert path.parent == tmp_path / "big" / "trial"
    for place in ("auto", str(run), str(path)):
        found, resumption = find_resumption(settings, place)
        assert (resumption.folder.path, resumption.checkpoint.path, found.run.name) == (run, path, "trial")
    # A new run does not come upon them by its name.
    shutil.rmtree(run)
    assert create_run_folder(settings).path.name == "trial-2"


def test_a_finished_run_continues_with_more_steps(tmp_path, left):
    def is_finished(**sections):
        return find_resumption(config(tmp_path, **sections), "auto")[1].is_finished

    write_checkpoint(config(tmp_path), left, 10)
    # The last step is trained, but the weights are not yet written for the user.
    assert not is_finished() and is_finished(checkpoint={"export_at_end": False})
    (left / "export").mkdir()
    assert is_finished() and not is_finished(learner={"steps": 12})
    # The model of the first end, once an attempt with more steps has begun and written its last checkpoint.
    more = config(tmp_path, learner={"steps": 12})
    _, resumption = find_resumption(more, "auto")
    os.utime(left / "export", (0, 0))
    with private_folder(resumption.folder, more):
        resumption.begin(more)
    write_checkpoint(more, left, 12)
    assert not is_finished(learner={"steps": 12})


def test_a_live_run_cannot_be_resumed(tmp_path, left):
    settings, resumption = find_resumption(config(tmp_path), "auto")
    with private_folder(resumption.folder, settings):
        with pytest.raises(UsageError, match="in use"):
            find_resumption(settings, "auto")
        # Two at the same moment: one of them gets the folder.
        with pytest.raises(UsageError, match="in use"), private_folder(resumption.folder, settings):
            pass
        assert (left / "private" / "run.json").exists()
    assert sorted(os.listdir(left)) == ["checkpoints", "config.json", "logs"]


def test_a_run_that_another_head_has_resumed_meanwhile_stays_unchanged(tmp_path, left):
    settings, resumption = find_resumption(config(tmp_path), str(left / "checkpoints" / "v00000002"))
    launch = Launch(settings, [HostLine("elsewhere")], head="elsewhere", resumption=resumption)
    with private_folder(resumption.folder, settings), pytest.raises(UsageError, match="in use"):
        asyncio.run(launch.run())
    assert sorted(os.listdir(left)) == ["checkpoints", "config.json", "logs"]
    assert os.listdir(left / "logs") == ["attempt_1"]
    assert CheckpointFolder(left / "checkpoints").newest().version == 4


@pytest.mark.parametrize("elsewhere", [False, True])
def test_auto_resumes_the_run_with_the_newest_checkpoint_and_names_the_others(tmp_path, elsewhere):
    settings = config(tmp_path, **({"checkpoint": {"dir": str(tmp_path / "big")}} if elsewhere else {}))
    runs = [create_run_folder(settings).path for _ in range(4)]
    assert find_resumption(settings, "auto")[1].folder.path == runs[3]
    good, older = (write_checkpoint(settings, runs[index], version) for index, version in ((2, 6), (0, 8)))
    os.utime(older / COMPLETE, (1e9, 1e9))
    # A run that its user called trial-9 is not one of the name.
    write_checkpoint(config(tmp_path), create_run_folder(config(tmp_path, run={"name": "trial-9"})).path, 6)
    found, resumption = find_resumption(settings, "auto")
    assert (resumption.checkpoint.path, resumption.folder.path, found.run.name) == (good, runs[2], "trial-3")
    assert resumption.describe().endswith("(its newest checkpoint is newer than any of trial, trial-2, trial-4)")
    # A resumed run still belongs to the name.
    begun(found, resumption)
    assert find_resumption(settings, "auto")[1].folder.path == runs[2]
    with private_folder(create_run_folder(settings), settings), pytest.raises(UsageError, match="trial-5 is in use"):
        find_resumption(settings, "auto")


# --- what must be the same ---


@pytest.mark.parametrize(
    ("sections", "what", "said"),
    [
        ({"run": {"seed": 4}}, "seed", "run.seed: was 3 when the run stopped, is 4 now"),
        (
            {"learner": {"steps_per_version": 2}, "rollout": {"samples_per_prompt": 4}},
            "batch",
            "learner.steps_per_version, rollout.samples_per_prompt: was 1, 2 .* is 2, 4 now",
        ),
    ],
)
def test_i1_a_change_of_a_key_that_the_ledger_depends_on_is_refused(tmp_path, left, sections, what, said):
    """Another order of the data would train some prompts twice and others never."""
    with pytest.raises(RunChanged, match=said + f".*--allow-changed-{what}") as refused:
        find_resumption(config(tmp_path, **sections), "auto")
    assert refused.value.exit_code == 78
    other = "batch" if what == "seed" else "seed"
    with pytest.raises(RunChanged):
        find_resumption(config(tmp_path, resume={"allow": [other]}, **sections), "auto")
    _, resumption = find_resumption(config(tmp_path, resume={"allow": [what]}, **sections), "auto")
    assert resumption.checkpoint.version == 4


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ({}, {"rank": 8}, ["lora.rank: was 0 when the run was left, is 8 now"]),
        ({"rank": 8}, {}, ["lora.rank: was 8 when the run was left, is 0 now"]),
        (
            {"rank": 8, "alpha": 16.0},
            {"rank": 8, "alpha": 32.0, "targets": ["q_proj"]},
            ["lora.alpha: was 16.0", "lora.targets: was all-linear when the run was left, is ['q_proj'] now"],
        ),
        ({"rank": 8, "targets": ["a", "b"]}, {"rank": 8, "targets": ["b", "a"], "publish": "merged"}, []),
    ],
)
def test_adapters_must_be_of_the_same_form(tmp_path, was, now, said):
    def settings(lora):
        rollout = {"engine": "reference", "gpus_per_replica": 0}
        return config(tmp_path, model={"path": "m"}, rollout=rollout, learner={"backend": "fsdp2"}, lora=lora)

    left = create_run_folder(settings(was)).path
    write_checkpoint(settings(was), left, 2)
    if not said:
        assert find_resumption(settings(now), "auto")[1].checkpoint.version == 2
        return
    with pytest.raises(ConfigError) as refused:
        find_resumption(settings(now), "auto")
    assert refused.value.exit_code == 78 and len(refused.value.problems) == len(said)
    assert all(text in problem for text, problem in zip(said, refused.value.problems, strict=True))


def test_a_backend_refuses_the_checkpoint_of_another(tmp_path):
    was = config(tmp_path)
    left = create_run_folder(was).path
    write_checkpoint(was, left, 2)
    rollout = {"engine": "reference", "gpus_per_replica": 0}
    now = config(tmp_path, model={"path": "m"}, rollout=rollout, learner={"backend": "fsdp2"})
    with pytest.raises(ConfigError, match=r"learner\.backend: was sim when the run was left, is fsdp2 now"):
        find_resumption(now, "auto")


# --- what a resume changes ---


def test_each_changed_key_is_printed_with_its_values_its_effect_and_the_returned_groups(tmp_path):
    was = config(tmp_path)
    left = create_run_folder(was).path
    write_checkpoint(was, left, 2, origin=Origin.of(was), buffered=[make_group(f"0-{index}") for index in range(3)])
    # The folder is the run's own, also if the configuration names another.
    changed = {"learner": {"lr": 1e-5}, "rollout": {"temperature": 0.25}, "resume": {"allow": ["seed"]}}
    settings, resumption = find_resumption(config(tmp_path, run={"dir": "elsewhere", "seed": 4}, **changed), str(left))
    expected = [
        "changed: run.seed was 3, is 4; the change applies to the order of the prompts",
        "changed: rollout.temperature was 1.0, is 0.25; the change applies to groups that are generated from now on",
        "changed: learner.lr was 1e-06, is 1e-05; the change applies at once",
        "3 groups of the checkpoint are given back and generated again: rollout.temperature",
    ]
    assert resumption.describe_changes(settings) == expected
    placed = placement.place(settings, [placement.PlacementHost(name="here", cpus=2)])
    assert plan_rows(settings, placed, [], resumption)[-4:] == expected
    out = io.StringIO()
    with private_folder(resumption.folder, settings):
        begin(resumption.folder, resumption, settings, TerminalProgress(out, 10))
    said = out.getvalue().splitlines()
    assert said[1:5] == expected
    assert (resumption.folder.logs / "resumed_from.txt").read_text().splitlines()[1:5] == expected
    # Nothing that groups depend on: they stay.
    settings, resumption = find_resumption(config(tmp_path, learner={"lr": 1e-5}), "auto")
    assert resumption.describe_changes(settings) == expected[2:3]
    settings, resumption = find_resumption(config(tmp_path), "auto")
    assert resumption.describe_changes(settings) == []


def test_each_attempt_records_the_digests_of_its_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = tmp_path / "mine.py"
    code.write_text("def score(): return 1.0")
    was = config(tmp_path, reward={"function": "mine:score"})
    folder = create_run_folder(was)
    begin(folder, None, was, TerminalProgress(io.StringIO(), 10))
    first = Origin.recorded(was, folder.path)
    code.write_text("def score(): return 2.0")
    assert Origin.recorded(was, folder.path) == first != Origin.of(was)
    write_checkpoint(was, folder.path, 2, origin=first)
    settings, resumption = find_resumption(was, "auto")
    with private_folder(resumption.folder, settings):
        begin(resumption.folder, resumption, settings, TerminalProgress(io.StringIO(), 10))
    assert Origin.recorded(settings, folder.path) == Origin.of(settings)
    # A host that does not see the run folder gets the same digests.
    spec = host_spec(settings, resumption.folder, 1, {})
    assert spec.files == {DIGESTS: (folder.path / DIGESTS).read_text()}


# --- damaged checkpoints ---


def _another_step(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"step":4', b'"step":5'))


DAMAGES = [
    ("COMPLETE", os.unlink, "is not complete"),
    ("COMPLETE", tear, "cannot be read"),
    ("COMPLETE", _another_step, "says step 5, and state.json says 4"),
    ("state.json", flip, "its checksum differs"),
    ("groups.msgpack", os.unlink, "cannot be read: No such file"),
    ("trainer/contents.json", flip, "its checksum differs"),
    ("trainer/__0_0.distcp", tear, "has 2048 bytes instead of 4096"),
    ("trainer/__0_0.distcp", flip, "its checksum differs"),
    ("trainer/__0_0.distcp", os.unlink, "cannot be read: No such file"),
]


@pytest.mark.parametrize(("name", "damage", "said"), DAMAGES)
def test_a_damaged_checkpoint_is_refused_if_named_and_else_skipped(tmp_path, left, name, damage, said, monkeypatch):
    newest = left / "checkpoints" / "v00000004"
    damage(newest / name)
    # A checkpoint that is named is read to its last byte.
    with monkeypatch.context() as bounded:
        bounded.setattr(resume, "CHECKED_BYTES", 0)
        with pytest.raises(CheckpointError, match=said) as refused:
            find_resumption(config(tmp_path), str(newest))
    assert str(newest) in str(refused.value)
    assert f"resume from the newest whole one by --resume {left}" in str(refused.value)
    for place in ("auto", str(left)):
        settings, resumption = find_resumption(config(tmp_path), place)
        assert (resumption.checkpoint.version, resumption.is_finished) == (2, False)
        (warning,) = resumption.warnings
        assert warning.startswith(f"checkpoint v00000004 is damaged: {newest}") and said in warning
        again = 3 if damage is _another_step else 2
        from_where = f"continues from the newest whole one, v00000002 of step 2: {again} steps are trained again"
        assert warning.endswith(from_where)
    # Nothing is changed by looking.
    assert sorted(path.name for path in newest.parent.glob("*v0*")) == ["v00000002", "v00000004"]
    assert begun(settings, resumption) == ["damaged-v00000004"]
    _, after = find_resumption(config(tmp_path), "auto")
    assert (after.checkpoint.version, after.warnings) == (2, [])


def test_the_check_before_the_start_reads_a_bounded_part_and_every_file_size(tmp_path, left, monkeypatch):
    monkeypatch.setattr(resume, "CHECKED_BYTES", 4095)
    file = left / "checkpoints" / "v00000004" / "trainer" / "__0_0.distcp"
    flip(file)
    assert find_resumption(config(tmp_path), "auto")[1].checkpoint.version == 4
    tear(file)
    assert find_resumption(config(tmp_path), "auto")[1].checkpoint.version == 2


def test_every_damaged_checkpoint_is_reported_and_a_run_without_a_whole_one_does_not_start(tmp_path, left):
    write_checkpoint(config(tmp_path), left, 6)
    for version in (4, 6):
        tear(left / "checkpoints" / f"v0000000{version}" / "state.json")
    settings, resumption = find_resumption(config(tmp_path), "auto")
    assert [warning.split()[1] for warning in resumption.warnings] == ["v00000006", "v00000004"]
    tear(left / "checkpoints" / "v00000002" / "state.json")
    said = "no checkpoint here is whole; of the newest, .*v00000006/state.json: has"
    with pytest.raises(CheckpointError, match=said):
        find_resumption(config(tmp_path), "auto")
    assert begun(settings, resumption) == ["damaged-v00000006", "damaged-v00000004"]
