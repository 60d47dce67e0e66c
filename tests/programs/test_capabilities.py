"""Check that no other file compares the names or classes of attention kinds, tasks and heads."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.attention import ATTENTION
from models.attention.contract import AttentionKind
from models.heads import DotConfig, Head, MoLConfig
from models.tasks.build import TASKS
from models.tasks.contract import Task
from tests.programs.test_imports import FILES, MODULES

NAMES = {*ATTENTION, *TASKS, "dot", "mol"}
KINDS = (*ATTENTION.values(), *TASKS.values(), DotConfig, MoLConfig, AttentionKind, Task, Head)
# Class -> the module that may check for it: the module that defines it, or that of the task whose batches these are.
CLASSES = {cls.__name__: cls.__module__ for cls in KINDS}
CLASSES |= {"RankingBatch": "models.tasks.ranking", "RecallBatch": "models.tasks.recall"}


def faults(code: str, module: str = "") -> Iterator[str]:
    """Yield the comparisons with the name of a kind, and the checks of a class that another module defines."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            sides += [one for side in sides if isinstance(side, ast.Tuple | ast.List | ast.Set) for one in side.elts]
            named = {side.value for side in sides if isinstance(side, ast.Constant)} & NAMES
            compares_kind = any(
                isinstance(side, ast.Attribute | ast.Name) and ast.unparse(side).split(".")[-1] == "kind"
                for side in sides
            )
            if named and compares_kind:
                yield ast.unparse(node)
        elif isinstance(node, ast.match_case) and isinstance(node.pattern, ast.MatchValue):
            if isinstance(node.pattern.value, ast.Constant) and node.pattern.value.value in NAMES:
                yield f"case {ast.unparse(node.pattern)}"
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            names = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
            if any(CLASSES.get(name, module) != module for name in names):
                yield ast.unparse(node)


@pytest.mark.parametrize(
    "code",
    [
        "if config.task.kind == 'ranking': pass",
        "embedded = a or config.task.kind != 'retrieval'",
        "any(a.kind == 'htree' for a in config.model.attention)",
        "kind in ('dense', 'softmax')",
        "match c.kind:\n    case 'mol': pass",
        "isinstance(layer.attention, (SoftmaxAttention, DenseAttention))",
        "assert isinstance(batch, RankingBatch)",
        "isinstance(value, AttentionKind.Config)",
    ],
)
def test_the_check_sees(code):
    assert list(faults(code))


def test_the_check_allows():
    code = "work.kind == 'write'; isinstance(batch, RankingBatch); KINDS.class_of(config.task.kind); loss.kind == 'bce'"
    assert not list(faults(code, "models.tasks.ranking"))


def test_no_file_compares_kinds():
    of = {file: name for name, file in MODULES.items()}
    wrong = [
        f"{file.relative_to(Path(__file__).parents[2])}: {fault}"
        for file in FILES
        for fault in faults(file.read_text(), of[file])
    ]
    assert not wrong, wrong
