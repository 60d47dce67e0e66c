"""Check the code's language: names say what a value is, and docstrings can be read by themselves.

tests/programs/test_docs.py checks that no sentence begins with "Of".
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("cli", "data", "evaluation", "experiments", "hstu_sparse", "models", "serving", "training")
FOLDERS = ("benchmarks", "examples", "tests", "tools", *PRODUCT)
FILES = [*sorted(ROOT.glob("*.py")), *(file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")))]
PUBLIC = [file for file in FILES if file.relative_to(ROOT).parts[0] in PRODUCT]
# Names that say how a value was obtained instead of what it is.
VAGUE = (
    "ask",
    "asked",
    "asks",
    "found",
    "given",
    "held",
    "here",
    "kept",
    "made",
    "met",
    "own",
    "said",
    "there",
    "those",
    "told",
    "wanted",
)
# A bound name is followed by a symbol or `in`, a word of a comment mostly by another word: such files are not parsed.
WORD = re.compile(rf"\b(?:{'|'.join(VAGUE)})\b(?! (?!in\b)[a-z]|[.'\"`])")
# Names that have to be decoded.
BARRED = re.compile(r"_*(?:mine|of_\w+)")
DOCSTRING = r'(?:\A|:(?: +#.*)?\n) *"""'
# Words that begin a fragment, which is understood only together with the code.
FRAGMENT = re.compile(DOCSTRING + r"((?:of|as|what|which|where|how|those|that|the same|by)\b.{0,40})", re.I)
# A symbol or a lower-case name. Ruff checks the rest: functions and classes have docstrings (D101, D103), and those of
# functions begin with an imperative (D401).
ODD_BEGINNING = re.compile(DOCSTRING + r"([^A-Z\\].{0,40})")
# An entry of a list of arguments, or the rest of one, which is indented further.
ENTRY = re.compile(r"    (?:    |[\w*`]+(?:, [\w*`]+)*:|The others:)")


def bound_names(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of the variables, arguments, attributes, functions and classes that a file defines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def vague_names(text: str) -> Iterator[str]:
    """Yield the vague names that a file defines."""
    if WORD.search(text):
        yield from (f"line {line}: {name}" for line, name in bound_names(text) if name in VAGUE)


def barred_names(text: str) -> Iterator[str]:
    """Yield the barred names that a file defines."""
    if re.search(r"\b_*(?:mine|of_)", text):
        yield from (f"line {line}: {name}" for line, name in bound_names(text) if BARRED.fullmatch(name))


def broken_entries(text: str) -> Iterator[str]:
    """Yield the lines of docstrings that the site would show as an argument, though they do not begin with a name."""
    sections = ("Args:", "Attributes:")
    for node in ast.walk(ast.parse(text if any(section in text for section in sections) else "")):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        section = ""
        for line in (ast.get_docstring(node) or "").splitlines():
            if not line.startswith(" "):
                section = line
            elif section in sections and not ENTRY.match(line):
                yield f"{node.name}: {line.strip()}"


def check(files: list[Path], faults) -> None:
    """Assert that `faults` yields nothing for the text of any file."""
    wrong = [f"{file.relative_to(ROOT)} {fault}" for file in files for fault in faults(file.read_text())]
    assert not wrong, "\n".join(wrong)


def test_names_say_what_a_value_is():
    check(FILES, vague_names)


def test_names_need_no_decoding():
    check(FILES, barred_names)


def test_docstrings_are_not_fragments():
    check(FILES, lambda text: (fragment[1] for fragment in FRAGMENT.finditer(text)))


def test_docstrings_begin_with_a_verb_or_a_name():
    check(FILES, lambda text: (beginning[1] for beginning in ODD_BEGINNING.finditer(text)))


def test_lists_of_arguments_can_be_read():
    check(PUBLIC, broken_entries)


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        (broken_entries, 'def f(x):\n    """Compute.\n\n    Args:\n        x: a number,\n        or None.\n    """'),
        (vague_names, "found = 1"),
        (vague_names, "for own in range(3): pass"),
        (vague_names, "def f(kept): pass"),
        (vague_names, "class A:\n    def f(self):\n        self.asked = 1"),
        (barred_names, "of_items = 1"),
        (barred_names, "def mine(): pass"),
        (ODD_BEGINNING.finditer, 'def f():\n    """[T, H, D]."""'),
        (FRAGMENT.finditer, 'def f():\n    """What is left behind."""'),
    ],
)
def test_the_checks_find_what_is_wrong(faults, text):
    assert list(faults(text))
