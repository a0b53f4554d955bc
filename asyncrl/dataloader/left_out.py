"""The rows and prompts of a set that are left out: errors and remarks about them. Pure.

A bad row is one that cannot be used or tokenized. Bad rows end the reading with DataError: file and line of the first,
and the number of other rows that cannot be used. Under on_bad_row = "skip" a bad row is left out, as if it were not
there. A prompt over max_prompt_tokens is left out before a lease, which is no failure. TooFewUsable is raised when no
prompt is left, or more than max_left_out_fraction is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from asyncrl.core.errors import DataError

if TYPE_CHECKING:
    from asyncrl.dataloader.prompts import PromptSet

LISTED_PROBLEMS = 5
"""Most places of further bad rows in an error."""
MEND = 'mend it, or leave such rows out with data.on_bad_row = "skip"'


class BadRow(ValueError):
    """The problem of one row."""


class TooFewUsable(DataError):
    """The rows were read, and none, or too small a share, can be used."""


@dataclass(frozen=True, slots=True)
class Remark:
    """A message to the user about rows that are left out of a usable set."""

    kind: Literal["bad_rows", "too_long"]
    detail: str
    fix: str


def bad_rows(first: str, line: int, problem: str, others: Sequence[str], count: int) -> DataError:
    """The error of a source with ``count`` bad rows; ``others`` are the places of those after the first."""
    listed = ", ".join(others[:LISTED_PROBLEMS])
    more = f"; {count - 1} more bad rows ({listed}{', …' if count > LISTED_PROBLEMS + 1 else ''})" if others else ""
    return DataError(problem + more, path=first, line=line, fix=MEND)


def nothing_usable(source: str, first_bad: str) -> TooFewUsable:
    """The error of a source without a usable row. ``first_bad`` is the first bad row and its problem; "" if no row."""
    if first_bad:
        return TooFewUsable(f"holds no usable row ({first_bad})", path=source, fix="mend them")
    return TooFewUsable("holds no row", path=source, fix="put the prompts there, or set another path")


def too_few_usable(prompts: PromptSet, path: str) -> TooFewUsable | None:
    """The error of a set if no prompt, or too small a share of its rows, can be used; else None."""
    config, (tokens, place) = prompts.config, prompts.longest
    count, oversize, skipped = len(prompts), len(prompts.oversize), prompts.skipped
    rows, left_out = count + skipped, oversize + skipped
    if not count:
        return nothing_usable(path, prompts.first_skipped)
    if oversize == count:
        over = f"data.max_prompt_tokens = {config.max_prompt_tokens}; the longest has {tokens} tokens"
        fix = "raise data.max_prompt_tokens, or shorten the prompts"
        return TooFewUsable(f"every prompt is over {over}", path=path, fix=fix)
    if left_out <= config.max_left_out_fraction * rows:
        return None
    parts, mends = [], []
    if oversize:
        over = f"{oversize:,} have more than data.max_prompt_tokens = {config.max_prompt_tokens} tokens"
        parts.append(f"{over} (the longest has {tokens}: {place})")
        mends.append("raise data.max_prompt_tokens or shorten the prompts")
    if skipped:
        parts.append(f"{skipped:,} cannot be used (the first: {prompts.first_skipped})")
        mends.append("mend the rows")
    return TooFewUsable(
        f"{_share(left_out, rows)} rows are left out, more than data.max_left_out_fraction = "
        f"{config.max_left_out_fraction:g} allows: {'; '.join(parts)}",
        path=path,
        fix=f"{'; '.join(mends)}; or raise data.max_left_out_fraction if the rest is enough",
    )


def remarks(prompts: PromptSet, key: str) -> list[Remark]:
    """Messages about the left-out rows of a usable set; ``key`` is the set's configuration key."""
    count, oversize, skipped = len(prompts), len(prompts.oversize), prompts.skipped
    found = []
    if skipped:
        share = _share(skipped, skipped + count)
        detail = f'{share} rows cannot be used and are left out ({key}.on_bad_row = "skip")'
        found.append(Remark("bad_rows", f"{detail}; the first: {prompts.first_skipped}", "mend them, or leave it so"))
    if oversize:
        tokens, place = prompts.longest
        detail = (
            f"{_share(oversize, count)} prompts have more than {key}.max_prompt_tokens = "
            f"{prompts.config.max_prompt_tokens} tokens and are left out; the longest has {tokens} ({place})"
        )
        found.append(Remark("too_long", detail, f"raise {key}.max_prompt_tokens, shorten them, or leave it so"))
    return found


def _share(count: int, total: int) -> str:
    """The count with its share of the total, as in "40 of 200 (20 %)"."""
    return f"{count:,} of {total:,} ({100 * count / total:.2g} %)"
