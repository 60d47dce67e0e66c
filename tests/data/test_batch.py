"""Test that batches are moved, padded, overwritten and cut by the layout of their fields, also in subclasses."""

from dataclasses import dataclass, field, fields, replace

import pytest
import torch
from torch import Tensor

from data.batch import OFFSETS, Batch, Cut, jagged, per_sequence, per_token


@dataclass
class MoreBatch(Batch):
    """A batch with one more field of each layout, with other values of padding."""

    tags: Tensor | None = field(default=None, metadata=per_token(padding=-7))  # [T, 2]
    weight: Tensor | None = field(default=None, metadata=per_sequence(padding=0.5))
    words: Tensor | None = field(default=None, metadata=jagged("word_offsets", padding=-3))
    word_offsets: Tensor | None = field(default=None, metadata=OFFSETS)


def more(batch, words):
    """Return the batch with values in its additional fields; words: the number of words of each sequence."""
    plain = {one.name: getattr(batch, one.name) for one in fields(Batch) if one.init}
    return MoreBatch(
        **plain,
        tags=torch.arange(2 * batch.num_tokens).view(-1, 2),
        weight=torch.arange(batch.num_sequences) + 10.0,
        words=100 + torch.arange(sum(words)),
        word_offsets=torch.tensor([0, *words]).cumsum(0),
    )


def make(lengths, words):
    tokens = torch.arange(sum(lengths))
    users = torch.arange(len(lengths))
    return more(Batch(tokens, tokens, tokens, tokens, torch.tensor([0, *lengths]).cumsum(0), users), words)


def tensors(batch):
    return {name: value.tolist() for name, value in vars(batch).items() if isinstance(value, Tensor)}


# Two sequences of 2 and 1 tokens with 1 and 3 words, padded to 6 tokens in 5 sequences of at most 2, and 6 words.
EXPECTED = {
    "item_ids": [0, 1, 2, 0, 0, 0],
    "timestamps": [0, 1, 2, 0, 0, 0],
    "target_ids": [0, 1, 2, -1, -1, -1],
    "query_timestamps": [0, 1, 2, 0, 0, 0],
    "seq_offsets": [0, 2, 3, 5, 6, 6],
    "users": [0, 1, 0, 0, 0],
    "real": [True, True, True, False, False, False],
    "tags": [[0, 1], [2, 3], [4, 5], [-7, -7], [-7, -7], [-7, -7]],
    "weight": [10.0, 11.0, 0.5, 0.5, 0.5],
    "words": [100, 101, 102, 103, -3, -3],
    "word_offsets": [0, 1, 4, 6, 6, 6],
}


def test_padding_follows_from_the_fields():
    batch = make([2, 1], [1, 3])
    before = tensors(batch)
    padded = batch.padded(6, 5, 2, {"word_offsets": 6})
    assert type(padded) is MoreBatch and tensors(padded) == EXPECTED
    assert padded.weight.dtype == torch.float32 and padded.real.dtype == torch.bool
    assert tensors(batch) == before
    assert batch.padded(3, 2, 2).words.tolist() == [100, 101, 102, 103]


def test_overwriting_follows_from_the_fields():
    other = make([1, 2, 2], [2, 0, 4])
    batch = other.padded(6, 5, 2)
    assert batch.num_values == {"word_offsets": 6}
    batch.overwrite(make([2, 1], [1, 3]), 2)
    assert tensors(batch) == EXPECTED


def test_a_part_has_only_its_tokens():
    batch = make([3, 2], [1, 3])
    part = batch.part(torch.tensor([0, 2, 4]), torch.tensor([0, 2, 3]))
    unchanged = {name: tensors(batch)[name] for name in ("users", "weight", "words", "word_offsets")}
    tokens = {name: [0, 2, 4] for name in ("item_ids", "timestamps", "target_ids", "query_timestamps")}
    tokens |= {"real": [True] * 3, "tags": [[0, 1], [4, 5], [8, 9]], "seq_offsets": [0, 2, 3]}
    assert type(part) is MoreBatch and tensors(part) == unchanged | tokens


def test_moving_follows_from_the_fields():
    moved = make([2, 1], [1, 3]).to("meta")
    assert {value.device.type for value in vars(moved).values() if isinstance(value, Tensor)} == {"meta"}


@pytest.mark.parametrize(("words", "sequences"), [(3, 5), (6, 2)], ids=["fewer values", "no sequence for more"])
def test_values_that_do_not_fit_are_refused(words, sequences):
    batch = make([2, 1], [1, 3])
    with pytest.raises(ValueError, match=f"cannot pad 4 values of word_offsets to {words} with {sequences - 2} more"):
        batch.padded(3, sequences, 2, {"word_offsets": words})


def test_a_tensor_without_a_layout_is_refused_by_name():
    @dataclass
    class Undeclared(Batch):
        notes: Tensor | None = None

    batch = make([2, 1], [1, 3])
    batch = Undeclared(**{one.name: getattr(batch, one.name) for one in fields(Batch) if one.init}, notes=batch.tags)
    with pytest.raises(TypeError, match=r"Undeclared\.notes is a tensor, but its field has no layout"):
        batch.padded(6, 5, 2)


def test_a_part_of_a_batch_is_not_moved():
    batch = make([2, 1], [1, 3])
    cut = Cut(torch.arange(3), torch.tensor([4, 5, 6]), torch.tensor([7, 8]), None, None)
    part = replace(batch, cut=cut)
    assert part.positions.tolist() == [4, 5, 6] and part.origins.tolist() == [7, 8]
    with pytest.raises(ValueError, match="cannot be moved or padded"):
        part.to("meta")


def test_without_padding_all_tokens_are_real_with_a_target_or_not():
    batch = make([2, 1], [1, 3])
    batch = replace(batch, target_ids=torch.tensor([5, -1, 6]))
    assert batch.real.tolist() == [True] * 3
    assert batch.padded(4, 3, 2).real.tolist() == [True, True, True, False]
