"""The verdicts on templates, and what an extension makes of random conversations."""

import functools
import json

import pytest
from chat_models import CHATML, FAMILIES, LLAMA, id_of, renderer_of, write_chat_model
from draws import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spoken import Spoken
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from asyncrl.core.errors import ChatRefused
from asyncrl.text.chat.probe import CASES, TOOLS

ALL = [name for name, _ in CASES]
EXPECTED = {
    "chatml": {},
    "tools first": {},
    "tools last": dict.fromkeys(["tool", "several tools", "user, with tools", "user after tool"], "fork"),
    "plain chatml": {},
    "qwen3": {},
    "qwen3 thinking": {},
    "keeps thinking": {},
    "lines": dict.fromkeys(ALL, "fork"),
    "llama": {"several tools": "refused"},
    "mistral": dict.fromkeys(ALL, "fork") | {"user after tool": "refused", "system": "refused"},
}


def verdicts(renderer):
    return {case.case: case.verdict for case in renderer.report.cases}


@pytest.mark.parametrize("name", FAMILIES)
def test_templates_of_known_families_have_the_expected_verdicts(name, family):
    found = verdicts(renderer_of(family(name)))
    thinks = "think" in FAMILIES[name][0]
    expected = dict.fromkeys(ALL, "extend") | EXPECTED[name]
    assert found == {case: verdict for case, verdict in expected.items() if thinks or "thinking" not in case}


USER = {"role": "user", "content": "thenext"}
WORDS = st.text(st.sampled_from("abz \n.7}é☃<"), max_size=12).map(lambda text: f"x{text}")
STEPS = st.lists(st.tuples(st.sampled_from(["user", "tool", "tools", "system"]), WORDS, WORDS), min_size=1, max_size=4)


def conversation(steps):
    """(before, answer, tail) of each turn of a random conversation."""
    before = [{"role": "user", "content": "Hello."}]
    for turn, (kind, said, heard) in enumerate(steps):
        results = {"tool": 1, "tools": 2}.get(kind, 0)
        answer = {"role": "assistant", "content": "" if results else said}
        if results:
            answer["tool_calls"] = [
                {
                    "id": f"call_{turn}_{k}",
                    "type": "function",
                    "function": {"name": "lookup", "arguments": {"word": said, "k": k}},
                }
                for k in range(results)
            ]
        tail = [{"role": "tool", "content": heard, "tool_call_id": f"call_{turn}_{k}"} for k in range(results)]
        tail += [{"role": "system", "content": heard}] if kind == "system" else []
        tail += [] if results else [{"role": "user", "content": heard}]
        yield before, answer, tail
        before = [*before, answer, *tail]


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from([name for name in FAMILIES if name != "qwen3 thinking"]), steps=STEPS, tools=st.booleans())
def test_an_extended_conversation_equals_a_single_render(name, steps, tools, models):
    model, end = models(name), id_of(FAMILIES[name][1])
    renderer = model.renderer
    given_tools = TOOLS if tools else ()
    for before, answer, tail in conversation(steps):
        try:
            asked = renderer.render(before, given_tools, {})
            whole = renderer.render([*before, answer, *tail], given_tools, {})
        except ChatRefused:
            return
        if whole[: len(asked)] != asked or end not in whole[len(asked) :]:
            answered = model.sampled("xyz", end)
            assert renderer.extension(tail, given_tools, {}, last_ids=answered) is None
            continue
        answered = whole[len(asked) : whole.index(end, len(asked)) + 1]
        extended = renderer.extension(tail, given_tools, {}, last_ids=answered)
        if extended is not None:
            assert asked + answered + extended == whole
        cut = renderer.extension(tail, given_tools, {}, last_ids=answered[:-1])
        assert cut is None or extended is None or cut == [end, *extended]


@pytest.fixture(scope="module")
def models(family):
    return functools.cache(lambda name: Spoken(family(name)))


# --- what a template does to tokens ---


def test_a_generation_prompt_that_joins_the_first_token_of_an_answer_forks(tmp_path):
    """GPT-2's way to split text takes the second newline of the prompt apart as soon as a word follows."""
    renderer = renderer_of(write_chat_model(tmp_path / "m", LLAMA, eos="<|eot|>", splits="gpt2"))
    found = {case.case: case for case in renderer.report.cases}
    assert found["user"].verdict == "fork"
    assert "first token of an answer" in found["user"].reason


def test_an_answer_that_joins_what_follows_it_forks(tmp_path):
    """A full stop and a newline are one token, and no other token stands between them."""
    lines = """{% for m in messages %}{{ m.role + '>' + m.content + '\n\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant>' }}{% endif %}"""
    renderer = renderer_of(write_chat_model(tmp_path / "m", lines, eos="</s>"))
    found = {case.case: case for case in renderer.report.cases}
    assert (found["cut by length"].verdict, found["user"].verdict) == ("fork", "fork")
    assert "last token of an answer" in found["cut by length"].reason
    assert renderer.extension([USER], [], {}, last_ids=[60, 61]) is None


@pytest.mark.parametrize("history", ["sampled", "template"])
def test_the_configuration_decides_whether_omitted_reasoning_forks(history, family):
    renderer = renderer_of(family("qwen3"), history=history)
    found = {case.case: case for case in renderer.report.cases}
    assert found["thinking, tool"].verdict == "extend" and not found["thinking, tool"].reason
    assert found["thinking, user"].verdict == ("extend" if history == "sampled" else "fork")
    assert "<think>" in found["thinking, user"].reason
    kept = renderer_of(family("keeps thinking"), history=history).report.cases
    assert {case.verdict for case in kept} == {"extend"} and not any(case.reason for case in kept)


def test_a_system_message_that_moves_is_named(family):
    reasons = {case.case: case.reason for case in renderer_of(family("mistral")).report.cases}
    assert reasons["user"].endswith("after a system message")
    assert "roles must alternate" in reasons["user after tool"]


def test_a_template_that_refuses_everything_does_not_work(tmp_path):
    renderer = renderer_of(write_chat_model(tmp_path / "m", "{{ raise_exception('never') }}"))
    assert set(verdicts(renderer).values()) == {"refused"}
    assert not renderer.report.works
    assert renderer_of(None).report.works


def test_a_vocabulary_without_needed_tokens_refuses_without_failing(tmp_path):
    folder = write_chat_model(tmp_path / "m", CHATML, eos="</s>")
    vocabulary = {letter: id for id, letter in enumerate("Helo.</")} | {"end": 99}
    backend = Tokenizer(WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"eos_token_id": 99}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    found = renderer_of(folder).report
    assert {case.verdict for case in found.cases} <= {"fork", "refused"} and found.end == ""
