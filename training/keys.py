"""List the keys of a configuration from its classes, for `train.py --keys` and the site's reference."""

from __future__ import annotations

import re
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from data.errors import ConfigError
from data.kinds import Kinds
from data.types import did_you_mean
from models.attention import ATTENTION_KINDS
from models.tasks.build import TASK_KINDS
from training.config import RunConfig

OPEN: dict[str, Kinds] = {kinds.key: kinds for kinds in (ATTENTION_KINDS, TASK_KINDS)}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


class Key(NamedTuple):
    """A key of the configuration; name: dotted; default: as YAML, `absent` or `required`."""

    name: str
    type: str
    default: str
    meaning: str


class Section(NamedTuple):
    """The keys of a mapping; title: its path, with the kind if there are several; meaning: its description."""

    title: str
    meaning: str
    keys: list[Key]


def sections(config: type[BaseModel] = RunConfig, prefix: str = "", title: str = "") -> Iterator[Section]:
    """Yield the section of a configuration class, then those of all nested classes."""
    fields = {field.alias or name: field for name, field in config.model_fields.items()}
    keys = [
        Key(
            prefix + name,
            _type(field.annotation, field),
            _default(field, prefix + name),
            " ".join((field.description or "").split()),
        )
        for name, field in fields.items()
    ]
    yield Section(title or prefix.rstrip(".") or "Run", " ".join((config.__doc__ or "").split()), keys)
    for name, field in fields.items():
        if prefix + name in OPEN:
            yield from _kinds(OPEN[prefix + name])
            continue
        inner, path = _mappings(field.annotation)
        for inner_config in inner:
            where = f"{prefix}{name}{path}"
            kinds = typing.get_args(inner_config.model_fields["kind"].annotation) if len(inner) > 1 else ()
            yield from sections(inner_config, f"{where}.", f"{where}, kind {kinds[0]}" if kinds else where)


def _kinds(kinds: Kinds) -> Iterator[Section]:
    """Yield the sections of each kind; the first of a kind has the docstring of the kind's class as its meaning."""
    for name, kind in kinds.known.items():
        first, *others = sections(kind.Config, f"{kinds.key}.", f"{kinds.key}, kind {name}")
        yield first._replace(meaning=" ".join((kind.__doc__ or "").split()))
        yield from others


def _mappings(annotation: Any) -> tuple[list[type[BaseModel]], str]:
    """Return the configuration classes in an annotation, and the suffix of their keys: `.NAME` for a mapping of names,
    `.0` for a list, or nothing.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], ""
    if origin is Annotated:
        return _mappings(arguments[0])
    configs: list[type[BaseModel]] = []
    path = ""
    for argument in arguments:
        if argument is not str:
            inner, path_inside = _mappings(argument)
            configs, path = configs + inner, path or path_inside
    return configs, {dict: ".NAME", list: ".0"}.get(origin, "") + path if configs else ""


def _type(annotation: Any, field: FieldInfo | None = None) -> str:
    """Describe the YAML type of an annotation, with the bounds of the field."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    bounds = [
        f"{word} {value:,}" if isinstance(value, int) else f"{word} {value:g}"
        for part in (field.metadata if field else ())
        for name, word in BOUNDS.items()
        if (value := getattr(part, name, None)) is not None and value < 2**63
    ]
    if origin is Annotated:
        text = _type(arguments[0])
    elif origin is Literal:
        text = " | ".join("false" if value is False else str(value) for value in arguments)
    elif origin in (Union, types.UnionType):
        text = " | ".join(dict.fromkeys(_type(one) for one in arguments if one is not types.NoneType))
    elif origin in (list, tuple):
        text = f"list of {_type(arguments[0])}"
    elif origin is dict:
        text = f"mapping of names to {_type(arguments[1])}"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        text = "mapping"
    else:
        text = {int: "integer", float: "number", bool: "true | false", str: "text"}.get(annotation, "mapping")
    return ", ".join([text, *bounds])


def _default(field: FieldInfo, name: str) -> str:
    """Format a default as YAML; `absent` if it is None, `required` if there is none."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        several = name in OPEN or len(_mappings(field.annotation)[0]) > 1
        return f"kind: {value.model_dump()['kind']}" if several else "{}"
    if value is None:
        return "absent"
    if isinstance(value, tuple):
        value = list(value)
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def as_text(prefix: str, width: int) -> str:
    """Format the keys that begin with `prefix` for a terminal; ConfigError if there is none."""
    lines, names = [], set()
    for section in sections():
        keys = [key for key in section.keys if key.name.startswith(prefix)]
        names |= {key.name for key in section.keys}
        if keys:
            lines += ["", section.title]
        for key in keys:
            lines += [f"  {key.name}: {key.default}   ({key.type})"]
            lines += textwrap.wrap(key.meaning, width, initial_indent="      ", subsequent_indent="      ")
    if not lines:
        raise ConfigError(f"--keys {prefix}: no key begins with this{did_you_mean(prefix, names)}")
    return "\n".join(lines[1:])


def as_markdown() -> str:
    """Format all keys as the configuration reference: a heading and a table for each mapping."""
    lines = []
    for section in sections():
        lines += [
            f"## {section.title}",
            "",
            _linked(section.meaning),
            "",
            "| key | default | meaning |",
            "| --- | --- | --- |",
        ]
        for key in section.keys:
            kind, default = (text.replace("|", "\\|") for text in (key.type, key.default))
            lines.append(f"| `{key.name}` | `{default}` | {_linked(key.meaning)} *{kind}* |")
        lines.append("")
    return "\n".join(lines)


def _linked(text: str) -> str:
    """Replace names of documentation pages by links."""
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text)
