"""The environment of the run without the secrets in it, for processes that play what a policy says. Pure.

By their names, for nothing else tells a secret. A program that needs one of its own reads it from a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

SECRET = re.compile(r".*(_API_KEY|_TOKEN|_PASSWORD|_SECRET.*)", re.IGNORECASE)


def without_secrets(inherited: Mapping[str, str], *names: str) -> dict[str, str]:
    """Variables but ``names`` and those that are called *_API_KEY, *_TOKEN, *_PASSWORD or *_SECRET*, in any case."""
    return {name: value for name, value in inherited.items() if name not in names and not SECRET.fullmatch(name)}
