"""Check what the kind `htree` chooses for options that are `auto`."""

import pytest

from models.attention.contract import LayerSizes
from models.attention.htree import HierarchicalTreeAttention

Config = HierarchicalTreeAttention.Config


def chosen(max_seq_len, **options):
    config = Config(kind="htree", **options).for_model(LayerSizes(4, 64, 64, 256, max_seq_len))
    assert config.for_model(LayerSizes(4, 64, 64, 256, 7)) == config  # nothing is left to choose
    return config.compression_rate, config.top_k, config.selection_group, config.num_kv_heads


@pytest.mark.parametrize(
    "max_seq_len, options, expected",
    [
        (1, {}, (8, 1, 8, 4)),
        (50, {}, (16, 2, 16, 4)),
        (200, {}, (16, 8, 16, 4)),
        (1023, {}, (16, 32, 16, 4)),
        (1024, {}, (16, 32, 16, 1)),
        (8192, {}, (16, 32, 16, 1)),
        (131072, {}, (16, 32, 16, 1)),
        (200, {"compression_rate": 4}, (4, 32, 4, 4)),
        (200, {"compression_rate": 24}, (24, 4, 8, 4)),
        (200, {"selection_group": 1}, (16, 8, 1, 4)),
        (200, {"selection_group": 24}, (24, 4, 24, 4)),
        (8192, {"top_k": 64, "num_kv_heads": None}, (16, 64, 16, None)),
    ],
)
def test_auto(max_seq_len, options, expected):
    assert chosen(max_seq_len, **options) == expected


@pytest.mark.parametrize("max_seq_len", [12, 17, 50, 100, 200, 400, 1000, 3000, 50000])
def test_auto_never_covers_the_whole_history(max_seq_len):
    rate, top_k, *_ = chosen(max_seq_len)
    assert rate * top_k < max_seq_len


def test_group_that_does_not_divide():
    config = Config(kind="htree", compression_rate=16, selection_group=3)
    with pytest.raises(ValueError, match=r"^selection_group=3 does not divide compression_rate=16$"):
        config.for_model(LayerSizes(4, 64, 64, 256, 200)).check_model(LayerSizes(4, 64, 64, 256, 200))
