"""The answers that the page asks for: steps, groups, conversations, tokens, searches; bounded, and text alone."""

import pytest
from view.viewed_run import CONTROL, EVIL, group, make_run, trajectory, write_groups

from asyncrl.view import answers as module
from asyncrl.view.answers import Answers, BadRequest, NotFound
from asyncrl.view.page import step_page


@pytest.fixture
def run_dir(tmp_path):
    return make_run(tmp_path)


def ask(runs, name, *, decode=None, **parameters):
    texts = {key: str(value) for key, value in parameters.items()}
    return Answers([runs] if not isinstance(runs, list) else runs, [decode] if decode else ()).answer(name, texts)


def texts_of(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from texts_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_of(each)


def test_steps_come_in_pages_the_newest_first(run_dir):
    page = ask(run_dir, "steps", count=2)
    newest = {"step": 5, "reward": 0.5, "staleness": 0.5, "length": 20.0, "failures": 2.0}
    assert page["count"] == 5 and page["before"] == 3 and page["steps"][0] == newest
    assert [each["step"] for each in page["steps"]] == [5, 4]
    assert [each["step"] for each in ask(run_dir, "steps", until=3)["steps"]] == [3, 2, 1]
    assert ask(run_dir, "steps", until=0)["steps"] == []


def test_groups_of_a_step_have_what_trajectories_are_sorted_by(run_dir):
    groups = ask(run_dir, "groups", step=5)["groups"]
    assert [each["kind"] for each in groups] == ["evaluation", "filtered", "trained", "trained"]
    shown = next(each for each in groups if each["uid"] == "0-2")["trajectories"]
    assert [(each["reward"], each["length"], each["staleness"]) for each in shown] == [
        (0, 2, 0),
        (1, 9, 2),
        (0.5, 3, 1),
    ]
    assert [round(each["surprise"], 6) for each in shown] == [2.0, 0.1, 0.5]
    assert groups[0]["trajectories"][0]["staleness"] is None, "an evaluation trains nothing"
    assert ask(run_dir, "groups", step=2)["groups"] == []


def test_a_conversation_has_roles_tools_and_versions(run_dir):
    shown = ask(run_dir, "trajectory", step=5, uid="0-2", sample=2)
    assert [(each["role"], each["name"]) for each in shown["messages"]] == [
        ("user", ""),
        ("assistant", ""),
        ("tool", "weather"),
        ("assistant", ""),
    ]
    assert [(part["kind"], part["title"], part["text"]) for part in shown["messages"][1]["parts"]] == [
        ("reasoning", "reasoning", "I need a tool."),
        ("call", "calls weather", '{"city": "Bern"}'),
    ]
    assert shown["sequences"] == [{"tokens": 3, "spans": [[4, 0, 3, "sampled"]], "scored": False}]
    assert shown["components"] == {"right": 0.5} and shown["samples"] == [0, 1, 2] and shown["left_out"] == 0


def test_tokens_have_text_where_the_tokenizer_is_here(run_dir, monkeypatch):
    place = {"step": 5, "uid": "0-2", "sample": 0}
    assert ask(run_dir, "tokens", **place)["tokens"] == [
        [97, None, -2.0, 5, "sampled", None, None],
        [108, None, -2.0, 5, "sampled", None, None],
    ]
    assert ask(run_dir, "tokens", decode=chr, **place)["tokens"][0][1] == "a"
    assert ask(run_dir, "tokens", decode=lambda token: 1 / 0, **place)["tokens"][0][1] is None
    monkeypatch.setattr(module, "MOST_TOKENS", 1)
    rest = ask(run_dir, "tokens", start=1, **place)
    assert [each[0] for each in rest["tokens"]] == [108] and rest["count"] == 2
    context = {"tokens": [1, 2, 3], "logprobs": [-1.0, None], "spans": [[4, 0, 1, "sampled"], [-1, 1, 2, "context"]]}
    context["spans"].append([5, 2, 3, "sampled"])
    write_groups(run_dir, "step_000003.jsonl", group("0-9", 3, trajectory(sequences=[context])))
    shown = ask(run_dir, "tokens", step=3, uid="0-9", sample=0) | ask(run_dir, "tokens", step=3, uid="0-9", start=1)
    assert shown["tokens"] == [[2, None, None, -1, "context", None, None]]
    with pytest.raises(NotFound, match="1 sequences"):
        ask(run_dir, "tokens", step=3, uid="0-9", sequence=1)


def test_the_learner_s_values_and_the_judge_s_words_are_shown(run_dir):
    place = {"step": 5, "uid": "0-2", "sample": 1}
    shown = ask(run_dir, "trajectory", **place)
    assert shown["judgement"] == "Well done." and [each["scored"] for each in shown["sequences"]] == [True]
    assert ask(run_dir, "tokens", **place)["tokens"][0] == [98, None, -0.1, 3, "sampled", 0.4, 2.5]
    assert [hit["sample"] for hit in ask(run_dir, "search", q="well done")["hits"]] == [1]


def test_a_search_finds_texts_in_any_case_and_continues_where_it_stopped(run_dir, monkeypatch):
    hits = ask(run_dir, "search", q="BETA")["hits"]
    assert [(hit["step"], hit["uid"], hit["sample"], hit["match"]) for hit in hits] == [(5, "0-2", 1, "beta")]
    assert [hit["sample"] for hit in ask(run_dir, "search", q="city")["hits"]] == [2], "calls of tools too"
    assert ask(run_dir, "search", q=".*")["hits"] == []
    everything = ask(run_dir, "search", q="2+2=")
    assert everything["next"] is None and len(everything["hits"]) == 4
    monkeypatch.setattr(module, "SEARCH_S", -1.0)
    found, after = [], ""
    while after is not None:
        part = ask(run_dir, "search", q="2+2=", after=after or "")
        found, after = found + part["hits"], part["next"]
    assert found == everything["hits"]


def test_the_same_prompt_is_found_in_both_runs(run_dir, tmp_path):
    runs = [run_dir, make_run(tmp_path, "other")]
    hits = ask(runs, "same", step=4, uid="0-1", other=1)["hits"]
    assert [(hit["run"], hit["uid"]) for hit in hits] == [(1, "held@5-0"), (1, "0-3"), (1, "0-2"), (1, "0-1")]
    assert ask(runs, "runs") == {"runs": ["trial", "other"]}


def test_hostile_rollouts_are_text_without_control_characters(run_dir):
    uid = next(each["uid"] for each in ask(run_dir, "groups", step=5)["groups"] if "<" in each["uid"])
    answers = [
        ask(run_dir, "groups", step=5),
        *(ask(run_dir, "trajectory", step=5, uid=uid, sample=sample) for sample in (0, 1)),
        ask(run_dir, "tokens", step=5, uid=uid, decode=lambda token: CONTROL + "\ud800"),
        ask(run_dir, "search", q="onerror"),
        ask(run_dir, "same", step=5, uid=uid),
    ]
    found = "".join(text for each in answers for text in texts_of(each))
    assert "\\x1b]0;mine" in found and EVIL in found
    assert all(character.isprintable() or character in "\n\t" for character in found)


def test_a_sent_page_holds_data_that_cannot_end_its_element(run_dir):
    page = step_page(Answers([run_dir]), 5)
    data = page.partition('id="data">')[2].partition("</script>")[0]
    assert "owned" in data and "<" not in data
    assert page.count("<script") == 3 and "http:" not in page.replace("http://www.w3.org", "")
    with pytest.raises(NotFound, match="no recorded groups"):
        step_page(Answers([run_dir]), 1)
    assert Answers([run_dir]).newest_step() == 5


def test_long_and_odd_rollouts_are_bounded(run_dir, monkeypatch):
    many = [{"role": "user", "content": "x" * 1000} for _ in range(5000)]
    long = [trajectory(sample, "y" * 300_000, messages=many) for sample in range(300)]
    write_groups(run_dir, "step_000002.jsonl", group("0-7", 2, *long[:2]), *(group(f"1-{n}", 2) for n in range(300)))
    shown = ask(run_dir, "trajectory", step=2, uid="0-7", sample=0)
    assert len(shown["messages"]) == 1000 and shown["left_out"] == 4000
    assert len(shown["text"]) < 101_000 and "[200000 characters are left out]" in shown["text"]
    monkeypatch.setattr(module, "LONGEST_TRAJECTORY", 10_000)
    assert len(ask(run_dir, "trajectory", step=2, uid="0-7", sample=0)["messages"]) == 10
    groups = ask(run_dir, "groups", step=2)
    assert len(groups["groups"]) == 200 and groups["left_out"] == 101
    # Damaged lines are skipped.
    with (run_dir / "samples" / "step_000001.jsonl").open("w") as file:
        file.write('{"trajectories": [{"sequences": 7}]}\n{"trajectories": []}\n{"traj\n')
    assert [each["trajectories"] for each in ask(run_dir, "groups", step=1)["groups"]] == [[]]


@pytest.mark.parametrize(
    ("name", "parameters", "error", "says"),
    [
        ("nothing", {}, NotFound, "no such page"),
        ("steps", {"run": 1}, NotFound, "run 1"),
        ("steps", {"count": "many"}, BadRequest, "count: a whole number"),
        ("groups", {}, BadRequest, "step: a whole number"),
        ("groups", {"step": "9" * 16}, BadRequest, "step"),
        ("trajectory", {"step": 5, "uid": "none"}, NotFound, "no recorded group none"),
        ("trajectory", {"step": 5, "uid": "0-2", "sample": 9}, NotFound, "no trajectory 9"),
        ("search", {"q": ""}, BadRequest, "q: a text"),
        ("search", {"q": "x" * 1001}, BadRequest, "q: a text"),
    ],
)
def test_a_wrong_question_is_refused_with_its_reason(run_dir, name, parameters, error, says):
    with pytest.raises(error, match=says):
        ask(run_dir, name, **parameters)


def test_a_step_that_grows_is_read_again(run_dir):
    answers = Answers([run_dir])

    def uids(step):
        return [group["uid"] for group in answers.answer("groups", {"step": step})["groups"]]

    assert uids("4") == ["0-1"] == uids("4") and len(uids("5")) == 4
    write_groups(run_dir, "filtered_000004.jsonl", group("0-4", 4, kind="filtered"))
    write_groups(run_dir, "filtered_000004.jsonl", group("0-5", 4, kind="filtered"))
    assert uids("4") == ["0-5", "0-4", "0-1"]
