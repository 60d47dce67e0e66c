"""Compiling ahead of time, for several architectures in one process."""

import pytest

from tests.operators.compiling import compiled
from tools import ahead
from tools.ahead import early_reloads, unset_registers

pytest.importorskip("triton")


@pytest.mark.slow
def test_each_architecture_gets_kernels_of_its_own():
    kernels = compiled(["rotary"], [80, 90, 80])
    assert {k["arch"] for k in kernels} == {80, 90}
    names = {arch: [(k["name"], k["label"]) for k in kernels if k["arch"] == arch] for arch in (80, 90)}
    first = [k for k in names[90] if k[1] == names[90][0][1]]  # sm_90 has every case, the other its first
    assert names[80] == 2 * first


def test_results_for_machine_code_are_cached(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    computed = []

    def say(content):
        return ahead.cached_result(
            content, lambda: computed.append(content) or {"registers": len(computed), "early_reloads": ["LDL"]}
        )

    assert say(b"one") == say(b"one") == {"registers": 1, "early_reloads": ["LDL"]}
    assert say(b"two")["registers"] == 2 and computed == [b"one", b"two"]
    (tmp_path / "ahead.py").write_text("other checks")
    monkeypatch.setattr(ahead, "__file__", str(tmp_path / "ahead.py"))
    assert say(b"one")["registers"] == 3


def test_a_descriptor_with_a_stale_register_is_found():
    """A descriptor as ptxas made it: its lower half is a stale register, its upper half should begin with 0."""
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


def test_other_constants_are_no_descriptors():
    """A sum of 64 bits as ptxas made it, in a kernel that divides by 3."""
    listing = "/*0220*/  S2UR UR11, SR_CTAID.X ;\n/*0230*/  UIADD3.X UR12, UR11, -0x2aaaaaab, URZ, UP0, !UPT ;"
    assert unset_registers(listing) == []


def test_a_descriptor_with_another_register_is_found():
    """A descriptor as ptxas made it: both halves begin with the address of shared memory, the lower one in bytes."""
    wrong = "/*6880*/                   UIADD3.X UR7, UR36, -0x7fffffe0, URZ, UP0, !UPT ;"
    forgotten = f"""
        /*16e0*/                   ULEA UR36, UR5, UR36, 0x18 ;
        /*4450*/                   UMOV UR4, URZ ;
        /*4460*/                   UIADD3.X UR19, UR4, -0x7fffffe0, URZ, UP0, !UPT ;
        /*6670*/                   UIADD3 UR6, UP0, UR36, 0x2, URZ ;
        {wrong}
    """
    set_before = "        /*0000*/  S2UR UR5, SR_CgaCtaId ;\n        /*0010*/  UMOV UR36, 0x400 ;\n"
    assert unset_registers(set_before + forgotten) == [wrong]
    assert unset_registers(set_before + forgotten.replace("UR36, -0x", "UR4, -0x")) == []


def test_a_reload_before_its_store_is_found():
    """A reload as ptxas placed it: the slot was released before, and its value is stored four instructions later."""
    wrong = "/*44d40*/                   LDL.LU.S16 R252, [R1+0x38] ;"
    lines = [
        "        /*3fb40*/                   STL.64 [R1+0x38], R14 ;",
        "        /*407e0*/                   LDL.LU.64 R22, [R1+0x38] ;",
        f"        {wrong}",
        "        /*44d80*/                   STL [R1+0x38], R227 ;",
        "        /*494e0*/                   LDL.LU.S16 R227, [R1+0x3a] ;",
    ]
    assert early_reloads("\n".join(lines)) == [wrong]
    right = [*lines[:2], lines[3], lines[2], lines[4]]
    assert early_reloads("\n".join(right)) == []
    # A label can be reached from elsewhere, without the instructions in front of it.
    assert early_reloads("\n".join([*lines[:2], ".L_x_3:", *lines[2:]])) == []


def test_a_pair_may_be_reloaded_for_its_upper_register():
    """A pair that ptxas loaded for its upper half alone: the lower half was in another register."""
    lines = [
        "        /*1f710*/                   LDL.LU R249, [R1+0xc8] ;",
        "        /*3f440*/                   STL [R1+0xcc], R43 ;",
        "        /*3f4a0*/                   LDL.LU.64 R42, [R1+0xc8] ;",
        "        /*40210*/              @!P1 MOV R42, R58 ;",
        "        /*41160*/              @!P1 LDG.E R242, desc[UR12][R42.64] ;",
    ]
    assert early_reloads("\n".join(lines)) == []
    assert early_reloads("\n".join([*lines[:3], *lines[4:]])) == [lines[2].strip()]
    upper = [lines[0].replace("c8", "cc"), lines[1].replace("cc", "c8"), *lines[2:]]
    assert early_reloads("\n".join(upper)) == [lines[2].strip()]


@pytest.mark.parametrize(("warps", "repeated"), [("[0, 1]", False), ("[0, 0]", True)])
def test_a_value_in_two_threads_is_found(warps, repeated):
    layout = f"#ttg.linear<{{register = [[0, 0]], lane = [[1, 0], [2, 0]], warp = [{warps}], block = []}}>"
    line = 'tt.elementwise_inline_asm "red.shared.add.u32 [$1], n;" %0 : tensor<4x2xi32, #linear>'
    assert ahead._added_twice(f"#linear = {layout}\n  {line}") == [f"4x2 in {layout}"] * repeated
