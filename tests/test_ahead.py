"""Compiling ahead of time, for several architectures in one process."""

import pytest

from tests.compiling import compiled

pytest.importorskip("triton")


def test_each_architecture_gets_kernels_of_its_own():
    kernels = compiled("rotary", 80, 90, 80)
    assert {k["arch"] for k in kernels} == {80, 90}
    names = [[k["name"] for k in kernels if k["arch"] == arch] for arch in (80, 90)]
    assert names[0] == 2 * names[1]
