"""Skips what the machine cannot run; keeps torch from oversubscribing the cores; no GPU: Triton's interpreter."""

import os

import pytest
import torch

# Triton reads it once, when it is first imported, so it has to be set before any test module is.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser):
    parser.addoption("--seconds", type=float, default=10.0, help="of the campaign of random shapes, over all operators")
    parser.addoption("--campaign-seed", type=int, default=0, help="which random shapes")


def pytest_configure(config):
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_collection_modifyitems(items):
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        for marker, needed in (("gpu", 1), ("multigpu", 2)):
            if item.get_closest_marker(marker) and gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU(s), found {gpus}"))
