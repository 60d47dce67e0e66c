"""Kernels and host functions take few arguments: what belongs together is a named tuple
(docs/learned.md).
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import hstu_sparse

FOLDER = Path(__file__).parents[2] / "hstu_sparse"
MOST = 20  # besides compile-time constants
MOST_OF_HOST = 10  # of a host function that is neither public nor a public function's reference
PUBLIC_IN_COMPAT = {"unpacked_attention"}


@functools.cache
def definitions() -> list[tuple[Path, ast.AST]]:
    """Return (file, node) of every function and class."""
    trees = {file: ast.parse(file.read_text()) for file in FOLDER.rglob("*.py")}
    kinds = ast.FunctionDef | ast.ClassDef
    return [(file, node) for file, tree in trees.items() for node in ast.walk(tree) if isinstance(node, kinds)]


def nodes(kind: type) -> list[tuple[Path, ast.AST]]:
    return [(file, node) for file, node in definitions() if isinstance(node, kind)]


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield (module.name, function) of every function, `compat` excepted."""
    for file, node in nodes(ast.FunctionDef):
        if file != FOLDER / "compat.py":
            yield f"{file.relative_to(FOLDER).with_suffix('')}.{node.name}", node


def kernels() -> dict[str, list[ast.arg]]:
    """Return the arguments of every kernel, by its name."""
    return {
        node.name: arguments(node) for _, node in functions() if node.name.endswith("_kernel") and node.decorator_list
    }


def arguments(node: ast.FunctionDef) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def is_on_host(node: ast.FunctionDef) -> bool:
    return not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def is_constant(argument: ast.arg) -> bool:
    return argument.annotation is not None and "constexpr" in ast.unparse(argument.annotation)


def test_kernels_take_few_arguments():
    signatures = kernels()
    assert len(signatures) > 60
    wide = {name for name, names in signatures.items() if sum(not is_constant(x) for x in names) > MOST}
    assert not wide, f"too many arguments: {sorted(wide)}"


def test_host_functions_take_few_arguments():
    public = {*hstu_sparse.__all__, *(f"{name}_reference" for name in hstu_sparse.__all__), *PUBLIC_IN_COMPAT}
    counts = {
        name: sum(x.arg not in ("self", "cls", "ctx") for x in arguments(node))
        for name, node in functions()
        if node.name not in public and is_on_host(node)
    }
    assert len(counts) > 500
    wide = {name for name, count in counts.items() if count > MOST_OF_HOST}
    assert not wide, f"too many arguments: {sorted(wide)}"


def test_no_member_is_called_as_triton_s_own():
    """A compiled kernel's tuple has `values`, the list of its members, and `type`; the interpreter finds the fields."""
    members = [
        (node.name, field.target.id)
        for _, node in nodes(ast.ClassDef)
        if any(ast.unparse(base) == "NamedTuple" for base in node.bases)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and ast.unparse(field.annotation) in ("object", "tl.tensor")
    ]
    assert len(members) > 100
    assert not [member for member in members if member[1] in ("values", "type", "handle")]


def test_no_argument_is_called_as_triton_s_own():
    """Triton compiles a function with the kernel's arguments and `**options`; its interpreter does not mind."""
    wrong = [name for name, names in kernels().items() if any(x.arg == "options" for x in names)]
    assert not wrong, wrong
