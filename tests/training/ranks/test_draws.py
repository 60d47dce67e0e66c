"""Test random numbers that are equal on all ranks."""

import torch

from training.ranks.draws import CALLS, Draws, mixed, seed_of, write_bases


def draws_of(seed: int, step: int, rows: torch.Tensor) -> Draws:
    bases = torch.zeros(CALLS, dtype=torch.int64)
    write_bases(bases, seed, step)
    return Draws(bases, rows)


def test_draws_depend_only_on_the_row():
    rows = torch.randperm(1000)
    whole = draws_of(7, 3, torch.arange(1000)).below(97, (1000, 16))
    part = draws_of(7, 3, rows[:300]).below(97, (300, 16))
    assert torch.equal(part, whole[rows[:300]]) and whole.min() == 0 and whole.max() == 96
    shared = [draws_of(7, 3, rows[:count]).below(10**9, (50,)) for count in (1, 300)]
    assert torch.equal(*shared) and shared[0].unique().numel() == 50
    other = [draws_of(8, 3, rows), draws_of(7, 4, rows)]
    assert all(
        (one.below(10**9, (1000, 16)) == draws_of(7, 3, rows).below(10**9, (1000, 16))).sum() < 3 for one in other
    )
    draws = draws_of(7, 3, rows)
    assert (draws.below(10**9, (1000, 2)) == draws.below(10**9, (1000, 2))).sum() < 3
    # Uniform: the chi-square statistic of 97 bins and 16,000 numbers is within five standard deviations.
    counts = torch.bincount(whole.flatten(), minlength=97).double()
    assert ((counts - 16000 / 97) ** 2 / (16000 / 97)).sum() < 96 + 5 * (2 * 96) ** 0.5


def test_mixed_is_splitmix64():
    """The first numbers for the seed 1234567 are those published with the reference implementation."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    state = [1234567 + step * 0x9E3779B97F4A7C15 for step in range(3)]
    actual = mixed(torch.tensor([(x + 2**63) % 2**64 - 2**63 for x in state]))
    assert [x % 2**64 for x in actual.tolist()] == expected
    assert 0 <= seed_of(2**63 - 1, 5, 0) < 2**63
