"""I1, I3 and I7 in the audit: a valid run folder passes, and each fault in one is found."""

import json

import pytest

from asyncrl.checkpoint.contents import CheckpointState, write_contents
from asyncrl.checkpoint.folder import CheckpointFolder
from asyncrl.checkpoint.origin import Origin
from asyncrl.core.errors import CheckpointError
from asyncrl.data.rows import EpochOrder
from asyncrl.messages.ledger import Ledger, position_of
from tools.chaos.audit import Expected, audit

PROMPTS = 10
STEPS = 6
ORDER = EpochOrder("f00d", 5, PROMPTS)


def outcome(index):
    """Outcome of the prompt at an index of the data."""
    return {3: "filtered", 7: "quarantined"}.get(index, "trained")


class Folder:
    """A run folder: two groups a step, a checkpoint after ``checkpoint`` steps. Start 2 trained from step 4 on."""

    def __init__(self, run_dir, checkpoint=STEPS):
        self.run_dir = run_dir
        (run_dir / "samples").mkdir(parents=True)
        positions = (ORDER.at(position) for position in range(1000))
        self.concluded, self.steps = [], []
        for step in range(1, STEPS + 1):
            uids = []
            while len(uids) < 2:
                epoch, index = next(positions)
                uid = f"{epoch}-{index}"
                self.concluded.append((step, uid, outcome(index)))
                if outcome(index) == "trained":
                    uids.append(uid)
            self.steps.append((step, 1 if step < 4 else 2, uids))
        # Steps that start 1 trained after its last checkpoint are not part of the history.
        self.lost = (4, 1, ["0-0", "1-1"])
        self.checkpoint = checkpoint
        self.trained_extra = []
        self.metrics = lambda line: line

    def write(self, *, metrics=None, sample=lambda line: line):
        lines, groups = [], []
        for step, start, uids in [*self.steps[:3], self.lost, *self.steps[3:]]:
            version = step + (start - 1) * 3
            lines.append(
                {
                    "kind": "train",
                    "step": step,
                    "start": start,
                    "weights/version": version,
                    "ledger/trained": 2 * step,
                }
            )
            for uid in uids:
                sampled = {"spans": [[version - 1, 0, 2, "sampled"], [version, 2, 3, "sampled"]], "tokens": [1, 2, 3]}
                spans = [[-1, 0, 2, "repeated"], [version, 2, 3, "sampled"], [-1, 3, 4, "context"]]
                spans.append([version, 4, 5, "sampled"])
                trajectory = {"sequences": [sampled, {"spans": spans, "tokens": [1, 2, 3, 4, 5]}]}
                groups.append((step, {"step": step, "start": start, "uid": uid, "trajectories": [trajectory] * 2}))
        (self.run_dir / "metrics.jsonl").write_text(text(map(metrics or self.metrics, lines)))
        for step in range(1, STEPS + 1):
            of_step = [sample(line) for at, line in groups if at == step]
            (self.run_dir / f"samples/step_{step:06d}.jsonl").write_text(text(of_step))
        quarantined = [
            {"uid": uid, "reason": "no", "start": 1} for _, uid, kind in self.concluded if kind == "quarantined"
        ]
        (self.run_dir / "quarantine.jsonl").write_text(text(quarantined))
        self.write_checkpoint()
        return self

    def write_checkpoint(self):
        ledger = Ledger()
        for step, uid, kind in self.concluded:
            if step <= self.checkpoint:
                ledger.record(kind, *position_of(uid))
        for uid in self.trained_extra:
            ledger.record("trained", *position_of(uid))
        state = CheckpointState(
            version=99,
            step=self.checkpoint,
            ledger=ledger.state,
            fingerprint=ORDER.fingerprint,
            seed=ORDER.seed,
            origin=Origin(),
        )
        folder = CheckpointFolder(self.run_dir / "checkpoints")
        folder.claim(1)
        partial = folder.begin(99)
        write_contents(partial, state, [], [])
        folder.commit(partial, version=99, step=self.checkpoint, files=["state.json", "groups.msgpack"])

    def problems(self):
        return [str(problem) for problem in self.findings().problems]

    def findings(self):
        return audit(self.run_dir, Expected(STEPS, 2, PROMPTS, outcome=outcome))


def text(lines):
    return "".join(json.dumps(line) + "\n" for line in lines if line is not None)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "run")


def has(problems, start):
    assert any(problem.startswith(start) for problem in problems), problems


def test_a_valid_run_passes(folder):
    findings = folder.write().findings()
    assert findings.problems == []
    assert findings.figures["trained"] == 12
    assert (findings.figures["starts"], findings.figures["steps_trained_again"]) == (2, 1)


