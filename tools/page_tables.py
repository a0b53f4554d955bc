"""Writes the generated tables inside pages of docs/: ``python -m tools.page_tables``.

A table is between the comments ``<!-- table NAME -->`` and ``<!-- end -->``. Raises ValueError if a page lacks one of
its tables.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from asyncrl.config import resuming
from asyncrl.learner.algorithm import advantages, losses
from tools import message_table, reference_tables

DOCS = Path(__file__).parent.parent / "docs"
TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "arguments": ("first-run.md", reference_tables.arguments),
    "losses": ("algorithms.md", partial(losses.BUILT_IN.document, "`loss`", "token loss", "options", "for")),
    "advantages": ("algorithms.md", partial(advantages.BUILT_IN.document, "`advantage`", "A of a turn", "for")),
    "resume": ("runs.md", resuming.document),
    "rewards": ("first-run.md", reference_tables.rewards),
    "token batch": ("algorithms.md", reference_tables.token_batch),
    "memory": ("learner.md", reference_tables.memory),
    "senders": ("protocol.md", message_table.document),
}


def renewed(page: str, text: str) -> str:
    """Return the text of a page with current tables. Raises ValueError."""
    for name, (where, made) in TABLES.items():
        if where == page:
            before, begin, rest = text.partition(f"<!-- table {name} -->\n")
            _, end, after = rest.partition("<!-- end -->")
            if not end:
                raise ValueError(f"{page} has no table {name}")
            text = f"{before}{begin}\n{made()}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    for each in sorted({where for where, _ in TABLES.values()}):
        (DOCS / each).write_text(renewed(each, (DOCS / each).read_text()))
