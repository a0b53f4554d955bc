"""The parts of judges without a server: matching by id, orders, views within limits, limits a minute, the cache."""

import asyncio
import json
import math
import random
import time

import pytest
from draws import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_server import shown
from virtual import VirtualTimeLoop

from asyncrl.messages.reward import Completion, Score
from asyncrl.reward.judge_answers import AnswerCache, BadAnswer, key_of, read_entries, read_entry_per_name, read_number
from asyncrl.reward.judge_client import JudgeClient, MinuteLimit
from asyncrl.reward.judge_options import Criterion, RelativeOptions, RubricOptions
from asyncrl.reward.judge_pool import JudgeCounters
from asyncrl.reward.judge_questions import RelativeJudge, Rubric, draw_ids
from asyncrl.reward.judge_views import BRANCH_CHARS, message_text, shares, shorten, view

OPTIONS = {"url": "http://127.0.0.1:9/v1", "model": "m"}
NAMES = st.lists(st.text("abc", min_size=1, max_size=2), unique=True, min_size=1, max_size=5)


def reply(text, *messages, branches=(), finish_reason="stop"):
    return Completion(
        text=text, finish_reason=finish_reason, tokens=1, messages=list(messages), branches=list(branches)
    )


def asked(*texts, uid="0-1"):
    return Score(uid=uid, prompt="p", row={}, completions=[reply(text) for text in texts])


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def number(entry):
    return read_number(entry.get("score"), 0, 1)


# --- answers ---


@given(NAMES, st.data())
def test_an_answer_needs_exactly_one_valid_score_per_trajectory(names, data):
    given_names = data.draw(st.permutations(names) | st.lists(st.sampled_from([*names, "zz", "", 7, None]), max_size=6))
    values = st.floats(0, 1) | st.sampled_from([1, 1.5, -1, math.nan, math.inf, 10**400, "0.5", True, None, []])
    entries = [{"id": name, "score": data.draw(values)} for name in given_names]
    good = all(type(entry["score"]) in (int, float) and 0 <= entry["score"] <= 1 for entry in entries)
    if good and sorted(map(str, given_names)) == sorted(names):
        scores = {entry["id"]: entry["score"] for entry in entries}
        in_prose = read_entries(f"So:\n{json.dumps({'scores': entries})} Done.", "scores")
        assert (
            read_entry_per_name(entries, "id", names, number)
            == read_entry_per_name(in_prose, "id", names, number)
            == scores
        )
    else:
        with pytest.raises(BadAnswer):
            read_entry_per_name(entries, "id", names, number)


def test_every_problem_of_an_answer_is_named():
    entries = [{"id": id, "score": score} for id, score in (("a", 1), ("a", 1), ("b", "high"), ("c", 7), ("z", 1))]
    with pytest.raises(BadAnswer) as caught:
        read_entry_per_name(entries, "id", "abcd", number)
    assert set(caught.value.problems) == {
        'id "a" is there twice',
        'id "b": the score "high" is not a number',
        'id "c": the score 7 is not between 0 and 1',
        'there is no id "z"',
        'id "d" is missing',
    }


@pytest.mark.parametrize("before", ["", "<think>hm</think>", '<think>{"scores": []} or "</think>", {"</think>'])
def test_an_answer_may_quote_the_end_of_reasoning_and_a_draft_does_not_count(before):
    entries = [{"id": id, "explanation": "its </think> is missing", "score": 1} for id in "ab"]
    assert read_entries(f"{before}So: {json.dumps({'scores': entries})}", "scores") == entries
    for draft in ({"scores": []}, {"scores": entries}):
        with pytest.raises(BadAnswer, match="no JSON object"):
            read_entries(f"{before}{json.dumps(draft)}</think>They are all good.", "scores")


@pytest.mark.parametrize(
    "text",
    [
        '{"a":' * 40_000,
        '{ "' * 60_000,
        '{"scores": ' + "[" * 190_000,
        '</think>{"a":' * 15_000,
        "x" * 200_001,
    ],
)
def test_a_hostile_answer_takes_no_time(text):
    began = time.process_time()
    with pytest.raises(BadAnswer):
        read_entries(text, "scores")
    assert time.process_time() - began < 5


# --- questions ---


@settings(max_examples=examples(30))
@given(st.integers(1, 8), st.integers(0, 3), st.integers(0, 3))
def test_a_question_is_the_same_for_the_same_vote_and_shows_each_trajectory_once(count, uid, vote):
    judge = RelativeJudge(RelativeOptions(**OPTIONS, votes=4))
    texts = [f"text {at}" for at in range(count)]
    question, again, another, of_another = (
        judge.questions(asked(*texts, uid=of))[at]
        for of, at in ((f"0-{uid}", vote), (f"0-{uid}", vote), (f"0-{uid}", (vote + 1) % 4), ("9-9", vote))
    )
    assert question.messages == again.messages
    trajectories = shown({"messages": question.messages})
    for other in (another, of_another):
        assert not shown({"messages": other.messages}).keys() & trajectories.keys(), "each vote has ids of its own"
    assert sorted(trajectories.values()) == texts
    # In any order and with any ids the score of a text goes to its own completion.
    answer = json.dumps({"scores": [{"id": id, "score": int(text[-1]) / 10} for id, text in trajectories.items()]})
    assert [verdict.worth for verdict in question.read(answer)] == [at / 10 for at in range(count)]


