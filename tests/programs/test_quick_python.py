"""The fixture `quick_python` behaves as Python does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick_python import QuickPython

WAITS = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("ready", flush=True)
signal.sigwait({signal.SIGTERM})
print("told", flush=True)
sys.exit(7)
"""


def run(python, *arguments, **options):
    return subprocess.run([python.executable, *map(str, arguments)], capture_output=True, text=True, **options)


def test_programs_end_as_python_ends_them(quick_python, tmp_path):
    (tmp_path / "program.py").write_text("import sys\nprint(__name__, sys.argv[1:], sys.path[0])")
    done = run(quick_python, "-u", "program.py", "a b", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"__main__ ['a b'] {tmp_path}\n"), done.stderr
    done = run(quick_python, "-c", "import os, sys; print(os.environ['X'], sys.argv)", 1, env=os.environ | {"X": "y"})
    assert (done.returncode, done.stdout) == (0, "y ['-c', '1']\n"), done.stderr
    assert run(quick_python, "-m", "json.tool", "--help").stdout.startswith("usage")
    for code, status, error in (
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('wrong')", 1, "wrong\n"),
        ("import atexit, sys; atexit.register(lambda: print('last', file=sys.stderr))", 0, "last\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
    ):
        done = run(quick_python, "-c", code)
        assert (done.returncode, done.stderr) == (status, error), code
    done = run(quick_python, "-c", "1 / 0")
    assert done.returncode == 1 and done.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(("number", "output", "status"), [(signal.SIGTERM, "told\n", 7), (signal.SIGKILL, "", -9)])
def test_signals_reach_the_program(quick_python, number, output, status):
    command = [quick_python.executable, "-c", WAITS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read() == output  # to its end: the program is gone too
    assert process.returncode == status


def test_one_server_for_all_that_hold_it(quick_python):
    with QuickPython(Path(quick_python.executable).parent) as other:
        assert not hasattr(other, "server")
        assert run(other, "-c", "import sys; print('torch' in sys.modules)").stdout == "True\n"
    assert run(quick_python, "-c", "print(1)").stdout == "1\n"


def test_another_interpreter_is_a_real_one(quick_python):
    code = "import sys; print(sys.executable, 'torch' in sys.modules)"
    other = os.environ | {"TRITON_INTERPRET": "0" if os.environ.get("TRITON_INTERPRET") else "1"}
    for arguments, environment in ((["-c", code], other), (["-I", "-c", code], None)):
        assert run(quick_python, *arguments, env=environment).stdout == f"{sys.executable} False\n"
    assert run(quick_python, "-c", code).stdout == f"{quick_python.executable} True\n"


def test_open_files_keep_their_numbers(quick_python):
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe:
        done = run(quick_python, "-B", "-c", f"import os; os.write({writing}, b'told')", pass_fds=[writing])
        os.close(writing)
        assert (done.returncode, pipe.read()) == (0, b"told"), done.stderr
