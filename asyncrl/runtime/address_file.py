"""The file in which a controller says where it is, to its node agent and to its successor.

``{"address": ..., "incarnation": ..., "hosts": ..., "began": Unix time}`` in the run's private folder. A reader sees a
whole file, an older one or none.
"""

from __future__ import annotations

import json
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
