"""The page of configuration keys."""

import re
from pathlib import Path

import pytest

from asyncrl.config.keys import known_keys
from tools import configuration_page
from tools.configuration_page import COMMAND, document

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def keys_of_the_page(page):
    """Each key with its row, by its heading."""
    section = ""
    for line in page.splitlines():
        if line.startswith("##"):
            section = line.lstrip("# ")
        elif found := re.match(r"\| `(\w+)` \|", line):
            yield f"{section}.{found[1]}", line


def test_the_page_matches_the_configuration():
    assert PAGE.read_text() == document(), f"{COMMAND} > docs/configuration.md"


def test_each_key_has_a_row_with_type_default_unit_and_text():
    rows = dict(keys_of_the_page(PAGE.read_text()))
    # Most keys of an evaluation's prompts and of a source are those of the training prompts.
    known = {key for key, *_ in known_keys()}
    for table in ("eval.NAME.data.", "data.source.NAME."):
        known -= {key for key in known if key.startswith(table) and key.replace(table, "data.") in known}
    assert rows.keys() == known
    for row in rows.values():
        cells = re.split(r" \| ", row.removeprefix("| ").removesuffix(" |"))
        assert len(cells) == 5 and all(cells[at] for at in (0, 1, 2, 4)), row


def test_a_row_has_bounds_default_and_unit_and_escapes_markdown():
    rows = dict(keys_of_the_page(PAGE.read_text()))
    for key, part in {
        "learner.collective_timeout_s": "| number &gt; 0 | `600.0` | s |",
        "staleness.max": "| integer &gt;= 0 | `1` | versions |",
        "weights.bucket_bytes": "| `268435456` (256 MiB) | bytes |",
        "model.path": "| text | *unset* |  |",
        "chat.renderer": "<code>^(template&#124;renderers:.+)$</code>",
        "chat.tool_parser": "&lt;tool_call&gt;",
        "learner.loss": "[algorithms.md](algorithms.md)",
    }.items():
        assert part in rows[key], rows[key]


def test_a_unit_of_a_removed_key_is_an_error(monkeypatch):
    monkeypatch.setitem(configuration_page.UNITS, "learner.gone", "s")
    with pytest.raises(ValueError, match=r"learner\.gone"):
        document()