def test_steps_after_the_last_checkpoint_are_read_from_the_samples(tmp_path):
    folder = Folder(tmp_path / "run", checkpoint=4).write()
    problems = folder.problems()
    # Prompts filtered or quarantined since then are in no file.
    later = [uid for step, uid, kind in folder.concluded if step > 4 and kind != "trained"]
    assert all(problem.startswith("lost: ") for problem in problems), problems
    assert all(uid in problems[0] for uid in later)


def put(step, place, uid):
    """The group at one place gets the prompt of another, or of the place (step, place)."""

    def change(folder):
        folder.steps[step][2][place] = uid if isinstance(uid, str) else folder.steps[uid[0]][2][uid[1]]

    return change


def lose(folder):
    """One prompt is in no step and has no outcome in the ledger, though later ones have."""
    step, uid, _ = folder.concluded.pop(2)
    if uid in folder.steps[step - 1][2]:
        folder.steps[step - 1][2].remove(uid)


def filter_the_quarantined(folder):
    kinds = {"quarantined": "filtered"}
    folder.concluded = [(step, uid, kinds.get(kind, kind)) for step, uid, kind in folder.concluded]


def count(name, of):
    """Replace a value in each line of metrics.jsonl by ``of(line)``."""
    return lambda folder: setattr(folder, "metrics", lambda line: line | {name: of(line)})


@pytest.mark.parametrize(
    ("reported", "change"),
    [
        ("repeated: 1 prompts were trained more than once: 0-5 in steps [2, 6]", put(5, 0, (1, 0))),
        ("repeated: 1 prompts", put(2, 1, (2, 0))),
        ("repeated: 1 steps have too many groups: 6", lambda folder: folder.steps[5][2].append("5-5")),
        ("lost: 1 prompts have no outcome though later ones have: ", lose),
        ("ledger: 1 groups of steps up to 6 have no outcome in its checkpoint: 7-7", put(0, 0, "7-7")),
        ("ledger: 1 groups are trained in the checkpoint and in no step", put(0, 0, "7-7")),
        ("ledger: the checkpoint of step 6 counts 13", lambda folder: folder.trained_extra.append("4-4")),
        ("ledger: 1 prompts have an outcome and are not in", lambda folder: folder.trained_extra.append("0-10")),
        ("ledger: 6 steps were not counted as 2 groups", count("ledger/trained", lambda x: x["ledger/trained"] + 1)),
        ("outcome: ", filter_the_quarantined),
        (
            "history: 1 steps follow one that a later start of the learner trained: step 5",
            lambda folder: folder.steps.__setitem__(4, (5, 1, folder.steps[4][2])),
        ),
        ("history: 1 steps were never asked for: 7", count("step", lambda x: 7 if x["step"] == 6 else x["step"])),
        (
            "version: 1 numbers of versions were used by two starts of the learner: 4",
            count("weights/version", lambda x: x["step"]),
        ),
        (
            "version: 5 steps have an older version",
            count("weights/version", lambda x: 20 - x["step"] - 7 * x["start"]),
        ),
    ],
)
def test_each_fault_is_found(folder, reported, change):
    change(folder)
    has(folder.write().problems(), reported)


def test_versions_that_do_not_cover_the_tokens_are_found(folder):
    for spans in ([[1, 0, 2]], [[1, 0, 2], [2, 1, 3]], [[2, 0, 2], [1, 2, 3]], [], [[1, 0, 4]]):
        bad = [{"sequences": [{"spans": [[*span, "sampled"] for span in spans], "tokens": [1, 2, 3]}]}]
        has(folder.write(sample=lambda line, bad=bad: line | {"trajectories": bad}).problems(), "spans: 12 sequences")


def test_missing_records_are_distinguished(folder):
    folder.write(
        metrics=lambda line: None if line["step"] == 2 else line,
        sample=lambda line: None if line["step"] == 5 else line,
    )
    (folder.run_dir / "quarantine.jsonl").write_text('{"uid": "0-')
    findings = folder.findings()
    problems = [str(problem) for problem in findings.problems]
    assert {problem.kind for problem in findings.problems} == {"unrecorded"}
    has(problems, "unrecorded: 1 steps have no line in metrics.jsonl: 2")
    has(problems, "unrecorded: 2 steps are not complete in samples/: 2, 5")
    has(problems, "unrecorded: 1 quarantined prompts are not in quarantine.jsonl")
    assert findings.figures["torn_lines"] == 1


def test_an_early_end_and_leftovers_are_found(folder):
    folder.write(metrics=lambda line: None if line["step"] == 6 else line)
    has(folder.problems(), "end: training came to step 5 of 6")
    for name in ("private/key", "version_mark.json.new", "checkpoints/.v00000100.partial-7/state.json"):
        path = folder.run_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        has(folder.problems(), "left: ")
        path.unlink()
        if path.parent.name != "run":
            path.parent.rmdir()


def test_a_run_without_a_checkpoint_cannot_be_audited(folder):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        folder.findings()
