"""Words for types and defaults of keys."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from asyncrl.config.keys import default_words, known_keys, table_of, type_words
from asyncrl.config.load import validate_config
from asyncrl.config.section import Fraction, Positive, Seconds, Section


class Inner(Section):
    value: int = 1


class Outer(Section):
    plain: Inner = Inner()
    optional: Inner | None = None
    named: dict[str, Inner] = {}
    value: dict[str, Any] = {}
    date: str | None = Field(default=None, pattern=r"^\d+$")
    count: Positive = 3


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int, "integer"),
        (bool, "boolean"),
        (Positive, "integer > 0"),
        (Positive | None, "integer > 0"),
        (Fraction, "number 0 to 1"),
        (Annotated[float, Field(gt=0, le=1)], "number > 0 and <= 1"),
        (Annotated[str, Field(pattern="^a$")], "text matching `^a$`"),
        (Literal["a", "b", "c"], '"a", "b" or "c"'),
        (Positive | Literal["auto"], 'integer > 0 or "auto"'),
        (Literal["all"] | list[str], '"all" or list of text'),
        (tuple[Seconds, Seconds], "[number > 0, number > 0]"),
        (dict[str, Any], "table"),
        (dict[str, Seconds], "table of number > 0"),
    ],
)
def test_a_type_is_told_with_its_bounds(kind, words):
    assert type_words(kind) == words


def test_the_bounds_of_a_field_are_told():
    fields = Outer.model_fields
    assert type_words(fields["count"].annotation, fields["count"].metadata) == "integer > 0"
    assert type_words(fields["date"].annotation, fields["date"].metadata) == r"text matching `^\d+$`"


def test_a_type_without_words_is_an_error():
    with pytest.raises(KeyError):
        type_words(bytes)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "unset"),
        (True, "true"),
        ("a", '"a"'),
        ([1], "[1]"),
        ({}, "{}"),
        ({"a": {"b": 1.5}}, "{ a = { b = 1.5 } }"),
    ],
)
def test_a_default_is_told_as_toml(value, words):
    assert default_words(value) == words


def test_tables_are_told_from_values():
    assert {name: table_of(field) for name, field in Outer.model_fields.items()} == {
        "plain": (Inner, False),
        "optional": (Inner, False),
        "named": (Inner, True),
        "value": None,
        "date": None,
        "count": None,
    }


def test_keys_of_a_table_that_is_left_out_by_default_are_known():
    assert "learner.correction.reject.limit" in {key for key, *_ in known_keys()}
    with pytest.raises(Exception, match=r"learner\.correction\.reject\.limt: unknown key; did you mean limit\?"):
        validate_config({"learner": {"correction": {"reject": {"limt": 1.0}}}})
