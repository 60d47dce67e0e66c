"""Define the API page for browsers: one file, which only reads the OpenAPI document of the service."""

from pathlib import Path

API_PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
