"""Describe request bodies in the OpenAPI document, with the actions, features and limits of the service."""

import re
from typing import Any

from data.features.vocabulary import MOST_VALUES, KnownFeature
from data.reading.values import MAX_ID_LENGTH
from serving.http.bodies import EventsIn, ItemsIn, Limits, ListsIn, ModelIn, NamedListIn, ScoresIn, UsersIn
from serving.recommender import Recommender

NO_NUL = r"^[^\x00]*$"


def events_body(recommender: Recommender, most: int) -> dict[str, Any]:
    """Return the OpenAPI schema of the body of POST /events, with at most `most` events."""
    schema = _inlined(EventsIn.model_json_schema())
    schema["properties"]["events"]["maxItems"] = most
    event, actions = schema["properties"]["events"]["items"], recommender.actions
    event["properties"]["features"] = _features(recommender.contexts.known.of("events"))
    del event["properties"]["action"]
    if actions is not None:
        event["properties"]["action"] = {"enum": list(actions.texts)} if actions.texts is not None else {
            "type": "number", "minimum": 0, "maximum": (actions.count - 1) / actions.scale,
            "multipleOf": 1 / actions.scale,
        }  # fmt: skip
        event["required"].append("action")
    return _json_body(schema)


def items_body(recommender: Recommender, most: int) -> dict[str, Any]:
    """Return the OpenAPI schema of the body of POST /items, with at most `most` items."""
    schema, known = _inlined(ItemsIn.model_json_schema()), recommender.vocabulary.features
    schema["properties"]["items"]["maxItems"] = most
    values = {} if known is None else _values(known.of("items"))
    for vector in () if known is None else known.vectors:
        size = vector.values.shape[1]
        values[vector.name] = {"type": "array", "items": {"type": "number"}, "minItems": size, "maxItems": size}
    schema["properties"]["items"]["items"]["properties"]["features"] = {
        "type": "object", "properties": values, "additionalProperties": False, "minProperties": 1,
    }  # fmt: skip
    return _json_body(schema)


def users_body(recommender: Recommender, most: int) -> dict[str, Any]:
    """Return the OpenAPI schema of the body of POST /users, with at most `most` users."""
    schema = _inlined(UsersIn.model_json_schema())
    schema["properties"]["users"]["maxItems"] = most
    users = schema["properties"]["users"]["items"]
    users["properties"]["features"] = _features(recommender.contexts.known.of("users"))
    return _json_body(schema)


def _features(features: list[KnownFeature]) -> dict[str, Any]:
    """Return the JSON schema of the features of a user or an event; null means no value."""
    values = _values(features)
    for schema in values.values():
        schema["type"] = [*([kind] if isinstance(kind := schema["type"], str) else kind), "null"]
        if "items" in schema:
            schema["maxItems"] = MOST_VALUES
    return {"type": "object", "properties": values, "additionalProperties": False}


def _values(features: list[KnownFeature]) -> dict[str, dict[str, Any]]:
    """Return the JSON schemas of values by name of the feature."""
    text: dict[str, Any] = {"type": ["string", "integer", "boolean"], "maxLength": MAX_ID_LENGTH, "pattern": NO_NUL}
    kinds = {"category": text, "list": {"type": "array", "items": text}, "number": {"type": "number"}}
    return {one.name: dict(kinds[one.kind]) for one in features}


def pairs_schema(features: list[str], value: str) -> dict[str, Any]:
    """Return the JSON schema of query parameters `feature:value`; value: a pattern."""
    if not features:
        return {"maxItems": 0}
    return {"items": {"type": "string", "pattern": f"^({'|'.join(map(re.escape, features))}):{value}$"}}


def lists_body(limits: Limits, features: list[str]) -> dict[str, Any]:
    """Return the OpenAPI schema of the body of POST /recommendations; features: names of features for filters."""
    schema = _inlined(ListsIn.model_json_schema())
    for name in ("where", "at_most"):
        schema["properties"][name]["anyOf"][0]["propertyNames"] = {"enum": features}
        if not features:
            schema["properties"][name]["anyOf"][0] = {"type": "object", "maxProperties": 0}
    schema["properties"]["users"]["maxItems"], schema["properties"]["k"]["maximum"] = limits.users, limits.list
    return _json_body(schema)


def model_body() -> dict[str, Any]:
    """Return the OpenAPI schema of the body of POST /model."""
    return _json_body(_inlined(ModelIn.model_json_schema()))


def named_list_body() -> dict[str, Any]:
    """Return the OpenAPI schema of the body of PUT /filters/{name}."""
    return _json_body(_inlined(NamedListIn.model_json_schema()))


def scores_body(recommender: Recommender, most: int) -> dict[str, Any]:
    """Return the OpenAPI schema of the body of POST /scores, with at most `most` candidates."""
    schema = _inlined(ScoresIn.model_json_schema())
    schema["properties"]["features"] = _features(recommender.contexts.known_before(recommender.ranking))
    schema["properties"]["candidates"]["maxItems"] = most
    return _json_body(schema)


def _json_body(schema: dict) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(schema: dict) -> dict:
    """Return a JSON schema in which references are replaced by their definitions."""
    definitions = schema.pop("$defs", {})

    def inline(part: Any) -> Any:
        if isinstance(part, dict):
            if "$ref" in part:
                return inline(definitions[part["$ref"].rpartition("/")[2]])
            return {key: inline(value) for key, value in part.items()}
        return [inline(one) for one in part] if isinstance(part, list) else part

    return inline(schema)
