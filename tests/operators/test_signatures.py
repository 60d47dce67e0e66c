"""Kernels take few arguments: what belongs together is a named tuple (docs/notes/2026-11-27-named-tuples.md)."""

import ast
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "hstu_sparse"
MOST = 20  # besides compile-time constants
# Kernels that still have more. A kernel that no longer does is removed here.
WIDE = {
    "dense_attention_bwd_dkv_hopper_kernel",
    "group_attention_bwd_dkv_kernel",
    "group_attention_bwd_kernel",
    "group_attention_fwd_kernel",
    "index_loss_kernel",
    "index_scores_bwd_kernel",
    "lightning_indexer_collect_kernel",
    "paged_attention_fwd_kernel",
    "rotatekv_attention_fwd_kernel",
    "sparse_attention_bwd_dkv_kernel",
    "sparse_attention_bwd_kernel",
}


def kernels() -> dict[str, list[ast.arg]]:
    """Return the arguments of every kernel, by its name."""
    return {
        node.name: [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for file in FOLDER.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list
    }


def is_constant(argument: ast.arg) -> bool:
    return argument.annotation is not None and "constexpr" in ast.unparse(argument.annotation)


def test_kernels_take_few_arguments():
    signatures = kernels()
    assert len(signatures) > 60
    wide = {name for name, arguments in signatures.items() if sum(not is_constant(x) for x in arguments) > MOST}
    assert wide == WIDE, f"too many arguments: {sorted(wide - WIDE)}; no longer: {sorted(WIDE - wide)}"


def test_no_member_is_called_as_triton_s_own():
    """A compiled kernel's tuple has `values`, the list of its members, and `type`; the interpreter finds the fields."""
    members = [
        (node.name, field.target.id)
        for file in FOLDER.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "NamedTuple" for base in node.bases)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and ast.unparse(field.annotation) in ("object", "tl.tensor")
    ]
    assert len(members) > 100
    assert not [member for member in members if member[1] in ("values", "type", "handle")]


def test_no_argument_is_called_as_triton_s_own():
    """Triton compiles a function with the kernel's arguments and `**options`; its interpreter does not mind."""
    wrong = [name for name, arguments in kernels().items() if any(x.arg == "options" for x in arguments)]
    assert not wrong, wrong
