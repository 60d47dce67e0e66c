"""The relative bias: what a pair is looked up as, its gradient, its checks."""

import math

import pytest
import torch

from hstu_sparse.bias.relative import RelativeBias, bucket_edges, check_bias, pair_bias, time_bucket


def test_time_bucket():
    values = torch.tensor([0, 1, -1, 2, 3, -60, 86400, 2**40, -(2**62)])
    expected = [min(math.floor(math.log(max(abs(int(x)), 1)) / 0.301), 128) for x in values]
    assert time_bucket(values, 128).tolist() == expected
    for k in range(4, 55):
        edge = math.ceil(math.exp(0.301 * k))
        assert time_bucket(torch.tensor([edge - 1, edge]), 128).tolist() == [k - 1, k]
    assert time_bucket(torch.tensor([10**6]), 5).tolist() == [5]
    assert len(bucket_edges(7)) == 7


def test_pair_bias_by_hand():
    bias = RelativeBias(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0]))
    distance = torch.tensor([[0, -1], [2, 1]])
    # Differences of 1, 2, 0 and -5 seconds: ln / 0.301 is 0, 2.3, 0 and 5.3, in a table of buckets 0 to 2.
    actual = pair_bias(bias, distance, torch.tensor([[101], [105]]), torch.tensor([[100, 99], [105, 110]]))
    assert actual.tolist() == [[11.0, 31.0], [13.0, 32.0]]
    assert pair_bias(RelativeBias(), distance) == 0.0


def test_pair_bias_gradients_broadcast():
    """The position table is looked up once for all sequences; its gradient sums over them."""
    position, time = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    distance = torch.arange(3)[:, None] - torch.arange(3)
    times = torch.tensor([[0, 5, 50], [7, 7, 8]])

    def look(position, time):
        return pair_bias(RelativeBias(position, time), distance, times[:, :, None], times[:, None, :])

    assert look(position, time).shape == (2, 3, 3)
    assert torch.autograd.gradcheck(look, (position, time))


def test_check_bias_completes():
    device = torch.device("cpu")
    times, table = torch.zeros(6, dtype=torch.int64), torch.zeros(8)
    assert check_bias(None, 8, 6, device) == RelativeBias()
    completed = check_bias(RelativeBias(table, table, times), 8, 6, device)
    assert completed.query_timestamps is times
    assert check_bias(RelativeBias(table, None, times), 8, 6, device) == (table, None, None, None)
    assert check_bias(RelativeBias(table), 5, 6, device).position is table


@pytest.mark.parametrize(
    ("bias", "error", "message"),
    [
        (torch.zeros(8), TypeError, "bias must be a RelativeBias, got Tensor"),
        (RelativeBias(torch.zeros(7)), ValueError, r"bias.position must be \[at least 8\], got \[7\]"),
        (RelativeBias(torch.zeros(8, 1)), ValueError, "bias.position must have one dimension"),
        (RelativeBias([0.0]), TypeError, "bias.position must be a tensor or None, got list"),
        (RelativeBias(torch.zeros(8).long()), TypeError, "bias.position must be floating point"),
        (RelativeBias(torch.zeros(8, device="meta")), ValueError, "bias.position is on meta, q on cpu"),
        (RelativeBias(time=torch.zeros(7)), ValueError, r"bias.time needs bias.timestamps \[T=6\]"),
        (RelativeBias(time=torch.zeros(0)), ValueError, "got an empty table"),
        (RelativeBias(None, torch.zeros(7), torch.zeros(6)), TypeError, "bias.timestamps must be int64"),
        (RelativeBias(None, None, torch.zeros(5).long()), ValueError, r"bias.timestamps must be \[T=6\], got \[5\]"),
    ],
)
def test_check_bias_refuses(bias, error, message):
    with pytest.raises(error, match=message):
        check_bias(bias, 8, 6, torch.device("cpu"))


def test_check_bias_of_queries_that_are_not_the_keys():
    times, table = torch.zeros(6, dtype=torch.int64), torch.zeros(8)
    with pytest.raises(ValueError, match=r"needs bias.query_timestamps \[Tq=2\]"):
        check_bias(RelativeBias(None, table, times), 9, 6, torch.device("cpu"), query_tokens=2)
    with pytest.raises(ValueError, match=r"bias.query_timestamps must be \[Tq=2\], got \[6\]"):
        check_bias(RelativeBias(None, table, times, times), 9, 6, torch.device("cpu"), query_tokens=2)
    with pytest.raises(ValueError, match=r"bias.position must be \[at least 9\], got \[8\]"):
        check_bias(RelativeBias(table), 9, 6, torch.device("cpu"), query_tokens=2)
