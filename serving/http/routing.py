"""Match requests with routes, and return all errors in the same form."""

from typing import Any
from urllib.parse import unquote_to_bytes

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from data.explain import explain
from data.types import shown
from serving.errors import InvalidRequest, RequestError
from serving.http.limits import error_body, status_of


class EncodedRoute(APIRoute):
    """A route that matches the path before it is decoded, so that a parameter may contain a slash (%2F)."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.query_names = _query_names(self.dependant)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches({**scope, "path": scope["raw_path"].decode("latin-1")})
        for name, value in child.get("path_params", {}).items():
            child["path_params"][name] = unquote_to_bytes(value.encode("latin-1")).decode("utf-8", "surrogateescape")
        return match, child


def _query_names(dependant: Any) -> set[str]:
    """Return the names of the query parameters of a route and its dependencies."""
    names = {parameter.alias for parameter in dependant.query_params}
    return names.union(*map(_query_names, dependant.dependencies))


async def check_query(request: Request) -> None:
    """Raise InvalidRequest if the query has an unknown parameter or is not UTF-8.

    Starlette would ignore the parameter, and replace bytes that are not UTF-8.
    """
    try:
        unquote_to_bytes(request.scope["query_string"]).decode()
    except UnicodeDecodeError:
        raise InvalidRequest("the query is not UTF-8") from None
    names: set[str] = getattr(request.scope.get("route"), "query_names", set())
    if unknown := [name for name in request.query_params if name not in names]:
        expected = f"expected {', '.join(sorted(names))}" if names else "the route has no parameters"
        raise InvalidRequest(f"unknown query parameter {shown(unknown[0])}: {expected}")


def error_response(status: int, name: str, message: str, **headers: str) -> Response:
    """Return the response for an error."""
    if status == 503:
        headers["Retry-After"] = "1"
    return Response(error_body(name, message), status, headers, "application/json")


def answer_errors(app: FastAPI) -> None:
    """Register handlers that reply to all errors with the error's name and a message in one line."""

    @app.exception_handler(RequestError)
    async def refused(request: Request, fault: RequestError) -> Response:
        return error_response(status_of(fault), type(fault).__name__, str(fault))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, fault: RequestValidationError) -> Response:
        first = fault.errors()[0]
        if first["type"] == "json_invalid":
            return error_response(422, "InvalidRequest", f"the body is not JSON: {first['ctx']['error']}")
        # A union of types reports one error for each type; drop the types' names.
        place = [part for part in first["loc"][1:] if not _is_type(part)]
        if not place:
            return error_response(422, "InvalidRequest", "expected a JSON object as the body (/docs has the routes)")
        return error_response(422, "InvalidRequest", ascii(explain(first, lambda _: (), place))[1:-1])

    @app.exception_handler(HTTPException)
    async def other(request: Request, fault: HTTPException) -> Response:
        names = {404: "NotFound", 405: "MethodNotAllowed", 415: "UnsupportedMediaType"}
        headers = {}
        if fault.status_code == 405:  # list the methods of all routes of the path; Starlette lists one's
            routes = [route for route in app.routes if route.matches(request.scope)[0] != Match.NONE]
            headers["Allow"] = ", ".join(sorted({name for route in routes for name in getattr(route, "methods", ())}))
        name = names.get(fault.status_code, "HTTPError")
        return error_response(fault.status_code, name, str(fault.detail), **headers)

    @app.exception_handler(Exception)
    async def internal(request: Request, fault: Exception) -> Response:
        return error_response(500, "InternalError", "internal error; see the server log")


def _is_type(part: int | str) -> bool:
    return isinstance(part, str) and part.startswith(("int", "str", "float", "constrained", "function"))
