"""The files of the page, and one step of a run as a single page for a user to send.

A sent page is that of the server, with its scripts, its styles and the answers that it would ask for inside. Invariant:
the browser runs only these scripts (observe/pages.py), loads nothing, and takes the answers as data. Once the
answers have MOST_BYTES, further tokens are left out. Raises NotFound without recorded groups.
"""

from __future__ import annotations

from urllib.parse import urlencode

import msgspec

from asyncrl.observe.pages import UPLOT_SCRIPT, UPLOT_STYLE, policy, resource_text
from asyncrl.view.answers import Answer, Answers, NotFound

MOST_BYTES = 32 << 20
PAGE = "view/index.html"
HEAD = '<meta charset="utf-8">'
STYLES = {
    '<link rel="stylesheet" href="uplot.css">': UPLOT_STYLE,
    '<link rel="stylesheet" href="view.css">': "view/view.css",
}
SCRIPTS = {
    '<script src="uplot.js" defer></script>': UPLOT_SCRIPT,
    '<script src="view.js" defer></script>': "view/view.js",
}
"""The elements of the page that load a file, and the file of each."""
STEPS_ON_PAGE = 100
"""The count that view.js asks for."""


def step_page(answers: Answers, step: int) -> str:
    """Make the page of a step of the first run of ``answers``: the folder that the command names."""
    data: dict[str, Answer] = {}
    size = 0

    def add(name: str, **parameters: object) -> Answer:
        """Get an answer, and keep it under the URL by which the page asks for it."""
        nonlocal size
        texts = {key: str(value) for key, value in sorted(parameters.items())}
        found = answers.answer(name, texts)
        data[f"{name}?{urlencode(texts)}"] = found
        size += len(msgspec.json.encode(found))
        return found

    add("runs")
    newest = answers.answer("steps", {"until": str(step), "count": "1"})["steps"]
    # Step 0, before training, has groups and no line in metrics.jsonl.
    steps = [each for each in newest if each["step"] == step] or [{"step": step}]
    data[f"steps?count={STEPS_ON_PAGE}"] = {"steps": steps, "before": 0, "count": 1}
    groups = add("groups", step=step)["groups"]
    if not groups:
        raise NotFound(f"step {step} has no recorded groups")
    for summary in (each for group in groups for each in group["trajectories"]):
        place = {"step": step, "uid": summary["uid"], "sample": summary["sample"]}
        for sequence, each in enumerate(add("trajectory", **place)["sequences"]):
            start = 0
            while start < each["tokens"] and size < MOST_BYTES:
                page = add("tokens", **place, sequence=sequence, start=start)
                # An answer without tokens, as for damaged spans, ends the loop.
                start += len(page["tokens"]) or each["tokens"]
    return _page(data)


def _page(data: dict[str, Answer]) -> str:
    """Put styles, scripts and ``data`` (answers by URL) into the page of the server."""
    styles, scripts = ({old: resource_text(name) for old, name in part.items()} for part in (STYLES, SCRIPTS))
    # "<" could end the element that holds the data.
    answers = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    first_script = next(iter(SCRIPTS))
    page = resource_text(PAGE)
    for old, new in (
        (HEAD, f"{HEAD}\n{policy([*scripts.values()], [*styles.values()])}"),
        (first_script, f'<script type="application/json" id="data">{answers}</script>\n{first_script}'),
        *((old, f"<style>{text}</style>") for old, text in styles.items()),
        *((old, f"<script>{text}</script>") for old, text in scripts.items()),
    ):
        before, found, after = page.partition(old)
        assert found, old
        page = before + new + after
    return page
