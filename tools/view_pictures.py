"""``python -m tools.view_pictures RUN`` draws docs/figures/view*.png: asyncrl-view over a run folder.

    python -m tools.learn tool-lookup --learner.steps 12
    python -m tools.view_pictures runs/tool-lookup

The pictures show the newest step that has a trained group with different rewards, and a long trajectory of it. They
need Chromium. Fails with RuntimeError without it, without such a group, or if a picture is larger than MOST_BYTES.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools import kept

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PICTURES: dict[str, dict[str, str]] = {"view": {}, "view-tokens": {"view": "tokens", "colour": "entropy"}}
"""By name of the picture, what the URL asks for besides the trajectory."""
SIZE = (1200, 520)
MOST_BYTES = 150_000
DRAWS_MS = 5000
"""Time of the page (ms), which the browser lets pass at once, until the picture is taken."""
WAIT_S = 60.0


def ask(url: str, name: str, **parameters: object) -> Any:
    """An answer of asyncrl-view at ``url``."""
    with urllib.request.urlopen(f"{url}api/{name}?{urllib.parse.urlencode(parameters)}", timeout=WAIT_S) as answer:
        return json.load(answer)


def shown_place(url: str) -> dict[str, str]:
    """The step, group and trajectory that the pictures show. Raises RuntimeError."""
    for step in (each["step"] for each in ask(url, "steps")["steps"]):
        for group in ask(url, "groups", step=step)["groups"]:
            rewards = {each["reward"] for each in group["trajectories"]}
            if group["kind"] == "trained" and len(rewards) > 1:
                chosen = max(group["trajectories"], key=lambda each: (each["turns"], each["surprise"] or 0.0))
                return {"step": str(step), "uid": group["uid"], "sample": str(chosen["sample"])}
    raise RuntimeError("no trained group of the newest steps has different rewards")


def take(browser: str, url: str, path: Path) -> None:
    """Take a picture of a page. Raises RuntimeError, CalledProcessError or TimeoutExpired."""
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
    size, budget = f"--window-size={SIZE[0]},{SIZE[1]}", f"--virtual-time-budget={DRAWS_MS}"
    command = [browser, *options, size, budget, f"--screenshot={path}", url]
    subprocess.run(command, capture_output=True, timeout=WAIT_S, check=True)
    if path.stat().st_size > MOST_BYTES:
        raise RuntimeError(f"{path} has {path.stat().st_size} bytes; {MOST_BYTES} are allowed")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.view_pictures", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a run that has ended")
    given = parser.parse_args(argv)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise RuntimeError(f"none of {', '.join(BROWSERS)} is installed")
    with subprocess.Popen(
        [sys.executable, "-m", "asyncrl.cli.view", given.run], stdout=subprocess.PIPE, text=True
    ) as view:
        try:
            assert view.stdout is not None
            url = view.stdout.readline().strip()
            place = shown_place(url)
            for name, more in PICTURES.items():
                take(browser, f"{url}#{urllib.parse.urlencode(place | more)}", FIGURES / f"{name}.png")
        finally:
            view.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(kept.run(main))
