"""Heads padded by one kernel, as `launch.aligned` pads each."""

import pytest
import torch

from hstu_sparse import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("tokens", [0, 37])
@pytest.mark.parametrize(("d", "v", "heads"), [(50, 50, 1), (25, 7, 2), (16, 50, 3), (32, 32, 1), (1, 1, 1)], ids=str)
def test_padded(tokens, d, v, heads):
    from hstu_sparse.padding import padded

    wide = torch.randn(tokens, heads, 2 * d + 3, device=DEVICE)
    k, values = (torch.randn(tokens, heads, size, device=DEVICE) for size in (d, v))
    given = wide[..., 3 : 3 + d], k, values, k
    for found, x in zip(padded(*given), given, strict=True):
        assert torch.equal(found, launch.aligned(x))
        assert found.data_ptr() % 16 == 0
