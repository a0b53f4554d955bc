"""Prompts of rows as the model sees them, and what a template would leave out of them."""

import pytest
from chat_models import CHATML, QWEN3, TOOLS_FIRST, config_of, write_chat_model

from asyncrl.config.load import validate_config
from asyncrl.config.training import DataConfig
from asyncrl.core.errors import ChatRefused, ConfigError
from asyncrl.text.chat.template import PromptEncoder, conversation, read_prompt
from asyncrl.text.tokenizer import load_tokenizer, tokenizer_of

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Weather in Oslo?"}
CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}},
    ],
}
RESULT = {"role": "tool", "content": "-3 C", "name": "weather", "tool_call_id": "c1"}
PREFIX = {"role": "assistant", "content": "Sure, here is "}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def shown(folder, prompt, tools=(), *, chat=None, **data):
    config = config_of(folder, **(chat or {}))
    return PromptEncoder(tokenizer_of(config), DataConfig(template="chat", **data), config)(prompt, tools)[1]


@pytest.mark.parametrize("name", ["tools first", "qwen3", "mistral"])
def test_calls_results_and_tools_reach_the_model(name, family):
    text = shown(family(name), [USER, CALLS, RESULT], [TOOL])
    for part in ("Weather in Oslo?", '"city": "Oslo"', "-3 C", '"description": "Of a city."'):
        assert part in text


def test_the_system_message_precedes_a_prompt_without_one():
    own = {"role": "developer", "content": "Mine."}
    assert conversation(read_prompt([own, USER], "p", continues=False), "Be brief.")[0]["content"] == "Mine."
    assert conversation([USER], "Be brief.") == [SYSTEM, USER]
    assert conversation("hi", "Be brief.") == [SYSTEM, {"role": "user", "content": "hi"}]
    assert conversation("hi", None) == [{"role": "user", "content": "hi"}]


NO_TOOL_ROLE = CHATML.replace("for message in messages", "for message in messages if message.role != 'tool'")
ANSWER = {"role": "assistant", "content": "Cold.", "reasoning_content": "-3 is cold."}
PARTS_ALONE = CHATML.replace(
    "message.content }}", "message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}"
)


@pytest.mark.parametrize(
    ("template", "prompt", "tools", "problem"),
    [
        ("plain chatml", [USER, CALLS, RESULT], [], r"prompt\[1\].tool_calls: the chat template shows no calls"),
        ("chatml", "hi", [TOOL], r"tools\[0\].function.name: the chat template shows no tools.*data.tools_key"),
        ("chatml", [USER, ANSWER, USER], [], r"prompt\[1\].reasoning_content: the chat template does not show it"),
        ("chatml", [USER | {"name": "Ann"}], [], r"prompt\[0\].name: the chat template does not show it.*put it into"),
        ("llama", [USER, CALLS | {"content": "I look."}, RESULT], [], r"prompt\[1\].content: the chat template does"),
        (NO_TOOL_ROLE, [USER, CALLS, RESULT], [], r"prompt\[2\].content: the chat template does not show it"),
    ],
    ids=["calls", "tools", "reasoning", "name", "content with a call", "role"],
)
def test_content_that_a_template_omits_is_refused_by_name(template, prompt, tools, problem, family, tmp_path):
    folder = write_chat_model(tmp_path / "m", template) if template == NO_TOOL_ROLE else family(template)
    with pytest.raises(ChatRefused, match=problem):
        shown(folder, prompt, tools)
    with pytest.raises(ChatRefused, match=problem):
        # With data.system in front, a message is still named by its place in the row.
        shown(folder, prompt, tools, system="Be brief.")


def test_a_system_message_that_a_template_omits_is_named_by_its_key(tmp_path):
    template = CHATML.replace("for message in messages", "for message in messages if message.role != 'system'")
    with pytest.raises(ChatRefused, match=r"data.system: the chat template does not show it"):
        shown(write_chat_model(tmp_path / "m", template), "hi", system="Be brief.")


def test_calls_in_the_content_count_if_the_run_parses_content(family):
    text = shown(family("plain chatml"), [USER, CALLS, RESULT], chat={"tool_parser": "json"})
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in text


def test_a_template_may_omit_reasoning_of_earlier_answers(family):
    assert "-3 is cold." not in shown(family("qwen3"), [USER, ANSWER, USER])
    thoughtful = CALLS | {"reasoning_content": "I look."}
    assert "I look." in shown(family("qwen3"), [USER, thoughtful, RESULT])
    assert "-3 is cold." in shown(family("keeps thinking"), [USER, ANSWER, USER])


