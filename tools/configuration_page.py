"""The page of all configuration keys: ``python -m tools.configuration_page > docs/configuration.md``.

Invariant: the page holds each key once, and nothing that does not follow from asyncrl/config. A unit whose key is gone
is a ValueError.
"""

from __future__ import annotations

import html
import inspect
import re
import sys
from typing import get_args

from pydantic.fields import FieldInfo

from asyncrl.config import Config
from asyncrl.config.keys import default_words, docstrings, known_keys, listed_table_of, table_of, type_words
from asyncrl.config.section import Section

COMMAND = "python -m tools.configuration_page"
HEAD = f"""\
# Configuration

A configuration is TOML, with a table for each section of this page. `mine.toml`:

```toml
[model]
path = "Qwen/Qwen2.5-1.5B-Instruct"

[data]
path = "prompts.jsonl"
template = "chat"

[reward]
function = "my_rewards:reward"
```

```sh
asyncrl-launch base.toml mine.toml --learner.lr 3e-6   # files are merged from left to right; flags come last
asyncrl-launch mine.toml --dry-run --json              # the whole configuration, as it is resolved
asyncrl-launch --help-config                           # every key
```

A list replaces a list. An unknown key is an error, which names the key that is meant, also for names of TRL, verl,
OpenRLHF, prime-rl, transformers and vLLM (`learning_rate`, `num_generations`). All errors are printed at once, before
anything starts (exit code 78). A key that is *unset* has no value until one is given.

`{COMMAND}` writes this page from the docstrings of `asyncrl/config/`; do not edit it.
"""
ENDINGS = {"_s": "s", "_bytes": "bytes", "_tokens": "tokens", "_versions": "versions", "_steps": "steps"}
"""Units by the end of a key's name."""
UNITS = {
    "rollout.sim.length_median": "tokens",
    "rollout.sim.prefill_tokens_per_s": "tokens/s",
    "rollout.stream_interval": "tokens",
    "rollout.vllm.block_size": "tokens",
    "rollout.vllm.max_model_len": "tokens",
    "learner.correction.reject.limit": "nats",
    "learner.steps": "steps",
    "learner.steps_per_version": "steps",
    "learner.tokens_per_microbatch": "tokens",
    "drift.stop": "nats",
    "drift.warn": "nats",
    "staleness.max": "versions",
    "weights.versions_held": "versions",
}
"""Units that the name does not show."""
PREFIXES = ((30, "GiB"), (20, "MiB"), (10, "KiB"))
TABLE = ("| key | type | default | unit | description |", "|---|---|---|---|---|")


def document() -> str:
    """docs/configuration.md."""
    missing = UNITS.keys() - {key for key, *_ in known_keys()}
    if missing:
        raise ValueError(f"UNITS of {__name__} names no key: {', '.join(sorted(missing))}")
    sections: list[str] = []
    places: dict[type[Section], str] = {}
    for name, field in Config.model_fields.items():
        sections += _sections(name, field, places)
    headings = [line.removeprefix("## ") for line in sections if line.startswith("## ")]
    links = " · ".join(f"[{heading}](#{_anchor(heading)})" for heading in headings)
    return "\n".join([HEAD, links, "", *sections]).rstrip() + "\n"


def _sections(path: str, field: FieldInfo, places: dict[type[Section], str]) -> list[str]:
    """The lines of a table and of those within it; ``places`` are the tables written so far."""
    table = table_of(field)
    assert table is not None, path
    section, free = table
    heading = f"{path}.NAME" if free else path
    lines = [f"{'###' if '.' in path else '##'} {heading}", ""]
    bases = [base for base in section.__mro__ if issubclass(base, Section) and base is not Section]
    if (like := next((each for each in places for base in bases if issubclass(each, base)), None)) is not None:
        without = ", ".join(f"`{key}`" for key in like.model_fields if key not in section.model_fields)
        keys = f"The keys of [{places[like]}](#{_anchor(places[like])}){f' without {without}' if without else ''}"
        own = _own_rows(heading, section, like)
        return [*lines, *([f"{keys}, and:", "", *TABLE, *own] if own else [f"{keys}."]), ""]
    places[section] = heading
    lines += [_prose(inspect.getdoc(section) or ""), ""]
    if free:
        lines += [f"NAME is {_escaped(type_words(get_args(field.annotation)[0]))}.", ""]
    if field.default is None:
        lines += ["The table is left out by default.", ""]
    texts, rows, inner = docstrings(section), [], []
    for key, each in section.model_fields.items():
        if table_of(each) is not None:
            inner += _sections(f"{heading}.{key}", each, places)
        else:
            rows.append(_row(heading, key, each, texts[key]))
            if (item := listed_table_of(each)) is not None:
                inner += _listed(f"{heading}.{key}", item, section)
    if rows:
        lines += [*TABLE, *rows, ""]
    return lines + inner


def _listed(path: str, section: type[Section], around: type[Section]) -> list[str]:
    """The lines of the tables of a list: the keys that the table ``around`` it does not have."""
    heading = f"{path}.NAME"
    lines = [f"### {heading}", "", _prose(inspect.getdoc(section) or ""), ""]
    return [*lines, *TABLE, *_own_rows(heading, section, around), ""]


def _own_rows(heading: str, section: type[Section], other: type[Section]) -> list[str]:
    """The rows of the keys of ``section`` that ``other`` does not have."""
    texts = docstrings(section)
    own = {key: field for key, field in section.model_fields.items() if key not in other.model_fields}
    return [_row(heading, key, field, texts[key]) for key, field in own.items()]


def _row(heading: str, key: str, field: FieldInfo, text: str) -> str:
    unit = UNITS.get(f"{heading}.{key}") or next((unit for end, unit in ENDINGS.items() if key.endswith(end)), "")
    default = "required" if field.is_required() else _default(field.default, unit)
    kind = _escaped(type_words(field.annotation, field.metadata))
    return f"| `{key}` | {kind} | {default} | {unit} | {_prose(text)} |"


def _default(value: object, unit: str) -> str:
    words = default_words(value)
    if value is None:
        return f"*{words}*"
    shown = _code(words)
    for power, prefix in PREFIXES:
        if unit == "bytes" and isinstance(value, int) and value and value % (1 << power) == 0:
            return f"{shown} ({value >> power} {prefix})"
    return shown


def _prose(text: str) -> str:
    """A docstring as Markdown that stands in one cell; pages that it names are linked."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", "\n\n".join(map(_escaped, paragraphs)))


def _escaped(text: str) -> str:
    """The text without signs that Markdown or a table would take for their own; text between backticks stays code."""
    outside = True
    found = []
    for part in text.split("`"):
        found.append(_entities(part).replace("*", r"\*") if outside else _code(part))
        outside = not outside
    return "".join(found)


def _code(text: str) -> str:
    return f"<code>{_entities(text)}</code>" if set(text) & set("|<>&`") else f"`{text}`"


def _entities(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "&#124;")


def _anchor(heading: str) -> str:
    return heading.lower().replace(".", "")


if __name__ == "__main__":
    sys.stdout.write(document())
