"""Environments of other packages than ours, made on demand under .bench: peers are never dependencies of asyncrl.

An environment is complete once its mark holds what was asked for; one that was left half made is made again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".bench"


def environment(name: str, requirements: Sequence[str]) -> Path:
    """The interpreter with these packages, made at the first use. Raises CalledProcessError if one is not installed."""
    folder = FOLDER / name
    python, mark = folder / "bin" / "python", folder / ".complete"
    wanted = "\n".join(requirements)
    if not mark.exists() or mark.read_text() != wanted:
        print(f"making {folder} with {', '.join(requirements)}", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements],
            check=True,
            stdout=sys.stderr,
            env=without_python_settings(),
        )
        mark.write_text(wanted)
    return python


def without_python_settings() -> dict[str, str]:
    """The variables of this process, for an interpreter of another environment."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