def test_a_template_gets_reasoning_and_content_in_the_form_that_it_reads(tmp_path):
    folder = write_chat_model(tmp_path / "thinking", QWEN3.replace("message.reasoning_content", "message.thinking"))
    assert "I look." in shown(folder, [USER, CALLS | {"reasoning_content": "I look."}, RESULT])
    folder = write_chat_model(tmp_path / "parts", PARTS_ALONE)
    assert "Weather in Oslo?" in shown(folder, [USER])


@pytest.mark.parametrize("written", ["('' + call.function.arguments)", "call.function.arguments"])
def test_a_template_that_prints_arguments_unchanged_gets_json_text(written, tmp_path):
    folder = write_chat_model(tmp_path / "m", CHATML.replace("(call.function.arguments | tojson)", written))
    called = CALLS["tool_calls"][0] | {"function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    assert '"arguments": {"city": "Zürich"}}' in shown(folder, [USER, CALLS | {"tool_calls": [called]}, RESULT])


def test_a_template_that_needs_descriptions_of_tools_shows_calls_and_tools(tmp_path):
    template = TOOLS_FIRST.replace(
        "(tools | tojson)", "tools[0].function.name + tools[0].function.description + (tools | tojson)"
    )
    text = shown(write_chat_model(tmp_path / "m", template), [USER, CALLS, RESULT], [TOOL])
    assert "weatherOf a city." in text and '"city": "Oslo"' in text


def test_bytes_show_all_of_a_conversation():
    text = shown(None, [USER | {"name": "Ann"}, CALLS | {"reasoning_content": "I look."}, RESULT], [TOOL])
    for part in ("user (Ann): Weather", '"city": "Oslo"', "I look.", "tool: -3 C", '"description": "Of a city."'):
        assert part in text


@pytest.mark.parametrize("name", ["chatml", "tools first", "qwen3", "llama", "lines"])
@pytest.mark.parametrize("content", ["Sure, here is", "Sure, here is ", "a Sure a"])
def test_the_last_message_is_continued_as_transformers_does_it(name, content, family):
    from transformers import AutoTokenizer

    folder = family(name)
    theirs = AutoTokenizer.from_pretrained(str(folder))
    prompt = read_prompt([USER, PREFIX | {"content": content}], "prompt", continues=True)
    encoder = PromptEncoder(
        load_tokenizer(str(folder)), DataConfig(template="chat", continue_final_message=True), config_of(folder)
    )
    ids, text = encoder(prompt)
    expected = theirs.apply_chat_template(prompt, tokenize=False, continue_final_message=True)
    # Llama's template trims what it is given; the text to be continued keeps its last space.
    assert text.rstrip() == expected.rstrip() and text.endswith(content)
    assert ids == load_tokenizer(str(folder)).encode(text)


def test_a_last_message_of_the_assistant_is_refused_unless_it_is_continued():
    problem = r"prompt\[1\]: the last message is the assistant's;.*data.continue_final_message = true"
    with pytest.raises(ChatRefused, match=problem):
        read_prompt([USER, PREFIX], "prompt", continues=False)
    assert read_prompt([USER, PREFIX], "prompt", continues=True) == [USER, PREFIX]
    for continues in (False, True):
        with pytest.raises(ChatRefused, match=r"prompt\[1\].tool_calls: no result follows"):
            read_prompt([USER, CALLS], "prompt", continues=continues)


def test_plain_text_has_no_tools_and_episodes_with_tools_have_their_own(family):
    tokenizer = load_tokenizer(str(family("chatml")))
    with pytest.raises(ChatRefused, match=r'tools: .*data.template = "chat" alone.*data.tools_key = ""'):
        PromptEncoder(tokenizer, DataConfig())("hi", [TOOL])
    tree = config_of(family("tools first")).model_dump(mode="json")
    config = validate_config(tree | {"episode": {"tools": ["m:f"]}})
    with pytest.raises(ChatRefused, match=r'tools: .*episode.tools.*data.tools_key = ""'):
        PromptEncoder(tokenizer, DataConfig(template="chat"), config)("hi", [TOOL])


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"data": {"continue_final_message": True}}, 'data.continue_final_message: needs template = "chat"'),
        (
            {
                "data": {"template": "chat", "continue_final_message": True},
                "episode": {"function": "m:f"},
            },
            "data.continue_final_message: is for single answers",
        ),
    ],
)
def test_continuation_needs_a_chat_template_and_single_answers(tree, problem):
    merged = tree | {"data": {"source": "synthetic"} | tree["data"]}
    with pytest.raises(ConfigError, match=problem):
        validate_config(merged | {"rollout": {"engine": "sim"}, "learner": {"backend": "sim"}})
