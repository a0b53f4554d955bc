"""The base of every table of the configuration, and types of its values."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A table of the configuration: immutable, closed to unknown keys, documented by the docstring of each field.

    Strict: a number is no bool, and no text. Docstrings are read where they are shown (``keys``): pydantic would parse
    the source of each table at the start of every process.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )
