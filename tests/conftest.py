"""Skip what the machine cannot run, share cores and GPU among processes; without a GPU interpret kernels.

torch is imported by the processes that run tests, and not by the one that distributes them over others.
"""

import gc
import os
import sys

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
THREADS = max(1, (os.cpu_count() or 1) // WORKERS)
# The numbers of threads of NumPy's products, of which interpreted kernels consist, and of programs that tests start.
# The libraries read these variables when they are first imported. Threads that wait for a core cost more than they
# compute. A worker inherits the variables and sets them again.
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(THREADS)

import pytest  # noqa: E402

# The share of a GPU's memory for all its processes together: the rest is their contexts and kernels.
SHARED_MEMORY = 0.9
MOST_CACHED = 2**30  # bytes that a test may leave in torch's cache
CUDA_ERROR = pytest.StashKey[str]()  # the test in which this process lost its GPU context


def pytest_addoption(parser):
    parser.addoption("--seconds", type=float, default=5.0, help="that the campaign of random shapes takes")
    parser.addoption("--campaign-seed", type=int, default=0, help="which random shapes")


def pytest_sessionstart(session):
    if not session.config.pluginmanager.hasplugin("dsession"):  # which distributes tests
        gc.disable()
        import torch

        torch.set_num_threads(THREADS)
        # Triton reads it once, when it is first imported, so it has to be set before any test module is.
        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        for marker, needed in (("gpu", 1), ("multigpu", 2)):
            if item.get_closest_marker(marker) and gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU(s), found {gpus}"))


def pytest_collection_finish():
    """Collect garbage from here on, without imported modules, which each collection would scan for half a second."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item):
    """Give each process one GPU and a share of its memory, so that only a test that allocates too much fails."""
    import torch

    if CUDA_ERROR in item.config.stash:
        pytest.fail(f"this process has had no working GPU since {item.config.stash[CUDA_ERROR]}", pytrace=False)
    if WORKERS > 1 and item.get_closest_marker("gpu") and torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(0 if item.get_closest_marker("multigpu") else WORKER % gpus)
        torch.cuda.set_per_process_memory_fraction(SHARED_MEMORY / -(-WORKERS // gpus))


def pytest_runtest_teardown(item):
    import torch

    # All compiled partials share a code object of torch's own, of which a process compiles no more than eight.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > MOST_CACHED:
        torch.cuda.empty_cache()


def pytest_runtest_makereport(item, call):
    if call.excinfo and "CUDA error" in str(call.excinfo.value):
        item.config.stash.setdefault(CUDA_ERROR, item.nodeid)


def pytest_terminal_summary(terminalreporter):
    """Print the number of random cases that each operator passed, over all processes."""
    counts: dict[str, list[tuple[int, float]]] = {}
    for report in terminalreporter.stats.get("passed", []):
        for key, value in report.user_properties:
            if key == "campaign":
                counts.setdefault(value[0], []).append(value[1:])
    for name, parts in sorted(counts.items()):
        cases, most = zip(*parts)
        terminalreporter.write_line(f"campaign: {name}: {sum(cases)} cases passed, at most {max(most):.1f} GiB")


@pytest.fixture(scope="session", autouse=True)
def interpreted_kernels_keep_to_their_tensors():
    from tests.operators.interpreter import checked_interpreter

    with checked_interpreter():
        yield


@pytest.fixture
def load(tmp_path):
    """Return load(format, text or path, **options) -> Dataset, which prepares through a cache in tmp_path."""

    from data.datasets import load_dataset

    def load(format, content, name="raw.txt", **options):
        path = content
        if isinstance(content, (str, bytes)):
            path = tmp_path / name
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return load_dataset(format, str(path), cache_dir=str(tmp_path / "cache"), **options)

    return load
