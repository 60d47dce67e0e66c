"""Test the wheel: its files and requirements, and that it works with nothing else installed."""

import ast
import email
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import hstu_sparse

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
KERNELS = README.partition("## The kernels as a library")[2]
KERNEL_LINES = "\n".join(re.findall(r"```python\n(.*?)```", KERNELS, re.DOTALL))


def run(*command, **options) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build the wheel from a copy of the tracked files, without network."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "hstu_sparse", "models", "data"):
        run("cp", "-r", ROOT / name, source / name)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", target, source)
    (built,) = target.iterdir()
    return built


def requirements(text: list[str], extras: Iterable[str] = ()) -> list[Requirement]:
    """Return the requirements that apply on this machine with these extras."""
    extras = {"", *extras}
    parsed = [Requirement(line) for line in text]
    return [one for one in parsed if not one.marker or any(one.marker.evaluate({"extra": name}) for name in extras)]


def installed_with(names: list[str]) -> set[str]:
    """Return the names of the distributions that `names` require, as they are installed here, and `names`."""
    closed: set[tuple[str, frozenset]] = set()
    left = [Requirement(name) for name in names]
    while left:
        one = left.pop()
        key = one.name.lower().replace("_", "-"), frozenset(one.extras)
        if key not in closed:
            closed.add(key)
            left += requirements(metadata.requires(one.name) or [], one.extras)
    return {name for name, _ in closed}


def facts(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_holds_the_operators_only(wheel):
    files = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in files} == {"hstu_sparse", f"hstu_sparse-{hstu_sparse.__version__}.dist-info"}
    assert "hstu_sparse/py.typed" in files
    sources = {str(file.relative_to(ROOT)) for file in (ROOT / "hstu_sparse").rglob("*.py")}
    assert {name for name in files if name.endswith(".py")} == sources


def test_requirements_are_the_imports_of_the_operators(wheel):
    """Check that every requirement is imported by an operator, and every import but fbgemm is a requirement."""
    names = {one.name for one in requirements(facts(wheel).get_all("Requires-Dist"))}
    imported = set()
    for file in (ROOT / "hstu_sparse").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.split(".")[0])
    assert imported - sys.stdlib_module_names - {"hstu_sparse", "fbgemm_gpu"} == names


def test_triton_is_bounded_by_the_tested_versions(wheel):
    """Check the bounds. CONTRIBUTING.md says how to allow the next version, here and in pyproject.toml."""
    (triton,) = (one for one in requirements(facts(wheel).get_all("Requires-Dist")) if one.name == "triton")
    allowed = [
        version for version in ("3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0", "4.0.0") if version in triton.specifier
    ]
    assert allowed == ["3.6.0", "3.7.1", "3.8.0"]
    assert metadata.version("triton") in triton.specifier


def test_facts_and_changelog_agree(wheel):
    metadata = facts(wheel)
    assert metadata["Version"] == hstu_sparse.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(metadata['Version'])}\b", changelog, re.MULTILINE)
    assert {"train", "serve", "tune", "cute", "docs", "dev"} <= set(metadata.get_all("Provides-Extra"))
    assert "Typing :: Typed" in metadata.get_all("Classifier")


def test_readme_kernel_lines_run_with_torch_only(wheel, tmp_path):
    """Install the wheel by pip into an environment of torch and its requirements; run README's lines on a CPU.

    The environment has links to the distributions here, so pip must not replace any of them: --no-deps.
    """
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    required = requirements(facts(wheel).get_all("Requires-Dist"))
    assert all(metadata.version(one.name) in one.specifier for one in required)
    for name in installed_with([one.name for one in required]):
        for file in metadata.files(name):
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(metadata.distribution(name).locate_file(top))
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps", wheel)
    assert KERNEL_LINES.count("hstu_attention") > 1
    lines = (
        f"{KERNEL_LINES}\nassert q.grad.abs().sum() > 0\n"
        "import torch, hstu_sparse as h; q = torch.ones(3, 1, 64); o = torch.tensor([0, 3])\n"
        "print(h.rotatekv_attention(q, o, h.rotatekv_compress(q, q, o, head_group=1), 4).sum().item())\n"
        "pool = h.PagePool(h.PageFormat(1, 64, 64, torch.float32), 1)\n"
        "pages, lengths = pool.table([pool.reserve([], 3)]), torch.tensor([0])\n"
        "pool.write(0, q, q, o, pages, lengths)\n"
        "print(h.paged_attention(q, q, q, o, pool, pages, lengths, 4).sum().item())\n"
        "try: import fbgemm_gpu\n"
        "except ImportError: pass\n"
        "else: raise SystemExit('this environment was to have no fbgemm')"
    )
    run(python, "-I", "-c", lines, cwd=tmp_path)
