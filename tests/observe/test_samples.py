"""The groups in RUN/samples as they are read again, and as text for people."""

from __future__ import annotations

import re

import pytest
from made_group import make_group

from asyncrl.learner.metrics.record_files import RecordFiles
from asyncrl.observe.sample_text import LONGEST_TEXT, MOST_MESSAGES, MOST_RESPONSES, sample_lines
from asyncrl.observe.samples import SampleChoice, SampleGroup, SampleTrajectory, newest_samples

WEATHER = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather in Bern?"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I need a tool.",
        "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}],
    },
    {"role": "tool", "name": "weather", "content": "rain"},
    {"role": "assistant", "content": "Rain."},
]


def shown(*trajectories, **fields):
    """The lines of a group, indented."""
    return [" " * line.indent + line.text for line in sample_lines(SampleGroup(list(trajectories), **fields))]


def uids(run_dir, count=100, **choice):
    return [group.uid for group in newest_samples(run_dir, SampleChoice(**choice), count)]


@pytest.fixture
def run_dir(tmp_path):
    """Two steps: before the first some groups were filtered, and after each there was an evaluation."""
    records = RecordFiles(tmp_path, 1)
    records.samples(0, 0, [make_group("held@0-0")], kind="evaluation", name="held")
    for uid in ("0-5", "0-6"):
        records.samples(0, 0, [make_group(uid)], kind="filtered", name="all rewards are equal")
    records.samples(1, 1, [make_group("0-1"), make_group("0-2")])
    records.samples(2, 2, [make_group("0-3")])
    records.samples(2, 2, [make_group("held_out@2-0")], kind="evaluation", name="held_out")
    return tmp_path


def test_the_title_of_a_group_names_its_source():
    assert shown(uid="3-7", source="sums")[0] == "trained  prompt 3-7  source sums"


def test_the_newest_groups_come_first_and_a_selection_omits_others(run_dir):
    assert uids(run_dir) == ["held_out@2-0", "0-3", "0-1", "0-2", "held@0-0", "0-6", "0-5"]
    assert uids(run_dir, 2) == ["held_out@2-0", "0-3"]
    assert uids(run_dir, kind="trained") == ["0-3", "0-1", "0-2"]
    assert uids(run_dir, kind="filtered") == ["0-6", "0-5"]
    assert uids(run_dir, step=1) == ["0-1", "0-2"]
    assert uids(run_dir, until=0) == ["held@0-0", "0-6", "0-5"]
    assert uids(run_dir / "nowhere") == []
    evaluation, trained = newest_samples(run_dir, SampleChoice(step=2), 2)
    assert (evaluation.kind, evaluation.name, evaluation.version, trained.kind) == (
        "evaluation",
        "held_out",
        2,
        "trained",
    )
    assert newest_samples(run_dir, SampleChoice(kind="filtered"), 1)[0].reason == "all rewards are equal"
    assert [each.length for each in trained.trajectories] == [3, 3]


def test_a_repeated_step_replaces_the_first_and_damaged_lines_are_skipped(run_dir):
    path = run_dir / "samples" / "step_000002.jsonl"
    RecordFiles(run_dir, 2).samples(2, 3, [make_group("0-4")])
    with path.open("a") as file:
        file.write('{"kind": 7}\n\x00\n{"uid": "torn", "traj')
    assert uids(run_dir, step=2, kind="trained") == ["0-4"]


def test_a_group_is_shown_as_its_prompt_and_its_responses_with_their_scores():
    first = SampleTrajectory(
        text="4\n", finish_reason="stop", reward=1.5, components={"right": 1.0, "form": 0.5}, length=2
    )
    second = SampleTrajectory(text="", finish_reason="length", reward=0.0, length=12)
    fields = {"kind": "evaluation", "name": "held", "step": 7, "version": 6, "uid": "held@6-0", "prompt": "2+2=\n"}
    assert shown(first, second, **fields) == [
        "evaluation held  step 7  version 6  prompt held@6-0  reward 0.75 (0 to 1.5)",
        "prompt",
        "  2+2=",
        "",
        "response 1 of 2  reward 1.5 (right 1, form 0.5)  stop  2 tokens",
        "  4",
        "",
        "response 2 of 2  reward 0  length  12 tokens",
        "  [empty]",
    ]


def test_conversations_have_roles_and_calls_and_what_they_share_is_shown_once():
    other = [*WEATHER[:2], {"role": "assistant", "content": "Sun."}]
    two = [SampleTrajectory(messages=each, reward=1.0, finish_reason="stop", turns=2) for each in (WEATHER, other)]
    lines = shown(*two, reason="all rewards are equal", kind="filtered")
    assert lines == [
        "filtered  reward 1  all rewards are equal",
        "system",
        "  Be brief.",
        "user",
        "  Weather in Bern?",
        "",
        "response 1 of 2  reward 1  stop  2 turns",
        "  assistant",
        "    reasoning",
        "      I need a tool.",
        "    calls weather",
        '      {"city": "Bern"}',
        "  tool weather",
        "    rain",
        "  assistant",
        "    Rain.",
        "",
        "response 2 of 2  reward 1  stop  2 turns",
        "  assistant",
        "    Sun.",
    ]


def test_text_of_samples_is_bounded_and_has_no_control_characters():
    evil = "\x1b]0;mine\x07\x9b2J\r\u202e\ud800\tend"
    call = {"function": {"name": evil, "arguments": {evil.replace("\ud800", ""): evil.replace("\ud800", "")}}}
    odd = [evil, {"role": 7, "content": 8}, {"content": [evil, {"type": "image"}], "tool_calls": [call, evil]}]
    components = {f"{evil}{number}": float(number) for number in range(1000)}
    group = [SampleTrajectory(messages=odd * 100, components=components, finish_reason=evil, reward=0.0)]
    group += [SampleTrajectory(text=evil * 10_000)] * 100
    lines = shown(*group, prompt=evil, uid=evil, name=evil * 100, reason=evil)
    assert all(line.isprintable() for line in lines)
    assert "\\x1b]0;mine" in "".join(lines)
    assert max(map(len, lines)) < 8 * LONGEST_TEXT
    assert len(lines) < 10 * MOST_MESSAGES + 10 * MOST_RESPONSES
    assert any("messages are left out" in line for line in lines)
    assert any("characters are left out" in line for line in lines)
    assert re.fullmatch(r"\[\d+ more responses are not shown\]", lines[-1])


def test_the_words_of_a_judge_follow_the_response():
    lines = shown(SampleTrajectory(text="Rain.", judgement="right: yes.\n\x1b[31mToo short."), prompt="Weather?")
    at = lines.index("  Rain.")
    assert lines[at + 1 :] == ["  judge", "    right: yes.", "    \\x1b[31mToo short."]
