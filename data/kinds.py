"""Find the class that an option `kind` names: one of the project's, or one of another package, `my_module:MyClass`."""

import functools
from importlib import import_module
from typing import Any, Generic, Literal, TypeVar

from pydantic import ValidationError, create_model

from data.explain import WHOLE, custom
from data.options import Options
from data.types import shown

Base = TypeVar("Base")


class Kinds(Generic[Base]):
    """The classes that the option `kind` of a mapping names; each has a class of options, `Config`.

    key    the mapping in a run's configuration: model.attention
    noun   what a kind is called in messages: attention kind
    base   the class from which all of them derive
    known  the project's classes by name
    """

    def __init__(self, key: str, noun: str, base: type[Base], known: dict[str, type[Base]]):
        self.key, self.noun, self.base, self.known = key, noun, base, known

    def class_of(self, name: str) -> type[Base]:
        """Return the class with this name, or at this path, `module:Class`.

        Raises:
            ValueError: there is no such class, in one line.
            ImportError: the module is there, but importing it failed.
        """
        return self.known[name] if name in self.known else self._class_at(name)

    def config_of(self, name: str) -> type[Any]:
        """Return the `Config` of the class with this name; for an outside class, `kind` is its path.

        Raises:
            ValueError, ImportError: as `class_of`.
        """
        config = self.class_of(name).Config  # type: ignore[attr-defined]
        return config if name in self.known else _named(name, config)

    def read(self, value: Any) -> Any:
        """Read a mapping as the options of the kind that it names; a validator of pydantic."""
        if isinstance(value, self.base.Config):  # type: ignore[attr-defined]
            return value
        if not isinstance(value, dict):
            raise ValueError(f"expected a mapping with a kind, got {value!r}")
        if "kind" not in value:
            raise located([(("kind",), "missing, one of " + ", ".join(self.known))], WHOLE)
        try:
            config = self.config_of(str(value["kind"]))
        except ValueError as error:
            raise located([(("kind",), str(error))], WHOLE) from None
        return config.model_validate(value)

    def _class_at(self, path: str) -> type[Base]:
        module, _, name = path.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), name)):
            known, example = ", ".join(self.known), f"my_module:My{self.base.__name__.removesuffix('Kind')}"
            raise ValueError(f"unknown {self.noun} {shown(path)}, known: {known}, or a path like {example}")
        try:
            loaded = import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise ImportError(f"{self.key}.kind: importing {module} failed: {error}") from error
            raise ValueError(
                f"{shown(path)}: no module {shown(error.name)}; its folder must be in PYTHONPATH"
            ) from None
        except Exception as error:  # any type, because a ValueError would look like a fault of the configuration
            raise ImportError(f"{self.key}.kind: importing {module} failed: {error!r}") from error
        named = getattr(loaded, name, None)
        if not isinstance(named, type):
            raise ValueError(f"{shown(path)}: module {shown(module)} has no class {shown(name)}")
        base, config = self.base, self.base.Config  # type: ignore[attr-defined]
        for noun, value, parent in (("class", named, base), ("Config", getattr(named, "Config", None), config)):
            if not isinstance(value, type) or not issubclass(value, parent):
                raise ValueError(
                    f"{shown(path)}: its {noun} does not derive from {parent.__qualname__} ({base.__module__})"
                )
        return named


@functools.cache  # so that two configurations of one kind are equal
def _named(path: str, config: type[Options]) -> type[Options]:
    """Return the options with `path` as the value of `kind`, overriding the class's own declaration."""
    return create_model(config.__name__, __base__=config, kind=(Literal[path], ...))  # type: ignore[arg-type]


def located(faults: list[tuple[tuple, str]], how: str) -> ValidationError:
    """Build an error from (location, message) pairs; pydantic prefixes the location of the validator that raises it."""
    return ValidationError.from_exception_data(
        "config", [{"type": custom(message, how), "loc": place, "input": None} for place, message in faults]
    )
