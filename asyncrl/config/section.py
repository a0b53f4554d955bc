"""The base of every table of the configuration, and types of its values."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def expand_path(path: str | None) -> str | None:
    """Return the path with ``~``, ``~USER`` and environment variables (``$NAME``, ``${NAME}``) replaced.

    A variable that is not set stays as it is. A URL is returned unchanged.
    """
    if path is None or "://" in path:
        return path
    return os.path.expandvars(os.path.expanduser(path))


def _expand_given(path: str | None, info: ValidationInfo) -> str | None:
    return expand_path(path) if info.context == EXPAND_PATHS else path


EXPAND_PATHS = "expand paths"
"""Context of the validation of the user's TOML and flags.

Paths are expanded only in this context. A resolved configuration is read on other hosts and later, where variables may
differ.
"""
PathText = Annotated[str, AfterValidator(_expand_given)]
OptionalPath = Annotated[str | None, AfterValidator(_expand_given)]
"""A path on the hosts of the run, expanded once, where TOML and flags are read."""


class Section(BaseModel):
    """A table of the configuration: immutable, closed to unknown keys, documented by the docstring of each field.

    Strict: no value is converted, for example a number to text. Docstrings are read only when they are shown
    (keys.py): pydantic would parse the source of each table at the start of every process.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )
