"""Read configuration files: limit their size, and parse them as a strict form of YAML."""

import difflib
import errno
import os
import re
import stat
from pathlib import Path

import yaml

from data.errors import ConfigError
from data.types import shown

# Larger than any configuration, and small enough for the parser.
MOST_BYTES, MOST_NODES, DEEPEST = 1_000_000, 10_000, 30
SHIPPED = {file.stem: file for file in (Path(__file__).resolve().parents[1] / "configs").glob("*.yaml")}


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with numbers of YAML 1.2: `1e-3` is a number; `1:30`, `010` and `0b10` are text.

    These are errors: a repeated key, a key that is a list or a mapping, a tag, deep nesting, a value that contains
    itself, and an invalid number or date such as 2024-13-01.
    """

    depth = 0

    def compose_node(self, parent, index):
        event = self.peek_event()
        if getattr(event, "tag", None) is not None:
            raise yaml.constructor.ConstructorError(
                None, None, f"tags like {event.tag} are not allowed", event.start_mark
            )
        self.depth += 1
        if self.depth > DEEPEST:
            raise yaml.constructor.ConstructorError(None, None, "nested too deeply", event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def get_single_data(self):
        node = self.get_single_node()
        if node is None:
            return None
        if self._size(node, {}) > MOST_NODES:
            raise yaml.constructor.ConstructorError(None, None, "too many values", node.start_mark)
        return self.construct_document(node)

    def _size(self, node, sizes: dict) -> int:
        """Count the values in the node, with its aliases expanded."""
        if node in sizes:
            if sizes[node] is None:
                raise yaml.constructor.ConstructorError(None, None, "a value that contains itself", node.start_mark)
            return sizes[node]
        sizes[node] = None
        children = () if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
        sizes[node] = 1 + sum(self._size(child, sizes) for child in children)
        return sizes[node]

    def construct_mapping(self, node, deep=False):
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key.start_mark)
        keys = [key.value for key, _ in node.value]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"key given twice: {', '.join(twice)}", node.start_mark)
        return super().construct_mapping(node, deep)

    def construct_scalar_of(self, node):
        """Parse a number or date with SafeLoader, and add the line number to its errors."""
        try:
            return yaml.SafeLoader.yaml_constructors[node.tag](self, node)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None


for _kind in ("int", "float", "timestamp"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_scalar_of)
# Numbers as in YAML 1.2: text such as 1:30 (90 in YAML 1.1), 010 (8) and 0b10 (2) remains text.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":int", ":float"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _pattern in {
    "int": r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)",
    "float": r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})$"), list("-+.0123456789"))


def parse_yaml(text: str, where: str):
    """Parse `text` as YAML; if it is invalid, ConfigError has one line with the line number.

    Examples:
        >>> parse_yaml("lr: 1e-3", "run.yaml")
        {'lr': 0.001}
        >>> parse_yaml("lr: [1", "run.yaml")
        Traceback (most recent call last):
        data.errors.ConfigError: run.yaml line 1: expected ',' or ']', but got '<stream end>'
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(f"{where}{place}: {reason}") from None


def read_config(path: Path) -> str:
    """Read the text of a configuration; ConfigError unless it is a regular file of at most MOST_BYTES bytes."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device may never end
            raise ConfigError(f"{shown(path, 200)}: expected a regular file")
        if status.st_size > MOST_BYTES:
            raise ConfigError(
                f"{shown(path, 200)}: expected a configuration of at most {MOST_BYTES:,} bytes, got {status.st_size:,}"
            )
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        near = difflib.get_close_matches(path.stem if path.suffix == ".yaml" else path.name, SHIPPED, 1)
        hint = f", did you mean {os.path.relpath(SHIPPED[near[0]])}?" if near else ""
        raise ConfigError(f"{shown(path, 200)}: {error.strerror}{hint}") from None
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        raise ConfigError(f"{shown(path, 200)}: {getattr(error, 'strerror', None) or error}") from None
