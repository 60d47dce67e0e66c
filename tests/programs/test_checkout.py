"""Test that the checkout's packages can be imported from any folder, and that an error names a file that hides one."""

import subprocess
import sys
from pathlib import Path

import pytest

import hstu_sparse_checkout

ROOT = Path(__file__).resolve().parents[2]


def run_python(folder: Path, code: str) -> subprocess.CompletedProcess:
    """Run code in a folder, with the checkout last in the import path, as after `make setup`."""
    code = f"import sys; sys.path.append({str(ROOT)!r}); {code}"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


def test_imports_from_another_folder(tmp_path):
    """Check also that importing the operators does not load torch._dynamo, which takes a second; a first call does."""
    (tmp_path / "data").mkdir()  # a folder without __init__.py hides no package
    code = "import hstu_sparse, training.config; print('torch._dynamo' in sys.modules); "
    code += "import serving, training, experiments; print(serving.Recommender.__name__)"
    done = run_python(tmp_path, code)
    assert done.stdout == "False\nRecommender\n", done.stderr


@pytest.mark.parametrize("name", hstu_sparse_checkout.PACKAGES)
def test_a_file_of_the_same_name_is_named(tmp_path, monkeypatch, name):
    (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match=f"{tmp_path}/{name}.py hides the package {ROOT}/{name}: rename it"):
        hstu_sparse_checkout.check_packages()


def test_importing_fails_with_that_error(tmp_path):
    (tmp_path / "data.py").write_text("")
    done = run_python(tmp_path, "from serving import Recommender")
    message = f"ImportError: {tmp_path}/data.py hides the package {ROOT}/data: rename it, or import from another folder"
    assert done.stderr.splitlines()[-1] == message
