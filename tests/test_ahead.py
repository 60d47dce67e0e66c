"""Compiling ahead of time, for several architectures in one process."""

import pytest

from tests.compiling import compiled

pytest.importorskip("triton")


def test_each_architecture_gets_kernels_of_its_own():
    kernels = compiled("rotary", 80, 90, 80)
    assert {k["arch"] for k in kernels} == {80, 90}
    found = {arch: [(k["name"], k["label"]) for k in kernels if k["arch"] == arch] for arch in (80, 90)}
    first = [k for k in found[90] if k[1] == found[90][0][1]]  # sm_90 has every case, the other its first
    assert found[80] == 2 * first
