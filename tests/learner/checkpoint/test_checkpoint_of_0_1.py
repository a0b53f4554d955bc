"""Checkpoints of asyncrl 0.1, whose groups had no sequences and whose ledger was one of intervals, are gone on from."""

from __future__ import annotations

import msgspec
import pytest
from learner.learner_cases import make_state
from test_checkpoint_writer import same_groups
from test_group_file import of_0_1
from test_messages import make_group

from asyncrl.checkpoint.contents import GROUPS, STATE, read_contents, write_contents
from asyncrl.config.training import LearnerConfig
from asyncrl.group_file import pack_group
from asyncrl.learner.groups.intake import Intake, IntakeState

LEDGER = b"""{
  "outcomes": [
    {"kind": "filtered", "epoch": 0, "bounds": [1, 2, 4, 5]},
    {"kind": "filtered", "epoch": 1, "bounds": [3, 4]},
    {"kind": "quarantined", "epoch": 0, "bounds": [2, 3]},
    {"kind": "trained", "epoch": 0, "bounds": [0, 1, 3, 4, 5, 6]},
    {"kind": "trained", "epoch": 1, "bounds": [0, 2]}
  ],
  "attempts": {"1-5": 2},
  "requeues": {"1-2": 1},
  "first_epoch": 0
}"""


@pytest.mark.parametrize("number", [1, 2])
def test_a_checkpoint_of_an_earlier_format_is_gone_on_from(tmp_path, number) -> None:
    groups = [make_group(f"1-{index}") for index in (2, 5, 3)]
    write_contents(tmp_path, make_state(), groups[:2], groups[2:])
    state = msgspec.json.decode((tmp_path / STATE).read_bytes())
    state |= {"format": number, "ledger": msgspec.Raw(LEDGER)}
    (tmp_path / STATE).write_bytes(msgspec.json.encode(state))
    (tmp_path / GROUPS).write_bytes(b"".join(map(of_0_1 if number == 1 else pack_group, groups)))
    found = read_contents(tmp_path)
    assert (found.state.format, len(found.buffered)) == (number, 2)
    assert same_groups([*found.buffered, *found.filtered], groups)

    intake = Intake(LearnerConfig(), IntakeState(found.state.ledger, found.buffered, found.filtered))
    ledger = intake.ledger
    assert [ledger.count("trained"), ledger.count("filtered"), ledger.count("quarantined")] == [5, 3, 1]
    assert [ledger.is_open(0, index) for index in range(7)] == [False] * 6 + [True]
    assert [index for index in range(7) if ledger.is_open(1, index)] == [2, 4, 5, 6]
    assert intake.claims == ["1-2", "1-5"]
    assert ledger.attempts == {"1-5": 2}
    assert not intake.has("1-4") and intake.has("1-3")
    # What is written from here on is no list of intervals.
    assert intake.snapshot().ledger.outcomes == []
