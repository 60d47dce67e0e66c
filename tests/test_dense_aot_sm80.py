"""As test_dense_aot.py, for sm_80: a file of its own, so that two workers share the compiling."""

import pytest
from test_dense_aot import ALL, check_kernel, check_small_kernels


@pytest.mark.parametrize("part", ["fwd", "dq", "dkv"])
@pytest.mark.parametrize("features", [ALL, []])
def test_kernels(part, features):
    check_kernel(80, part, features)


def test_small_kernels():
    check_small_kernels(80)
