"""Compiling ahead of time, for several architectures in one process."""

import pytest

from hstu_sparse.ahead import unset_registers
from tests.compiling import compiled

pytest.importorskip("triton")


def test_each_architecture_gets_kernels_of_its_own():
    kernels = compiled("rotary", 80, 90, 80)
    assert {k["arch"] for k in kernels} == {80, 90}
    found = {arch: [(k["name"], k["label"]) for k in kernels if k["arch"] == arch] for arch in (80, 90)}
    first = [k for k in found[90] if k[1] == found[90][0][1]]  # sm_90 has every case, the other its first
    assert found[80] == 2 * first


def test_a_descriptor_made_of_what_another_left_is_found():
    """As ptxas made one: the lower half is what an earlier loop had there, the upper half should begin with 0."""
    forgotten = """
        /*3b50*/                   R2UR UR11, R149 ;
        /*3b60*/                   R2UR UR10, R150 ;
        /*ebf0*/                   UIADD3 UR10, UP0, UR10, 0x20, URZ ;
        /*ee80*/                   UIADD3.X UR11, UR11, -0x3ffffff0, URZ, UP0, !UPT ;
    """
    copied = forgotten.replace("/*ebf0*/", "/*ebe0*/  UMOV UR11, URZ ;\n        /*ebf0*/")
    wrong = "/*ee80*/                   UIADD3.X UR11, UR11, -0x3ffffff0, URZ, UP0, !UPT ;"
    assert unset_registers(forgotten) == [wrong]
    assert unset_registers(copied) == []
    assert wrong in unset_registers(wrong)
