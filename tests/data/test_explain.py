"""Test the line for each of pydantic's errors."""

from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from data.explain import OPTION, custom, dotted, explain


class Part(BaseModel):
    """A section of a configuration."""

    model_config = ConfigDict(extra="forbid", strict=True)

    size: int = Field(1, ge=1)
    mode: Literal["a", "b"] = "a"
    free: float | None = None

    @field_validator("free")
    @classmethod
    def _checked(cls, value):
        if value == 1:
            raise ValueError("one is taken")
        if value == 2:
            raise custom("size: two is taken", OPTION)
        return value


class Whole(BaseModel):
    """A configuration with all kinds of errors."""

    model_config = ConfigDict(extra="forbid", strict=True)

    part: Part


KEYS = {(): ["part"], ("part",): ["size", "mode", "free"]}


@pytest.mark.parametrize(
    ("tree", "line"),
    [
        ({}, "part: missing"),
        (3, "config: expected a mapping with keys like part, got 3"),
        ({"part": [1]}, "part: expected a mapping with keys like size, mode, free, got [1]"),
        ({"part": {"sise": 1}}, "part.sise: unknown key, did you mean size?"),
        ({"part": {"zzz": 1}}, "part.zzz: unknown key, known here: size, mode, free"),
        ({"part": {"size": "x"}}, "part.size: input should be a valid integer, got 'x'"),
        ({"part": {"size": 0}}, "part.size: input should be greater than or equal to 1, got 0"),
        ({"part": {"mode": "c"}}, "part.mode: input should be 'a' or 'b', got 'c'"),
        ({"part": {"free": 1.0}}, "part.free: one is taken"),
        ({"part": {"free": 2.0}}, "part.free.size: two is taken"),
        ({"part": {"a\nb": 1}}, r"part.a\nb: unknown key, known here: size, mode, free"),
    ],
)
def test_lines(tree, line):
    with pytest.raises(ValidationError) as error:
        Whole.model_validate(tree)
    (item,) = error.value.errors()
    assert explain(item, lambda place: KEYS[tuple(place)]) == line


def test_a_location_is_short_and_printable():
    assert dotted(["a", 0, "b"]) == "a.0.b" and len(dotted(["x" * 1000])) == 200
