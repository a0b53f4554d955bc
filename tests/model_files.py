"""A model's folder as the doctor checks it: nothing in it can be loaded."""

import json
import struct


def write_weights(path, shape=(4, 5), cut=0, name="w", dtype="BF16"):
    size = shape[0] * shape[1] * (2 if dtype == "BF16" else 1)
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            name: {"dtype": dtype, "shape": list(shape), "data_offsets": [0, size]},
        }
    ).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(size)
    path.write_bytes(data[: len(data) - cut])


def write_model(folder):
    """A model of 20 parameters with its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    (folder / "config.json").write_text('{"eos_token_id": 1}')
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    write_weights(folder / "model.safetensors")
    return folder


def write_chat_template(model, template):
    """Give a model of write_model a chat template. Its </s> is then a special token, like those that end answers."""
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": template}))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    end = {"id": 1, "content": "</s>", "special": True, "normalized": False}
    end |= dict.fromkeys(["single_word", "lstrip", "rstrip"], False)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer | {"added_tokens": [end]}))
