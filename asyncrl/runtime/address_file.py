"""The file in which a controller says where it is, to its node agent and to its successor.

``{"address": ..., "incarnation": ..., "hosts": ..., "began": Unix time, "restarts": of the controller}`` in the run's
private folder. A reader sees a whole file, an older one or none.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

ADDRESS_FILE = "controller.json"


def read_address_file(path: Path) -> dict[str, Any]:
    """As an earlier incarnation left it; empty for the first one."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return found


def write_atomically(path: str, text: str) -> None:
    """Replace a file that nobody but its owner may read."""
    descriptor = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(path + ".new", path)
