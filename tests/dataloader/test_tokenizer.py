"""Tokenizers: bytes, and Hugging Face folders against what transformers makes of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from asyncrl.config.training import DataConfig
from asyncrl.core.errors import ConfigError
from asyncrl.text.chat.template import PromptEncoder
from asyncrl.text.tokenizer import ByteTokenizer, load_tokenizer

CHAT = """{%- for message in messages -%}
    {%- if message.role not in ["system", "user", "assistant"] -%}
        {{- raise_exception("unknown role " + message.role) -}}
    {%- endif -%}
    {{- "<|im_start|>" + message["role"] + "\\n" -}}
    {%- if message.role == "assistant" -%}
        {% generation %}{{- message.content -}}{% endgeneration %}
    {%- else -%}
        {{- message.content | trim -}}
    {%- endif -%}
    {{- eos_token + "\\n" -}}
    {%- if loop.index > 50 -%}{%- break -%}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\\n" -}}
{%- endif -%}
"""
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
TEXTS = ["Hello world", "  two  spaces\n", "naïve café — 你好 🙂", "<|im_start|>inside", "x" * 50]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def make_folder(folder: Path, *, template: str = "$A", **config: Any) -> Path:
    """A byte-level BPE tokenizer as model folders have it; ``template`` is its post-processor."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["Hello world, hello spaces"] * 3, trainer)
    if template != "$A":
        special = [(token, backend.token_to_id(token)) for token in SPECIAL]
        backend.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single=template, special_tokens=special),
            ]
        )
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "chat_template": CHAT,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


# --- bytes ---


@given(st.text())
def test_byte_tokens_survive_a_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode_prompt(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= id < 256 for id in ids)
    assert tokenizer.decode([104, 105, *tokenizer.eos_ids]) == "hi"


# --- Hugging Face folders ---


@pytest.mark.parametrize("add_bos_token", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize(("template", "first"), [("$A", []), ("<s> $A", [0]), ("<s> $A <|endoftext|>", [0])])
def test_text_and_chat_have_the_tokens_of_transformers_without_the_final_special_token(
    tmp_path: Path, template: str, first: list[int], add_bos_token: dict[str, bool]
) -> None:
    from transformers import AutoTokenizer

    path = str(make_folder(tmp_path / "m", template=template, **add_bos_token))
    theirs, ours = AutoTokenizer.from_pretrained(path), load_tokenizer(path)
    for text in TEXTS:
        ids = ours.encode_prompt(text)
        assert ids == [id for id in theirs.encode(text) if id != SPECIAL.index("<|endoftext|>")]
        assert ids == first + ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        ids, rendered = PromptEncoder(ours, DataConfig(template="chat", system="brief"))(text)
        messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": text}]
        assert rendered == theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert rendered.endswith("<|im_start|>assistant\n")


def test_a_prompt_of_messages_keeps_its_own_system_message(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}]
    encode = PromptEncoder(tokenizer, DataConfig(template="chat", system="general"))
    assert "own" in (text := encode(own)[1])
    assert "general" not in text
    assert "general" in encode(own[1:])[1]
    assert len(own) == 2
    assert tokenizer.decode([*tokenizer.encode("Hello"), SPECIAL.index("<|im_end|>")]) == "Hello"


def test_the_chat_template_may_be_a_file_or_one_of_several(tmp_path: Path) -> None:
    path = make_folder(
        tmp_path / "m", chat_template=[{"name": "tools", "template": "no"}, {"name": "default", "template": "A"}]
    )
    assert load_tokenizer(str(path)).render_chat([user("x")]) == "A"
    (path / "chat_template.jinja").write_text(
        '{{ messages[0] | tojson }} {{ bos_token }} {{ strftime_now("%Y") | length }}'
    )
    text = load_tokenizer(str(path)).render_chat([user("<é>")])
    assert text == '{"role": "user", "content": "<é>"} <s> 4'


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": {"eos_token_id": 3}}, {2, 3}),
        ({"generation_config.json": {"eos_token_id": [2, 7]}, "config.json": {"eos_token_id": None}}, {2, 7}),
        ({"config.json": {"text_config": {"eos_token_id": [9]}}}, {2, 9}),
    ],
)
def test_responses_end_with_every_token_that_any_file_names(
    tmp_path: Path, files: dict[str, Any], expected: set[int]
) -> None:
    path = make_folder(tmp_path / "m")
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    assert load_tokenizer(str(path)).eos_ids == expected


