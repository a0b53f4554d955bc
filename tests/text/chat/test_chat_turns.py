"""Written answers as tokens behind their context, through templates of several families."""

import pytest
from chat_models import FAMILIES, QWEN3_THINKING, THINK, id_of, write_chat_model
from spoken import Spoken

from asyncrl.core.errors import ChatRefused
from asyncrl.text.chat.chat_messages import normalise_messages

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "lookup", "arguments": '{"word": "x"}'}}],
}
WORDS = {
    "lines": (" Hi there.", ' <tool_call>\n{"name": "lookup", "arguments": {"word": "x"}}\n</tool_call>'),
    "qwen3": ("<think>\n\n</think>\n\nHi there.", None),
    "qwen3 thinking": ("\n</think>\n\nHi there.", None),
    "llama": ("Hi there.", '{"name": "lookup", "parameters": {"word": "x"}}'),
    "mistral": ("Hi there.", '[CALLS]lookup{"word": "x"}'),
}
"""A model's own words, where they are not what is written."""


def text_and_end(model, answer, before=ASKED):
    (*asked, answer) = normalise_messages([*before, answer])
    ids = model.renderer.answer(asked, answer, (), {})
    return model.text(ids[:-1]), ids[-1]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_is_its_text_and_its_end_token(name, family):
    end, model = id_of(FAMILIES[name][1]), Spoken(family(name))
    words, call = WORDS.get(name, ("Hi there.", None))
    assert text_and_end(model, {"role": "assistant", "content": "Hi there."}) == (words, end)
    found, last = text_and_end(model, CALL)
    assert last == end and (found == call or (call is None and '"name": "lookup"' in found))


def test_reasoning_comes_first_even_if_the_template_omits_it(tmp_path, family):
    answer = {"role": "assistant", "content": "Hi.", "reasoning_content": "Greet."}
    assert text_and_end(Spoken(family("qwen3")), answer)[0] == "<think>\nGreet.\n</think>\n\nHi."
    assert text_and_end(Spoken(family("qwen3 thinking")), answer)[0] == "Greet.\n</think>\n\nHi."
    shown = "{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + message.content.lstrip('\\n') }}"
    assert shown in QWEN3_THINKING
    hides = Spoken(write_chat_model(tmp_path / "m", QWEN3_THINKING.replace(shown, "{{- message.content }}")))
    assert text_and_end(hides, answer)[0] == "Greet.\n</think>\n\nHi."
    with pytest.raises(ChatRefused, match="has no reasoning, and the generation prompt opens it by <think>"):
        text_and_end(hides, {"role": "assistant", "content": "Hi."})


def test_an_answer_that_holds_the_text_of_its_end_is_refused(family):
    model = Spoken(family("chatml"))
    for field in ("content", "reasoning_content"):
        with pytest.raises(ChatRefused, match=r"holds <\|im_end\|>, at which an answer ends"):
            text_and_end(model, {"role": "assistant", "content": "Hi.", field: "a<|im_end|>b"})
    assert THINK[0] not in text_and_end(model, {"role": "assistant", "content": ""})[0]
