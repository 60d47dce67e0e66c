"""The kernels of paged attention and of the page pool, in Triton's interpreter."""

import pytest

from hstu_sparse.launch import INTERPRET
from tests.random.cases import operator

pytestmark = pytest.mark.skipif(not INTERPRET, reason="kernels on a CPU need TRITON_INTERPRET=1")

LENGTHS = dict(lengths=(40, 0, 1, 33), asked=(3, 2, 1, 0))
BIASED = dict(position=True, timed=True)
CASES = {
    "append": dict(LENGTHS, **BIASED),
    "append, softmax, parts": dict(LENGTHS, softmax=True, splits=2, **BIASED),
    "candidates": dict(LENGTHS, candidates=True, **BIASED),
    "candidates, softmax, parts": dict(LENGTHS, candidates=True, softmax=True, splits=3, timed=True),
    "many": dict(lengths=(30, 2), asked=(17, 40), softmax=True, **BIASED),
    "many candidates": dict(lengths=(30, 2), asked=(17, 40), candidates=True, contiguous=False),
    "odd heads": dict(LENGTHS, head_size=25, value_size=33, stored="float16"),
    "nothing cached": dict(lengths=(0, 0), asked=(1, 3), candidates=True, softmax=True),
    "2 bits": dict(LENGTHS, bits=2, head_group=2, sink_tokens=4, clip=0.75, **BIASED),
    "2 bits, parts": dict(LENGTHS, bits=2, head_group=2, sink_tokens=4, splits=2, softmax=True, candidates=True),
    "2 bits, many": dict(lengths=(30, 2), asked=(17, 40), bits=2, head_group=2, sink_tokens=18, softmax=True),
    "4 bits, odd heads": dict(LENGTHS, bits=4, head_group=4, head_size=25, value_size=24, position=True),
    "8 bits, values across blocks": dict(
        lengths=(30, 2), asked=(17, 40), bits=8, head_group=4, value_size=24, quant_group=32, candidates=True
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_reference(name):
    operator("paged").check("cpu", **dict(groups=1, head_size=16, value_size=16) | CASES[name])
