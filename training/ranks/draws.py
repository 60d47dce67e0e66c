"""Random numbers that depend only on (seed, step, row of the whole batch): the same for any number of ranks.

Letters: T tokens of a rank, K numbers for a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# The finaliser of splitmix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(number: int) -> int:
    """Return the int64 with the same 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


def mixed(x: Tensor) -> Tensor:
    """Map int64 one to one to int64 with well-mixed bits."""

    def shifted(x: Tensor, bits: int) -> Tensor:
        return x ^ ((x >> bits) & ((1 << (64 - bits)) - 1))  # a logical shift: the copies of the sign bit are masked

    x = shifted(x + _signed(STEP), 30) * _signed(FIRST)
    x = shifted(x, 27) * _signed(SECOND)
    return shifted(x, 31)


def seed_of(*numbers: int) -> int:
    """Mix integers into a seed for torch's generators, 0 .. 2^63 - 1."""
    x = 0
    for number in numbers:
        x = _mixed(x ^ (number % 2**64))
    return x & (2**63 - 1)


def _mixed(x: int) -> int:
    """Compute `mixed` for a Python integer 0 .. 2^64 - 1."""
    x = (x + STEP) % 2**64
    x = (x ^ (x >> 30)) * FIRST % 2**64
    x = (x ^ (x >> 27)) * SECOND % 2**64
    return x ^ (x >> 31)


CALLS = 2  # the most calls of Draws.below in a step


def write_bases(bases: Tensor, seed: int, step: int) -> None:
    """Write the numbers of a step for the calls of `Draws.below` into `bases` [CALLS] int64."""
    for call in range(CALLS):
        bases[call].fill_(seed_of(seed, step, call + 1))


@dataclass
class Draws:
    """Random numbers for the rows [T] of a training step; each call of `below` draws different numbers.

    bases: [CALLS] int64, the result of `write_bases`. A captured step reads them when it is replayed.
    """

    bases: Tensor
    rows: Tensor
    calls: int = 0

    def below(self, limit: int | Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
        """Draw integers 0 .. limit - 1 of shape [T, K], which depend on the row, or [K], equal on all ranks."""
        base = self.bases[self.calls]
        self.calls += 1
        columns = torch.arange(shape[-1], device=self.rows.device)
        rows = self.rows[:, None] + 1 if len(shape) == 2 else 0
        numbers = mixed(mixed(columns + base) + rows)
        return ((numbers & (2**62 - 1)) % limit).to(dtype)
