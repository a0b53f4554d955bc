"""vLLM's parsers of calls and reasoning as parsers of whole answers, on a tokenizer of a few kilobytes."""

import json

import pytest

pytest.importorskip("vllm")

from run_settings import simulated_run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.config.load import validate_config
from asyncrl.core.errors import ConfigError
from asyncrl.rollouter.engines import engine_parsers
from asyncrl.rollouter.engines.vllm.vllm_parser import make_parser

TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"word": "x"}}\n</tool_call>'
READ = [("lookup", '{"word": "x"}')]
TOKENS = ("<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    alphabet = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(TOKENS))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=TOKENS[0]).save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return str(path)


@pytest.mark.parametrize(
    ("tool_parser", "reasoning_parser", "text", "tools", "expected"),
    [
        ("hermes", None, f"Well.{CALL}", TOOLS, (None, "Well.", READ, 0)),
        ("hermes", None, "Well.", TOOLS, (None, "Well.", [], 0)),
        ("hermes", None, CALL, [], (None, CALL, [], 0)),
        # A call that cannot be read stays in the content and is counted.
        *[
            ("hermes", None, f"Well.{broken}", TOOLS, (None, f"Well.{broken}", [], 1))
            for broken in (
                '<tool_call>{"name": "lookup"',
                '<tool_call>{"name": 1}</tool_call>',
                '<tool_call>{"name": "lookup", "arguments": {"a": 1e999}}</tool_call>',
                '<tool_call>{"name": "lookup", "arguments": {"a": "\\ud800"}}</tool_call>',
            )
        ],
        # A call that reasoning quotes does not count.
        ("hermes", "deepseek_r1", f"<think>say {CALL}</think>{CALL}", TOOLS, (f"say {CALL}", "", READ, 0)),
        (None, "deepseek_r1", "<think>a</think>b", TOOLS, ("a", "b", [], 0)),
    ],
)
def test_an_answer_is_parsed_by_the_names_of_vllm(folder, tool_parser, reasoning_parser, text, tools, expected):
    parser = make_parser(folder, tool_parser, reasoning_parser)
    # One answer leaves nothing to the next.
    for _ in range(2):
        parsed = parser(text, tools)
        calls = [(call.name, call.arguments) for call in parsed.calls]
        assert (parsed.reasoning, parsed.content, calls, parsed.malformed) == expected


def test_an_engine_has_the_parsers_of_its_model_and_a_simulated_one_none(folder):
    made = engine_parsers(validate_config({"model": {"path": folder}, "data": {"source": "synthetic"}}))
    assert made("hermes", None)(CALL, TOOLS).calls
    assert engine_parsers(simulated_run()) is None


def test_unknown_parser_names_and_missing_tokens_are_refused(folder):
    with pytest.raises(ConfigError) as caught:
        make_parser(folder, "herme", "deepseek_r9")
    assert "chat.tool_parser: vLLM has no parser 'herme'; it has " in caught.value.problems[0]
    assert caught.value.problems[1].startswith("chat.reasoning_parser: ")
    with pytest.raises(ConfigError, match=r"chat\.tool_parser: .*"):
        make_parser(folder, "deepseek_v31", None)
