"""The files of the page, and one step of a run as a single page that needs nothing else, to be sent.

A sent page is that of the server, with its script, its style and the answers that it would ask for inside. Invariant:
the browser runs only the script whose digest is in the page's security policy, loads nothing, and takes the answers as
data. Tokens beyond MOST_BYTES are left out. Raises NotFound without recorded groups.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from urllib.parse import urlencode

import msgspec

from asyncrl.view.answers import Answer, Answers, NotFound

MOST_BYTES = 32 << 20
POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'"
HEAD = '<meta charset="utf-8">'
STYLE = '<link rel="stylesheet" href="view.css">'
SCRIPT = '<script src="view.js" defer></script>'
STEPS_ON_PAGE = 100
"""The count that view.js asks for."""


def resource_text(name: str) -> str:
    """The text of a file in this folder."""
    return (files("asyncrl.view") / name).read_text("utf-8")


def step_page(answers: Answers, step: int) -> str:
    """Make the page of a step of the first run."""
    data: dict[str, Answer] = {}
    size = 0

    def add(name: str, **parameters: object) -> Answer:
        nonlocal size
        texts = {key: str(value) for key, value in sorted(parameters.items())}
        found = answers.answer(name, texts)
        data[f"{name}?{urlencode(texts)}"] = found
        size += len(msgspec.json.encode(found))
        return found

    add("runs")
    newest = answers.answer("steps", {"until": str(step), "count": "1"})["steps"]
    # Step 0, before training, has groups and no numbers.
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
                start += len(page["tokens"]) or each["tokens"]
    return _page(data)


def _page(data: dict[str, Answer]) -> str:
    script, style = resource_text("view.js"), resource_text("view.css")
    policy = f"{POLICY}; script-src {_digest(script)}; style-src {_digest(style)}"
    # "<" could end the element that holds the data.
    answers = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    page = resource_text("index.html")
    for old, new in (
        (HEAD, f'{HEAD}\n<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        (STYLE, f"<style>{style}</style>"),
        (SCRIPT, f'<script type="application/json" id="data">{answers}</script>\n<script>{script}</script>'),
    ):
        before, found, after = page.partition(old)
        assert found, old
        page = before + new + after
    return page


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
