"""Format pydantic's errors as one line each: the option, the expected value and the given one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from pydantic_core import ErrorDetails, PydanticCustomError

from data.types import did_you_mean, shown

# Types of errors of the project's validators: WHOLE is printed as `place: message`, OPTION as `place.message`.
WHOLE, OPTION = "whole", "option"


def custom(message: str, how: str = WHOLE) -> PydanticCustomError:
    """Return an error with this message; how: its type, WHOLE or OPTION."""
    return PydanticCustomError(how, "{message}", {"message": message})


def dotted(place: Sequence[int | str]) -> str:
    """Format a location, such as `model.attention.0.block_size`."""
    return shown(".".join(map(str, place)), 200)


def explain(
    item: ErrorDetails,
    keys: Callable[[Sequence[int | str]], Collection[str]],
    place: Sequence[int | str] | None = None,
    top: str = "config",
) -> str:
    """Format a pydantic error in one line: `model.attention.blok_size: unknown key, did you mean block_size?`

    keys: location -> the valid keys of the mapping there, or none. place: the location to print, by default pydantic's.
    top: the text to print for an empty location.
    """
    place, kind = list(item["loc"] if place is None else place), item["type"]
    where = dotted(place) or top
    if kind == "extra_forbidden":
        hint = did_you_mean(place[-1], valid := keys(place[:-1])) or (
            f", known here: {', '.join(valid)}" if valid else ""
        )
        return f"{where}: unknown key{hint}"
    if kind == "union_tag_not_found":
        return f"{where}.kind: missing"
    if kind == "union_tag_invalid":
        return f"{where}.kind: {shown(item['ctx']['tag'], 200)} is none of {item['ctx']['expected_tags']}"
    if kind == "missing":
        return f"{where}: missing"
    if kind in (WHOLE, OPTION):
        return f"{where}{': ' if kind == WHOLE else '.'}{item['msg']}"
    if kind == "value_error":
        return f"{where}: {item['ctx']['error']}"
    value = shown(repr(item["input"]), 200)
    if kind in ("model_type", "model_attributes_type") and (examples := list(keys(place))[:4]):
        return f"{where}: expected a mapping with keys like {', '.join(examples)}, got {value}"
    return f"{where}: {item['msg'][0].lower()}{item['msg'][1:]}, got {value}"
