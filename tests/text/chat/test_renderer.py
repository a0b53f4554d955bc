"""Rendering, extensions of sampled answers, and parsing, through templates of several families."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from chat_models import CHATML, LLAMA, QWEN3, config_of, id_of, write_chat_model
from spoken import Spoken

from asyncrl.core.errors import ChatRefused, ConfigError
from asyncrl.text.chat.chat_messages import normalise_tools
from asyncrl.text.chat.parsers import Parsed
from asyncrl.text.chat.probe import TOOLS
from asyncrl.text.chat.renderer import make_renderer
from asyncrl.text.chat.turns import ANSWER
from asyncrl.text.tokenizer import load_tokenizer

USER = {"role": "user", "content": "Hello."}
NEXT = [{"role": "user", "content": "And then?"}]
END = id_of("<|im_end|>")


def extended(model, text, *ends, messages=NEXT, tools=(), options=None):
    ids = model.sampled(text, *ends)
    found = model.renderer.extension(messages, tools, options or {}, last_ids=ids)
    return found if found is None else model.text(found)


QUESTION = "<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"


def test_the_renderer_learns_the_seam_and_the_end_of_a_cut_answer(family):
    model = Spoken(family("chatml"))
    assert extended(model, "Hello", END) == f"\n{QUESTION}"
    assert extended(model, "Hel") == f"<|im_end|>\n{QUESTION}"
    assert (model.renderer.report.end, model.renderer.report.seam) == ("<|im_end|>", "\n")
    # A message with the word by which the seam was learnt is no part of the answer.
    quoting = [{"role": "user", "content": f"What is {ANSWER}?"}, *NEXT]
    assert extended(model, "Hello", END, messages=quoting) is None
    # Nothing new, and nothing sampled.
    assert model.renderer.extension([], [], {}, last_ids=[END]) is None
    assert model.renderer.extension(NEXT, [], {}, last_ids=[]) is None


def test_a_last_message_with_a_different_frame_shows_no_seam(tmp_path):
    unframed = CHATML.replace(
        "{{- '<|im_end|>\\n' }}", "{% if not loop.last or add_generation_prompt %}<|im_end|>\n{% endif %}"
    )
    assert unframed != CHATML
    model = Spoken(write_chat_model(tmp_path / "m", unframed))
    assert (model.renderer.report.end, model.renderer.report.seam) == ("<|im_end|>", "")
    assert extended(model, "Hello", END).endswith("<|im_start|>assistant\n")


def test_only_the_end_token_of_the_template_extends_an_answer(tmp_path):
    model = Spoken(write_chat_model(tmp_path / "m", CHATML, more_ends=("<|endoftext|>",)))
    assert extended(model, "Hello", END) == f"\n{QUESTION}"
    assert extended(model, "Hello", id_of("<|endoftext|>")) is None
    other = Spoken(write_chat_model(tmp_path / "o", CHATML, eos="<|endoftext|>"))
    found = {case.case: case.verdict for case in other.renderer.report.cases}
    assert found.pop("cut by length") == "extend" and set(found.values()) == {"fork"}
    assert extended(other, "Hello", id_of("<|endoftext|>")) is None
    assert extended(other, "Hel") == f"<|im_end|>\n{QUESTION}"
    assert any("'<|im_end|>'" in note and "rollout.stop" in note for note in other.renderer.report.notes)


def test_an_answer_cut_in_its_reasoning_is_closed(family):
    model = Spoken(family("qwen3"))
    assert extended(model, "<think>\nwell") == f"\n</think>\n\n<|im_end|>\n{QUESTION}"
    assert extended(model, "<think>\nwell", END) is None
    assert extended(Spoken(family("qwen3"), history="template"), "<think>\nwell") is None


def test_each_option_of_a_call_has_its_own_verdict(family):
    off = {"enable_thinking": False}
    for history, expected in (("sampled", True), ("template", False)):
        model = Spoken(family("qwen3"), history=history)
        found = extended(model, "Hello", END, options=off)
        assert (found is not None) == expected
    assert model.text(model.renderer.render([USER], [], off)).endswith("<think>\n\n</think>\n\n")
    result = [{"role": "tool", "content": "r", "tool_call_id": "call_0_0"}]
    for options, expected in ((None, True), (off, False)):
        found = extended(model, CALL, END, messages=result, tools=TOOLS, options=options)
        assert (found is not None) == expected
    configured = Spoken(family("qwen3"), template_options=off)
    assert configured.renderer.render([USER], [], {}) == model.renderer.render([USER], [], off)
    assert configured.renderer.render([USER], [], {"enable_thinking": True}) == model.renderer.render([USER], [], {})


def test_the_template_date_is_that_of_the_run(family, monkeypatch):
    model = Spoken(family("llama"), date="2024-02-29")
    before = model.renderer.render([USER], [], {})
    assert "Today: 29 Feb 2024" in model.text(before)
    # The template and the tokenizer would each put the first token there.
    assert before.count(id_of("<s>")) == 1 and before[0] == id_of("<s>")
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    time.tzset()
    try:
        assert model.renderer.render([USER], [], {}) == before
    finally:
        monkeypatch.undo()
        time.tzset()


def test_calls_that_a_template_omits_are_put_into_the_content(family):
    model = Spoken(family("plain chatml"), tool_parser="json")
    call = {"id": "c", "type": "function", "function": {"name": "lookup", "arguments": {"word": "é"}}}
    answer = {"role": "assistant", "content": "So:", "tool_calls": [call]}
    written = '<tool_call>\n{"name": "lookup", "arguments": {"word": "é"}}\n</tool_call>'
    text = model.text(model.renderer.render([USER, answer], TOOLS, {}))
    assert f"So:\n{written}<|im_end|>" in text
    parsed = model.renderer.parse(model.sampled(f"So:\n{written}", END), TOOLS)
    assert (parsed.content, parsed.calls[0].name, parsed.calls[0].arguments) == ("So:", "lookup", '{"word": "é"}')
    assert any("does not show tools" in note for note in model.renderer.report.notes)


def test_a_named_template_is_used_if_tools_are_given(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    listed = load_tokenizer(str(write_chat_model(tmp_path / "a", named)))
    assert (listed.render_chat([USER]), listed.render_chat([USER], TOOLS)) == ("plain", "2 tools")
    folder = write_chat_model(tmp_path / "b", "plain")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("other")
    filed = load_tokenizer(str(folder))
    assert (filed.render_chat([USER]), filed.render_chat([USER], TOOLS)) == ("plain", "other")


def test_a_refused_conversation_shows_the_error_of_the_template(family):
    model = Spoken(family("mistral"))
    with pytest.raises(ChatRefused, match=r"^messages: .*roles must alternate") as caught:
        model.renderer.render([USER, USER], [], {})
    assert caught.value.field == "messages"


def test_a_model_without_a_template_cannot_chat(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path: .* has no chat template, and episodes are chats; take"):
        Spoken(write_chat_model(tmp_path / "m", None))


# --- answers ---

CALL = '<tool_call>\n{"name": "lookup", "arguments": {"word": "x"}}\n</tool_call>'


def test_special_tokens_are_kept_only_if_parsing_needs_them(family):
    model = Spoken(family("qwen3"))
    thought = [
        *model.sampled("<think>\nlook ", id_of("<|im_start|>")),
        *model.sampled(f"up {CALL}\n</think>\n\n"),
    ]
    parsed = model.renderer.parse([*thought, *model.sampled(f"Well.\n{CALL}", END)], TOOLS)
    assert parsed.reasoning == f"look up {CALL}"
    assert (parsed.content, parsed.malformed) == ("Well.", 0)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("lookup", '{"word": "x"}')]


def test_reasoning_is_separated_from_the_answer_without_a_special_token(tmp_path):
    model = Spoken(write_chat_model(tmp_path / "m", QWEN3, think_tokens=False))
    assert "<think>" not in model.tokenizer.special_ids
    assert parts_of(model, "<think>\nwell\n</think>\n\nHello") == ("well", "Hello")
    assert {case.verdict for case in model.renderer.report.cases} == {"extend"}


def parts_of(model, text):
    parsed = model.renderer.parse(model.sampled(text, END), [])
    return parsed.reasoning, parsed.content


def test_reasoning_opened_by_the_prompt_counts_as_reasoning(family):
    model = Spoken(family("qwen3 thinking"))
    parsed = model.renderer.parse(model.sampled("well\n</think>\n\nHello", END), [])
    assert (parsed.reasoning, parsed.content, parsed.unfinished) == ("well", "Hello", False)
    assert model.renderer.parse(model.sampled("well"), []).unfinished
    plain = Spoken(family("qwen3"))
    assert plain.renderer.parse(plain.sampled("well"), []).content == "well"
    assert [plain.renderer.parse(ids, []).content for ids in ([], [END])] == ["", ""]


@pytest.mark.parametrize(
    ("template", "tool_parser", "reasoning_parser"),
    [(CHATML, "json", "none"), (QWEN3, "json", "think"), (LLAMA, "none", "none")],
)
def test_parsers_are_recognised_by_the_template(tmp_path, template, tool_parser, reasoning_parser):
    report = Spoken(write_chat_model(tmp_path / "m", template)).renderer.report
    assert (report.tool_parser, report.reasoning_parser) == (tool_parser, reasoning_parser)
    assert any("chat.tool_parser" in note for note in report.notes) == (tool_parser == "none")
    given = Spoken(tmp_path / "m", tool_parser="none", reasoning_parser="think").renderer.report
    assert (given.tool_parser, given.reasoning_parser) == ("none", "think")


def test_a_parser_of_the_engine_is_handed_in(family):
    class EngineParser:
        markers = None

        def __call__(self, text, tools, **_):
            return Parsed(f"theirs: {text}")

    asked = []
    folder = family("qwen3")
    tokenizer = load_tokenizer(str(folder))
    config = config_of(folder, engine="vllm", tool_parser="hermes")
    renderer = make_renderer(config, tokenizer, engine_parsers=lambda *names: asked.append(names) or EngineParser())
    parsed = renderer.parse([*tokenizer.encode("<think>\nr\n</think>\n\nx"), END], TOOLS)
    assert (parsed.reasoning, parsed.content, asked) == ("r", "theirs: x", [("hermes", None)])


# --- sharing ---


def test_several_threads_may_render_at_a_time(family):
    model = Spoken(family("qwen3"))
    tools = normalise_tools(TOOLS)

    def play(number):
        messages = [{"role": "user", "content": f"Hello {number}."}]
        ids = model.renderer.render(messages, tools, {"n": number})
        answer = model.sampled(f"answer {number}", END)
        return (
            ids,
            model.renderer.extension(NEXT, tools, {"n": number}, last_ids=answer),
            model.renderer.parse(answer, tools),
        )

    expected = [play(number) for number in range(12)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(play, range(12))) == expected
