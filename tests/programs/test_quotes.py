"""Check that what the pages quote exists: messages, replies, routes and names that the code prints or defines."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

from tests.programs.test_docs import PAGES, ROOT, SPAN
from tests.programs.test_plain_english import PRODUCT

FOLDERS = ("benchmarks", "tools", *PRODUCT)
MESSAGES = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# A value within a message: a quoted text, a path or number, or a word before a sign.
VALUE = re.compile(r"'[^']*'|[\w/*-]*[\d./_][\w./*-]*\w|\w+(?=[:,;)?]|$)")
# A text that looks like a message but is quoted outside of a block `text`, where nothing would check it.
UNMARKED = re.compile(r"expected .*\bgot\b|did you mean|\w: (?:no|not|cannot|unknown) ")
ROUTE = re.compile(r"(GET|POST|PUT|DELETE) (/[\w/{}.]*)")
NAME = re.compile(r"(?!test_)[A-Za-z_]\w*|(?!make )[a-z]+(?: [a-z]+)+")
KEY = re.compile(r'"(\w+)"')
# Names of other programs and of tests, and ids, names and values of examples.
FOREIGN = {"AWS_PROFILE", "AWS_ENDPOINT_URL", "GOOGLE_APPLICATION_CREDENTIALS", "AZURE_STORAGE_CONNECTION_STRING"}
FOREIGN |= {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "hey", "VERSIONS", "user item"}
FOREIGN |= {"c23", "s8", "s100", "buy", "device", "phone", "country", "de", "brand", "acme", "tv"}


class Source(NamedTuple):
    """Constant texts of the code (of an f-string each part between values), and all of its names."""

    texts: set[str]
    names: set[str]


@cache
def source() -> Source:
    """Parse the product, the programs and the benchmarks."""
    texts, names = set(), set()
    for file in [*ROOT.glob("*.py"), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))]:
        names |= {file.stem, *file.relative_to(ROOT).parts[:-1]}
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
            elif isinstance(node, ast.Name | ast.Attribute | ast.arg | ast.keyword | ast.FunctionDef | ast.ClassDef):
                names |= {getattr(node, field, None) or "" for field in ("id", "attr", "arg", "name")}
            elif isinstance(node, ast.alias):
                names |= set(node.name.split("."))
    names |= {word for text in texts for word in re.findall(r"\w+", text)}
    return Source(texts, names)


@cache
def pieces() -> dict[str, list[str]]:
    """Map a first character to the constant texts that may be parts of a message: words, or signs between values."""
    by_first: dict[str, list[str]] = {}
    for text in source().texts:
        if re.search(r"[A-Za-z]{3}", text) or re.fullmatch(r"[^\w\s]+ ?| [^\w\s]+", text):
            by_first.setdefault(text[0], []).append(text)
    return by_first


def is_printed(line: str) -> bool:
    """Return whether a line consists of constant texts of the code and, between them, values."""
    # Positions up to which the line is explained, and whether a value ends there: two values do not follow each other.
    reached = {(0, False)}
    for start in range(len(line)):
        if (start, False) in reached and (value := VALUE.match(line, start)):
            reached.add((value.end(), True))
        if {(start, False), (start, True)} & reached:
            parts = pieces().get(line[start], ())
            reached |= {(start + len(part), False) for part in parts if line.startswith(part, start)}
    return bool({(len(line), False), (len(line), True)} & reached)


@cache
def routes() -> set[str]:
    """Return the routes of the service, as `GET /health`, with {} for each parameter."""
    text = (ROOT / "serving/http/app.py").read_text()
    declared = re.findall(r'@app\.(get|post|put|delete)\("([^"]+)"', text)
    defined = {f"{method.upper()} {re.sub(r'{[^}]*}', '{}', path)}" for method, path in declared}
    return defined | {"GET /openapi.json"}  # FastAPI's


def faults(text: str) -> Iterator[str]:
    """Yield what a page quotes and the code neither prints nor defines."""
    for block in MESSAGES.findall(text):
        yield from (f"message {line}" for line in block.splitlines() if not is_printed(line))
    rest = FENCE.sub("", text)
    for line in rest.splitlines():
        if line.startswith("    ") and UNMARKED.search(line):
            yield f"message in no block `text`: {line}"
    for span in SPAN.findall(rest):
        if route := ROUTE.match(span):
            if f"{route[1]} {re.sub(r'{[^}]*}|(?<=/users/)[a-z]+$', '{}', route[2])}" not in routes():
                yield f"route {span}"
        elif UNMARKED.search(span):
            yield f"message in no block `text`: {span}"
        words = KEY.findall(span) if span.startswith(("{", '"')) else [span] if NAME.fullmatch(span) else []
        for word in set(words) - FOREIGN:
            if not (word in source().names or word in source().texts or is_metric(word)):
                yield f"name {word}"


def is_metric(name: str) -> bool:
    """Return whether the service's /metrics can have a series of that name."""
    series = re.fullmatch(r"hstu_sparse_(?:store_)?(\w+?)(?:_total|_sum|_count|_bucket)?", name)
    return bool(series) and (series[1] in source().texts or series[1] in source().names)


# CONTRIBUTING.md names tests and what they define, which run.
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_what_a_page_quotes_exists(page):
    assert not (wrong := list(faults(page.read_text(encoding="utf-8")))), wrong


@pytest.mark.parametrize(
    "text",
    [
        "```text\nu.data line 17, column timestamp: expected a number that is whole, got 'abc'\n```\n",
        "```text\nno file of that sort\n```\n",
        "    u.data line 17, column timestamp: expected an integer, got 'abc'\n",
        "the error `no column 'item', did you mean sku?`",
        "`POST /evens`",
        "`GET /users/{user}/history`",
        "its state is `unknwon item`",
        'the reply has `{"lists": [{"usr"}]}`',
        "`hstu_sparse_store_bytes_a_user`",
        "the key `imbalence` of metrics.jsonl",
    ],
)
def test_the_check_finds_what_does_not_exist(text):
    assert list(faults(text))
