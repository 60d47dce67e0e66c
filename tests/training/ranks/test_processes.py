"""Test ranks that share a batch: their sequences, and options that cannot be combined."""

from pathlib import Path

import pytest
import torch

from data.batches import Batches
from data.errors import ConfigError
from data.splits import make_splits
from data.synthetic import generate
from training.config import load_config

ROOT = Path(__file__).resolve().parents[3]
SYNTHETIC = ROOT / "configs/synthetic-hstu.yaml"


def test_some_sequences_of_a_batch():
    dataset = generate(num_users=7, num_items=60, num_clusters=5, mean_length=12)
    split = make_splits(dataset, "leave_one_out", max_seq_len=10).train
    options = dict(shuffle=False, with_seen=True)
    (batch,) = Batches(dataset, split, batch_size=7, **options).epoch(0)
    parts = list(Batches(dataset, split, batch_size=2, **options).epoch(0))
    for number, part in enumerate(parts):
        actual = batch.sequences(2 * number, min(7, 2 * number + 2))
        for name in ("item_ids", "target_ids", "seq_offsets", "users", "seen_items", "seen_offsets", "real"):
            assert torch.equal(getattr(actual, name), getattr(part, name)), name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.data=0"], "expected auto or an integer of at least 1"),
        (["parallel.embedding=column_wise", "loss.kind=cross_entropy"], "expected replicated or row_wise"),
        (["parallel.fused=adam"], "parallel.fused: needs a sharded table"),
        (
            ["parallel.embedding=row_wise", "parallel.fused=adam", "loss.kind=cross_entropy"],
            "parallel.fused: cannot be combined with loss.kind=cross_entropy",
        ),
        (["parallel.embedding=row_wise", "parallel.fused=adam", "train.clip_norm=1"], "train.clip_norm"),
        (
            ["parallel.embedding=row_wise", "loss.kind=cross_entropy", "loss.label_smoothing=.1"],
            "expected replicated with loss.label_smoothing",
        ),
        (["parallel.embedding=row_wise", "model.table_dtype=bfloat16"], "model.table_dtype must be float32"),
    ],
)
def test_options_that_do_not_fit_several_ranks_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(SYNTHETIC, overrides)