def test_a_folder_without_tokenizer_json_is_loaded_by_transformers(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.mkdir()
    vocabulary = {token: id for id, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "world"])}
    (path / "vocab.txt").write_text("\n".join(vocabulary))
    (path / "config.json").write_text(json.dumps({"model_type": "bert", "eos_token_id": 3}))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.encode("hello world") == [4, 5]
    assert tokenizer.decode(tokenizer.encode_prompt("hello")) == "hello"
    assert tokenizer.decode([4, 3]) == "hello"
    assert tokenizer.eos_ids == {3}
    assert tokenizer.special_ids.items() >= {"[SEP]": 3, "[UNK]": 1}.items()
    assert "hello" not in tokenizer.special_ids
    assert tokenizer.vocabulary == len(vocabulary) + len(tokenizer.special_ids.keys() - vocabulary)


def test_an_empty_tokenizer_is_refused(tmp_path: Path) -> None:
    """For some families transformers makes a tokenizer without a vocabulary where the files are missing."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "eos_token_id": 1, "bos_token_id": 1}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds no tokenizer: no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "vocab.txt").write_text("of another family")
    with pytest.raises(ConfigError, match="has no tokens; its vocabulary is missing"):
        load_tokenizer(str(tmp_path))


def test_the_first_unknown_piece_of_a_text_is_named(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"one": 0, "two": 1, "<s>": 2}))
    backend.pre_tokenizer, backend.normalizer = pre_tokenizers.Whitespace(), normalizers.Lowercase()
    backend.add_special_tokens(["<s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("<s>One two") == [2, 0, 1]
    for text, piece in (
        # Named as it is once it is normalized.
        ("<s>One THREE two four", "'three' in '<s>One THREE two four'"),
        ("one " * 9 + "three " + "two " * 9, f"'three' in '{'one ' * 5}three {'two ' * 3}tw...'"),
        ("x" * 99, f"'{'x' * 40}...'"),
    ):
        with pytest.raises(ValueError, match=rf"cannot encode {re.escape(piece)}, which its vocabulary lacks"):
            tokenizer.encode(text)


@pytest.mark.parametrize(
    ("file", "text", "match"),
    [
        ("", "", r"model\.path: .*none is not a folder"),
        ("generation_config.json", "{", r"generation_config\.json cannot be read"),
        ("generation_config.json", "[]", "is not a JSON object"),
        ("tokenizer.json", "{}", r"tokenizer\.json cannot be read"),
    ],
)
def test_wrong_folders_name_the_key(tmp_path: Path, file: str, text: str, match: str) -> None:
    path = make_folder(tmp_path / "m") if file else tmp_path / "none"
    if file:
        (path / file).write_text(text)
    with pytest.raises(ConfigError, match=match):
        load_tokenizer(str(path))


@pytest.mark.parametrize(
    ("template", "match"),
    [(None, r'no chat template; set data\.template = "plain"'), ("{% if %}", "cannot be compiled")],
)
def test_wrong_chat_templates_name_the_key(tmp_path: Path, template: str | None, match: str) -> None:
    tokenizer = load_tokenizer(str(make_folder(tmp_path / "a", chat_template=template)))
    assert tokenizer.encode_prompt("Hello")
    with pytest.raises(ConfigError, match=match):
        PromptEncoder(tokenizer, DataConfig(template="chat"))("x")


def test_a_prompt_that_its_template_rejects_is_a_value_error(tmp_path: Path, folder: Path) -> None:
    tokenizer, said = load_tokenizer(str(folder)), [{"role": "tool", "content": "x"}]
    for each in (tokenizer, load_tokenizer(None)):
        with pytest.raises(ValueError, match='chat messages need template = "chat"'):
            PromptEncoder(each, DataConfig())(said)
    with pytest.raises(ValueError, match="refuses the prompt: unknown role tool"):
        PromptEncoder(tokenizer, DataConfig(template="chat"))(said)
    # Nor may a template reach into Python.
    evil = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ValueError, match="refuses the prompt"):
        load_tokenizer(str(make_folder(tmp_path / "m", chat_template=evil))).render_chat([user("x")])


def test_nothing_heavy_is_imported_for_a_folder_with_tokenizer_json(folder: Path) -> None:
    code = (
        "import sys\n"
        "import asyncrl.text.tokenizer as t\n"
        "assert not {'tokenizers', 'jinja2', 'transformers', 'torch', 'numpy'} & set(sys.modules)\n"
        "tokenizer = t.load_tokenizer(sys.argv[1])\n"
        "assert 'jinja2' not in sys.modules\n"
        "tokenizer.render_chat([{'role': 'user', 'content': 'x'}])\n"
        "assert not {'transformers', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=60)
