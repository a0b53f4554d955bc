"""The table and the figure of a comparison. Pure.

A row is a variant: the held-out reward of each seed, never their mean alone, and failed runs by name.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from statistics import fmean

from tools.compare.runs import Result

WIDTH, LEFT, RIGHT, ROW, TOP, BOTTOM = 760, 240, 20, 24, 14, 34
"""Measures of the figure, pixels."""


def markdown(results: Sequence[Result]) -> str:
    """A table for each group."""
    tables = []
    for group in dict.fromkeys(result.group for result in results):
        rows = [
            f"| {group} | after, mean | each seed | greedy | staleness | behaviour KL |",
            "|---|---|---|---|---|---|",
            *(_row(found) for found in by_variant([r for r in results if r.group == group])),
        ]
        tables.append("\n".join(rows))
    ended = [result for result in results if not result.failed]
    before = f"Held-out reward before: {fmean(r.before for r in ended):.3f}.\n\n" if ended else ""
    return before + "\n\n".join(tables) + "\n"


def by_variant(results: Sequence[Result]) -> list[list[Result]]:
    """The runs of each variant, in the order of the variants."""
    places = dict.fromkeys((result.group, result.variant) for result in results)
    return [[r for r in results if (r.group, r.variant) == place] for place in places]


def _row(runs: Sequence[Result]) -> str:
    ended = [run for run in runs if not run.failed]
    if not ended:
        return f"| {runs[0].variant} | failed | {len(runs)} of {len(runs)} | | | |"
    each = ", ".join("failed" if run.failed else f"{run.after:.3f}" for run in runs)
    return (
        f"| {runs[0].variant} | {fmean(r.after for r in ended):.3f} | {each} | {fmean(r.greedy for r in ended):.3f} "
        f"| {fmean(r.staleness for r in ended):.2f} | {fmean(r.behaviour_kl for r in ended):.4f} |"
    )


def figure(results: Sequence[Result]) -> str:
    """SVG: a row for each variant, a dot for each seed at its held-out reward after, a line where all began."""
    variants = by_variant(results)
    ended = [result for result in results if not result.failed]
    height = TOP + ROW * len(variants) + BOTTOM

    def x(reward: float) -> float:
        return round(LEFT + reward * (WIDTH - LEFT - RIGHT), 1)

    bottom = TOP + ROW * len(variants)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<path d="M{x(tick)} {TOP}V{bottom}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x(tick)}" y="{bottom + 14}" text-anchor="middle" fill="#555555">{tick:g}</text>')
    if ended:
        before = x(fmean(result.before for result in ended))
        parts.append(f'<path d="M{before} {TOP}V{bottom}" stroke="#c8504b" stroke-dasharray="4 3"/>')
    for number, runs in enumerate(variants):
        middle = TOP + ROW * number + ROW / 2
        name = runs[0].variant if runs[0].group == "losses" else f"{runs[0].variant} ({runs[0].group.split()[0]})"
        parts.append(f'<text x="{LEFT - 10}" y="{middle + 4}" text-anchor="end">{html.escape(name)}</text>')
        parts += [
            f'<circle cx="{x(run.after)}" cy="{middle}" r="5" fill="#3b6fb6" fill-opacity="0.6"/>'
            for run in runs
            if not run.failed
        ]
    across = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{across}" y="{bottom + 29}" text-anchor="middle">held-out reward after</text>')
    return "\n".join([*parts, "</svg>", ""])
