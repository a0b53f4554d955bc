"""The renderers of the package of that name, on a small tokenizer, compared with the template of the family."""

import importlib.util

import pytest
from chat_models import QWEN3, config_of, id_of, write_chat_model

from asyncrl.core.errors import ConfigError
from asyncrl.text.chat.probe import TOOLS
from asyncrl.text.chat.renderer import make_renderer
from asyncrl.text.tokenizer import tokenizer_of

INSTALLED = importlib.util.find_spec("renderers") is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason="the package renderers is not installed (extra `renderers`)")
USER = {"role": "user", "content": "Hello."}
END = id_of("<|im_end|>")
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"word": "x"}}\n</tool_call>'


def renderer_of(folder, renderer="renderers:qwen3", **chat):
    config = config_of(folder, renderer=renderer, **chat)
    return make_renderer(config, tokenizer_of(config))


@pytest.fixture
def model(tmp_path):
    more = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    return write_chat_model(tmp_path / "m", QWEN3, more_ends=("<|endoftext|>",), more_special=more)


@pytest.mark.skipif(INSTALLED, reason="the package renderers is installed")
def test_a_missing_package_is_named_with_its_install_command(model):
    with pytest.raises(ConfigError, match=r"chat\.renderer: needs the package renderers .*asyncrl\[renderers\]"):
        renderer_of(model)


@needs_package
def test_an_unknown_family_is_named(model):
    with pytest.raises(ConfigError, match=r"chat\.renderer: renderers:qwen99 cannot be made"):
        renderer_of(model, "renderers:qwen99")


@needs_package
@pytest.mark.parametrize("history", ["sampled", "template"])
def test_the_package_renders_like_the_template_and_extends_as_the_family_allows(model, history):
    package, template = renderer_of(model, history=history), renderer_of(model, "template", history=history)
    text = tokenizer_of(config_of(model)).decode
    assert package.render([USER], [], {}) == template.render([USER], [], {})
    found = {case.case: case.verdict for case in package.report.cases}
    assert found["thinking, tool"] == "extend"
    assert found["thinking, user"] == ("extend" if history == "sampled" else "fork")
    assert (package.report.end, package.report.seam) == ("<|im_end|>", "\n")
    result = [{"role": "tool", "content": "r", "tool_call_id": "c"}]
    ids = [*tokenizer_of(config_of(model)).encode(CALL), END]
    given = {"tools": TOOLS, "options": {}, "last_ids": ids}
    expected = "\n<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert text(package.extension(result, **given), keep_special=True) == expected
    assert package.extension(result, **given) == template.extension(result, **given)


@needs_package
def test_the_package_parses_answers(model):
    renderer, encode = renderer_of(model), tokenizer_of(config_of(model)).encode
    parsed = renderer.parse([*encode(f"<think>\nsay\n</think>\n\nWell.\n{CALL}"), END], TOOLS)
    assert (parsed.reasoning, parsed.content, parsed.malformed) == ("say", "Well.", 0)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("lookup", '{"word": "x"}')]
    broken = renderer.parse([*encode('<tool_call>\n{"name": \n</tool_call>'), END], TOOLS)
    assert (broken.calls, broken.malformed) == ([], 1) and '{"name":' in broken.content
    huge = renderer.parse([*encode(CALL.replace('"x"', "1e999")), END], TOOLS)
    assert (huge.calls, huge.malformed) == ([], 1) and "1e999" in huge.content
    assert renderer.parse(encode("<think>\nsay"), TOOLS).unfinished