def test_an_id_occurs_in_no_text():
    first = draw_ids(random.Random("x"), 2, [])
    again = draw_ids(random.Random("x"), 2, [f"I am {first[0]}, the best"])
    assert first[0] not in again and len(set(again)) == 2


def test_each_vote_has_another_order_of_criteria():
    criteria = [Criterion(name=name, text="t") for name in "abcdef"]
    judge = Rubric(RubricOptions(**OPTIONS, rubric=criteria, votes=5, instructions="Be strict."))
    systems = [question.messages[0]["content"] for question in judge.questions(asked("x"))]
    assert len(set(systems)) > 1 and all("Be strict.\n\nThe rubric:\n* " in system for system in systems)


# --- views ---


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 120))
def test_space_is_shared_evenly_among_long_texts(sizes, total):
    rooms = shares(sizes, total)
    assert all(room <= size for room, size in zip(rooms, sizes, strict=True))
    assert sum(rooms) == sum(sizes) or total - len(sizes) < sum(rooms) <= total
    cut = [room for room, size in zip(rooms, sizes, strict=True) if room < size]
    assert not cut or max(rooms) - min(cut) <= 1


@settings(max_examples=examples(40))
@given(st.text(max_size=80), st.integers(0, 90))
def test_a_text_that_is_too_long_loses_its_middle(text, room):
    short = shorten(text, room)
    if len(text) <= room:
        assert short == text
    else:
        head, _, tail = short.partition(f"\n[... {len(text) - room} characters are left out here ...]\n")
        assert len(head) + len(tail) == room and text.startswith(head) and text.endswith(tail)


def test_the_common_beginning_is_shown_once():
    start = [{"role": "system", "content": "Be good."}, user("Q")]
    calls = [{"id": "c1", "function": {"name": "search", "arguments": '{"q": 1}'}}]
    turn = [assistant(None, tool_calls=calls), {"role": "tool", "tool_call_id": "c1", "content": "42"}]
    found = view(
        "Q", [reply("x", *start, *turn, assistant("one")), reply("y", *start, *turn, assistant("two"))], 10_000
    )
    assert found.shared == '[system]\nBe good.\n\n[user]\nQ\n\n[assistant calls search]\n{"q": 1}\n\n[tool c1]\n42'
    assert found.bodies == ["[assistant]\none", "[assistant]\ntwo"]
    shorter = view("Q", [reply("x", *start), reply("y", *start, assistant("two", reasoning="why"))], 10_000)
    assert shorter.bodies == ["[there is no more of it]", "[assistant, thinking]\nwhy\n\n[assistant]\ntwo"]
    # A single one is shown from its first answer, and so is a prompt that the conversation does not hold.
    found = view("the task", [reply("one", user("other"), assistant("one"))] * 3, 10_000)
    assert (found.shared, found.bodies) == ("the task\n\n[user]\nother", ["[assistant]\none"])
    assert found.body_of == [0, 0, 0]


def test_branches_and_ends_are_summed_up():
    main = [user("Q"), assistant("a"), user("more"), assistant("end")]
    branch = [user("Q"), assistant("a"), user("else"), assistant("b" * 5000)]
    alone = [user("a title, please"), assistant("T")]
    [body] = view("Q", [reply("end", *main, branches=[branch, alone] + [alone] * 9)], 100_000).bodies
    assert "[branch 1: after message 2 of the conversation, 2 messages]\n[user]\nelse" in body
    assert "[branch 2: a conversation of its own, 2 messages]\n[user]\na title, please\n\n[assistant]\nT" in body
    assert "[3 more branches are left out]" in body
    assert body.count("b") < BRANCH_CHARS + 200
    bodies = view(
        "Q", [reply("a", finish_reason=reason) for reason in ("stop", "length", "turns", "time")], 1000
    ).bodies
    assert [body.partition("[it was ")[2][:9] for body in bodies] == ["", "cut off a", "ended aft", "ended whe"]


@given(st.lists(st.text("ab", max_size=400), min_size=1, max_size=5), st.text("pq", max_size=600), st.integers(50, 500))
def test_a_view_is_bounded_and_equal_views_are_merged(texts, prompt, limit):
    found = view(prompt, [reply(text) for text in texts], limit)
    note = len("\n[... 1000 characters are left out here ...]\n")
    assert len(found.shared) + sum(map(len, found.bodies)) <= limit + (len(texts) + 1) * note
    assert len(set(found.bodies)) == len(found.bodies) and len(found.body_of) == len(texts)
    for one, at in zip(texts, found.body_of, strict=True):
        body = found.bodies[at]
        assert body == one or "left out" in body
        assert all(found.body_of[other] == at for other, text in enumerate(texts) if text == one)


