"""The page of the routes for a browser: one file, which reads the OpenAPI document of the service and nothing else."""

from pathlib import Path

API_PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
