"""vLLM's parsers of calls and reasoning as parsers of whole answers, on a tokenizer of a few kilobytes."""

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from asyncrl.chat.renderer import make_renderer
from asyncrl.config.load import validate_config
from asyncrl.errors import ConfigError
from asyncrl.rollouter.engines import engine_parsers
from asyncrl.rollouter.engines.vllm.parsers import make_parser
from asyncrl.tokenizer import tokenizer_of

TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"word": "x"}}\n</tool_call>'
TOKENS = ("<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend.model = models.BPE(vocab=alphabet, merges=[])
    backend.add_special_tokens(list(TOKENS))
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=TOKENS[0])
    fast.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return str(path)


def parts(parsed):
    return parsed.reasoning, parsed.content, [(call.name, call.arguments) for call in parsed.calls], parsed.malformed


def test_calls_by_the_name_of_vllm(folder):
    parser = make_parser(folder, "hermes", None)
    for _ in range(2):
        assert parts(parser(f"Well.{CALL}", TOOLS)) == (None, "Well.", [("lookup", '{"word": "x"}')], 0)
    assert parts(parser("Well.", TOOLS)) == (None, "Well.", [], 0)
    assert parts(parser(CALL, [])) == (None, CALL, [], 0)


@pytest.mark.parametrize("broken", ['<tool_call>{"name": "lookup"', '<tool_call>{"name": 1}</tool_call>'])
def test_a_call_that_cannot_be_read_stays_in_the_content_and_is_counted(folder, broken):
    parser = make_parser(folder, "hermes", None)
    assert parts(parser(f"Well.{broken}", TOOLS)) == (None, f"Well.{broken}", [], 1)


def test_reasoning_that_quotes_a_call_is_none(folder):
    parser = make_parser(folder, "hermes", "deepseek_r1")
    found = parts(parser(f"<think>say {CALL}</think>{CALL}", TOOLS))
    assert found == (f"say {CALL}", "", [("lookup", '{"word": "x"}')], 0)
    assert parts(make_parser(folder, None, "deepseek_r1")("<think>a</think>b", TOOLS)) == ("a", "b", [], 0)


def test_a_renderer_is_given_those_that_the_configuration_names(folder):
    config = validate_config(
        {
            "model": {"path": folder},
            "data": {"source": "synthetic"},
            "chat": {"tool_parser": "hermes", "reasoning_parser": "think"},
        }
    )
    template = "{% for m in messages %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}"
    (Path(folder) / "chat_template.jinja").write_text(template)
    tokenizer = tokenizer_of(config)
    renderer = make_renderer(config, tokenizer, engine_parsers=engine_parsers(config))
    ids = tokenizer.encode(f"<think>say {CALL}</think>Well.{CALL}<|im_end|>")
    assert parts(renderer.parse(ids, TOOLS)) == (f"say {CALL}", "Well.", [("lookup", '{"word": "x"}')], 0)
    simulated = {"data": {"source": "synthetic"}, "rollout": {"engine": "sim"}, "learner": {"backend": "sim"}}
    assert engine_parsers(validate_config(simulated)) is None


def test_names_that_vllm_has_not_and_tokens_that_the_model_has_not(folder):
    with pytest.raises(ConfigError) as caught:
        make_parser(folder, "herme", "deepseek_r9")
    assert "chat.tool_parser: vLLM has no parser 'herme'; it has " in caught.value.problems[0]
    assert caught.value.problems[1].startswith("chat.reasoning_parser: ")
    with pytest.raises(ConfigError, match=r"chat\.tool_parser: .*"):
        make_parser(folder, "deepseek_v31", None)