def test_equal_trajectories_share_one_view_even_if_their_cut_middles_differ():
    assert view("", [reply("a" * 100)] * 4, 100).bodies == ["a" * 100]
    found = view("", [reply("a" * 50 + middle + "a" * 50) for middle in "bcb"], 60)
    assert (len(found.bodies), found.body_of) == (1, [0, 0, 0])


def test_any_message_can_be_shown():
    parts = [{"type": "text", "text": "a"}, {"type": "image"}]
    assert message_text(user(parts)) == '[user]\na\n{"type":"image"}'
    assert message_text({"content": None}) == "[user]\n"
    assert message_text({"role": "assistant", "tool_calls": [{}]}) == "[assistant]\ncalls {}"


# --- limits ---


NO_TIME = 1e-6


class TickingLoop(VirtualTimeLoop):
    """Time goes on between two steps, as real time does: else a timer could end a rounding error too early for ever."""

    def jump(self, seconds):
        super().jump(seconds + 1e-9)


def run_ticking(main):
    with asyncio.Runner(loop_factory=TickingLoop) as runner:
        return runner.run(main)


def now():
    return asyncio.get_running_loop().time()


async def seconds(waiting):
    began = now()
    await waiting
    return now() - began


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 12)), max_size=30), st.integers(1, 10))
def test_requests_exceed_their_rate_by_one_limit_at_most(asked, limit):
    async def begin_all():
        minute, begun, waits = MinuteLimit(limit), [], []
        for pause, units in asked:
            await asyncio.sleep(pause)
            waits.append(await seconds(minute.wait(units)))
            begun.append((now(), min(units, limit)))
        return begun, waits

    begun, waits = run_ticking(begin_all())
    for first, (start, _) in enumerate(begun):
        for last, (end, _) in enumerate(begun[first:], first):
            within = sum(units for _, units in begun[first : last + 1])
            assert within <= limit * (1 + (end - start) / 60) + 1e-3
    assert all(wait <= 60 + NO_TIME for wait in waits)
    assert max(waits, default=0) < NO_TIME or sum(units for _, units in asked) > limit


def test_token_counts_come_from_the_server():
    async def main():
        minute = MinuteLimit(100)
        assert await seconds(minute.wait(90)) < NO_TIME
        minute.due += 40 - 90
        assert await seconds(minute.wait(50)) < NO_TIME
        minute.due += 70
        assert await seconds(minute.wait(10)) == pytest.approx(42)
        minute.due -= 90
        await asyncio.sleep(120)
        assert await seconds(minute.wait(150)) < NO_TIME, "more than the limit begins with an empty bucket"
        assert await seconds(minute.wait(10)) == pytest.approx(36), "the rest of it is waited for, and 90 are forgotten"
        assert await seconds(MinuteLimit(None).wait(1e9)) < NO_TIME

    run_ticking(main())


def test_a_small_request_does_not_overtake_a_large_one_and_a_cancelled_one_holds_up_none():
    options = RelativeOptions(**OPTIONS, tokens_per_minute=100, concurrency=2)

    async def main():
        client, begun = JudgeClient(options, JudgeCounters(), print), []

        async def ask(tokens):
            async with client._turn(tokens):
                begun.append((now(), tokens))

        async with asyncio.TaskGroup() as tasks:
            first, gone, *_ = [tasks.create_task(ask(tokens)) for tokens in (100, 90, 80, 1)]
            await first
            assert client.waiting == 3
            gone.cancel()
        assert begun == [(pytest.approx(0, abs=NO_TIME), 100), (pytest.approx(48), 80), (pytest.approx(48.6), 1)]
        assert client.waiting == 0

    run_ticking(main())


# --- the cache ---


def test_the_cache_gives_back_the_answer_to_the_same_question_and_is_bounded(tmp_path):
    cache, key, other = AnswerCache(tmp_path / "c", most=20), key_of("a", {"x": 1, "y": 2}), key_of("a", {"x": 1})
    assert key == key_of("a", {"y": 2, "x": 1}) and key != other
    assert cache.find(key) is None
    assert cache.keep(key, "said")
    assert AnswerCache(tmp_path / "c").find(key) == "said"
    (tmp_path / "c" / other).write_bytes((tmp_path / "c" / key).read_bytes())
    assert cache.find(other) is None, "kept for another question"
    (tmp_path / "c" / key).write_bytes(b'{"key": "')
    assert cache.find(key) is None, "torn"
    keys = [key_of(at) for at in range(50)]
    for each in keys:
        assert cache.keep(each, "said")
        assert len(list((tmp_path / "c").iterdir())) <= 21
    kept = [each for each in keys if cache.find(each)]
    assert kept == keys[-len(kept) :] and len(kept) >= 18
