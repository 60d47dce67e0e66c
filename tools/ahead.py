"""Compile kernels ahead of time, for GPUs that are not present, and report the resources they use: for tests."""

import functools
import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from hstu_sparse.core import launch

_run = JITFunction.run


class _Driver:
    """The part of Triton's driver interface that compilation for sm_`arch` needs."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        # Triton caches compiled kernels by device: with one device for each architecture, none gets the kernels of
        # another.
        return self.arch

    def get_current_stream(self, device):
        return 0


class _Lowered(Exception):
    """Raised to end a compilation at Triton's GPU dialect; its message is the lowered text."""


def _end_at_ttgir(*stage: Any) -> tuple[str, str] | None:
    """End each compilation before LLVM. It is Triton's hook for stages; without arguments, it returns a cache key."""
    if not stage:
        return "ttgir", "ttgir"
    _backend, stages, *_ = stage
    lower = stages["ttgir"]

    def last(source: Any, metadata: dict) -> None:
        raise _Lowered(str(lower(source, metadata)))

    stages["ttgir"] = last
    return None


def lower_launches(call: Callable[[], object], arch: int, known: set[str]) -> list[dict]:
    """Compile as `compile_launches` does, but only to Triton's GPU dialect, in a fifth of the time.

    Returns:
        dicts with `name`, `arch`, `added_twice` and `asm` only, one for each kernel.
    """
    kernels: dict[str, str] = {}

    def lower(self, *args, grid, warmup, **options):
        name = self.fn.__name__
        if name not in known:
            try:
                _run(self, *args, grid=grid, warmup=True, **options)
            except _Lowered as lowered:
                kernels[name] = str(lowered)
            known.add(name)

    with _compiling(lower, arch):
        knobs.runtime.add_stages_inspection_hook = _end_at_ttgir
        try:
            call()
        finally:
            knobs.runtime.add_stages_inspection_hook = None
    return [
        {"name": name, "arch": arch, "added_twice": _added_twice(ttgir), "asm": {"ttgir": ttgir}}
        for name, ttgir in kernels.items()
    ]


def compile_launches(call: Callable[[], object], arch: int, known: set[str] | None = None) -> list[dict]:
    """Run `call` with every kernel that it launches compiled for sm_`arch` instead of launched.

    The kernels thus get the constants and options of their launchers. `call` uses CPU tensors, which launchers treat
    as tensors on a GPU of that architecture, and calls the registered operators or launchers (the public functions
    reject CPU tensors).

    Args:
        arch: compute capability as one number: 80, 90, 100, 120.
        known: names of kernels to skip; those compiled now are added.

    Returns:
        The dict of `report` for each specialisation of each kernel.
    """
    kernels: dict[str, CompiledKernel] = {}

    def compile_only(self, *args, grid, warmup, **options):
        if known is not None and self.fn.__name__ in known:
            return None
        kernel = _run(self, *args, grid=grid, warmup=True, **options)
        kernels[kernel.hash] = kernel
        return kernel

    with _compiling(compile_only, arch):
        call()
    if known is not None:
        known |= {kernel.metadata.name for kernel in kernels.values()}
    return [report(kernel).copy() for kernel in kernels.values()]


@contextmanager
def _compiling(run: Callable, arch: int) -> Iterator[None]:
    """Call `run` in place of each launch of a kernel on a GPU of sm_`arch`."""
    if launch.INTERPRET:
        raise RuntimeError("compile_launches needs a process without TRITON_INTERPRET")
    architecture, active = launch.cpu_architecture, driver._active
    JITFunction.run, launch.cpu_architecture = run, arch
    driver.set_active(_Driver(arch))
    try:
        yield
    finally:
        JITFunction.run, launch.cpu_architecture = _run, architecture
        driver._active = active  # reset_active needs a GPU


@functools.cache  # launches of several cases share kernels
def report(kernel: CompiledKernel) -> dict:
    """Return the resources of a compiled kernel.

    Returns:
        dict with `name`, `arch`, `registers`, `local_bytes` (stack and spills, per thread), `shared_bytes` (dynamic and
        static, on sm_90 and later including 1 KB of the driver), `asm`, and the instructions and tiles that
        `unset_registers`, `early_reloads` and `_added_twice` return.
    """
    # Blackwell's instructions have other names and orders of operands.
    uniform = kernel.metadata.target.arch <= 90
    facts = cached_result(
        kernel.asm["cubin"] + b"uniform" * uniform, lambda: _machine_code(kernel.asm["cubin"], uniform)
    )
    return {
        "name": kernel.metadata.name,
        "arch": kernel.metadata.target.arch,
        "registers": facts["registers"],
        "local_bytes": facts["local_bytes"],
        "shared_bytes": kernel.metadata.shared + facts["static_shared_bytes"],
        "unset_registers": facts["unset_registers"],
        "early_reloads": facts["early_reloads"],
        "added_twice": _added_twice(kernel.asm["ttgir"]),
        "asm": kernel.asm,
    }


def cached_result(content: bytes, compute: Callable[[], dict]) -> dict:
    """Return compute(), a dict for JSON, or its stored result for the same bytes and the same source of this file.

    The result is stored in Triton's cache (TRITON_CACHE_DIR), with the kernels.
    """
    key = hashlib.sha256(Path(__file__).read_bytes() + content).hexdigest()
    cache = get_cache_manager(key)
    if path := cache.get_file("report.json"):
        return json.loads(Path(path).read_bytes())
    result = compute()
    cache.put(json.dumps(result), "report.json", binary=False)
    return result


def _machine_code(cubin: bytes, uniform: bool) -> dict:
    """Return the entries of `report` that come from machine code; uniform: also look for unset registers."""
    tools = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def output_of(tool: str, *options: str) -> str:
            command = [os.path.join(tools, tool), *options, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage = output_of("cuobjdump", "--dump-resource-usage")
        usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
        registers, stack, static, local = (int(x) for x in usage.groups())
        # Disassembly takes longest. It is needed only for uniform registers and for kernels that use local memory.
        listing = output_of("nvdisasm", "-c", "-ndf") if uniform or stack + local else ""
    return {
        "registers": registers,
        "local_bytes": stack + local,
        "static_shared_bytes": static,
        "unset_registers": unset_registers(listing) if uniform else [],
        "early_reloads": early_reloads(listing),
    }


def _added_twice(ttgir: str) -> list[str]:
    """Return the tiles that inline assembly adds to shared memory although several threads hold the same value.

    If a layout is larger than a tile, several threads hold each value, and each of them would add it.
    """
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\S+<.*>)$", ttgir, re.M))
    tiles = []
    for line in ttgir.splitlines():
        if "elementwise_inline_asm" in line and "red.shared" in line:
            for shape, name in re.findall(r"tensor<((?:\d+x)+)\w+, (#\w+)>", line):
                sizes = [int(size) for size in shape.split("x") if size]
                if _repeated(layouts[name], sizes):
                    tiles.append(f"{shape[:-1]} in {layouts[name]}")
    return sorted(set(tiles))


def _repeated(layout: str, sizes: list[int]) -> bool:
    """Return whether this layout puts a value of a tile of these sizes into more than one thread."""
    if "linear" in layout:  # a lane or warp bit with a zero basis: two threads hold the same value
        lanes, warps = (re.search(rf"\b{part} = \[(.*?)\](?:, \w+ =|\}})", layout)[1] for part in ("lane", "warp"))
        return any(set(re.findall(r"\d+", basis)) == {"0"} for basis in re.findall(r"\[[\d, ]+\]", lanes + warps))
    return any(have > size for have, size in zip(_covered(layout), sizes))


def _covered(layout: str) -> list[int]:
    """Return the shape of the tile that the threads of a program cover once; layout: any but a linear one."""

    def numbers(name: str) -> list[int]:
        return [int(n) for n in re.search(name + r" = \[([\d, ]+)\]", layout)[1].split(",")]

    if "nvidia_mma" in layout:
        return [a * b for a, b in zip(numbers("warpsPerCTA"), numbers("instrShape"))]
    return [a * b * c for a, b, c in zip(*map(numbers, ("sizePerThread", "threadsPerWarp", "warpsPerCTA")))]


def unset_registers(listing: str) -> list[str]:
    """Return the instructions of a disassembly that read a uniform register that has no value, or an outdated one.

    ptxas 12.8 omitted a copy when two wgmma descriptors begin with the same bits (two tiles that alternate in one
    buffer of shared memory). The kernel then read out of bounds, or another tile, without an error.
    """
    return _never_written(listing) + _left_over(listing)


def _instructions(listing: str) -> Iterator[tuple[str, str, str]]:
    """Yield (line, name, operands) of each instruction."""
    for line in listing.splitlines():
        match = re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s+(.*?)\s*;", line)
        if match:
            yield line.strip(), *match.groups()


def _left_over(listing: str) -> list[str]:
    """Return the instructions that read an older value of a uniform register.

    They are found where the upper half of a descriptor is a constant plus the carry of the lower half plus a term,
    which should be 0. Bits 20 to 29 of the constant are then 0, unlike in other instructions of this form.
    """
    last: dict[str, str] = {}
    instructions = []
    for line, name, operands in _instructions(listing):
        upper = re.match(r"UR\d+, (UR\d+), (-?0x[0-9a-f]{8}), URZ, UP\d, !UPT", operands)
        if name == "UIADD3.X" and upper and not int(upper[2], 16) & 0x3FF00000:
            source = last.get(upper[1], "")
            if source.startswith("R2UR"):
                source = last.get(source.split(", ")[-1], "")
            if not re.search(r", U?RZ$|, 0x0$", source):
                instructions.append(line)
        target = re.match(r"(U?R)(\d+)", operands)
        if target:
            for i in range(2 if ".64" in name or "WIDE" in name or name.startswith("CS2R") else 1):
                last[f"{target[1]}{int(target[2]) + i}"] = f"{name} {operands}"
    return instructions


def _never_written(listing: str) -> list[str]:
    """Return the instructions that read a uniform register before any instruction has written it."""
    written: set[int] = set()
    lines = []
    for line, name, operands in _instructions(listing):
        target, _, sources = operands.partition(",")
        if target.startswith("UP") and sources.lstrip().startswith("UR"):  # a predicate comes before the number
            target, _, sources = sources.partition(",")
        writes = name.startswith(("U", "R2UR", "S2UR", "VOTEU", "REDUX", "CS2UR"))
        if not writes:
            sources = operands
        wide = 2 if "desc[" in sources or (writes and ".64" in name) else 1
        read = {int(r) + i for r in re.findall(r"UR(\d+)", sources) for i in range(wide)}
        descriptors = re.search(r"gdesc\[UR(\d+)\]", sources)
        if descriptors:  # descriptors of both operands; if the left one is in registers, only the second counts
            first = 2 if re.match(r"\s*R\d+, R\d+", operands) else 0
            read = {int(descriptors[1]) + i for i in range(first, 4)}
        if read - written:
            lines.append(line)
        if writes:
            span = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
            written |= {int(r) + i for r in re.findall(r"UR(\d+)", target) for i in range(span)}
    return lines


# Bytes that LDL and STL move, by a part of their name; 4 without one.
_WIDTHS = {".128": 16, ".64": 8, "16": 2, "8": 1}


def early_reloads(listing: str) -> list[str]:
    """Return the instructions of a disassembly that load from a stack slot after the last use of its value.

    After a load marked as the last use of a stored value (LDL.LU), a store must come before the next load. ptxas 12.8
    placed a load of half a register before the store (in kernels that spill 4 KB a thread). The kernel then computed
    with the value of another register, without an error. A load of a pair may be early for its lower register, if that
    register is written before it is read.
    """
    lines = []
    # Jumps may lead to a label, so the content of the stack is known only from a label to the next one.
    for stretch in re.split(r"^\s*\.L\w*:", listing, flags=re.M):
        released: set[int] = set()  # bytes of the stack after their last use
        instructions = list(_instructions(stretch))
        for i, (line, name, operands) in enumerate(instructions):
            slot = re.search(r"\[R1(?:\+(0x[0-9a-f]+))?\]", operands)
            if not slot or not name.startswith(("LDL", "STL")):
                continue
            begin = int(slot[1] or "0", 16)
            width = next((n for kind, n in _WIDTHS.items() if kind in name), 4)
            place = set(range(begin, begin + width))
            if name.startswith("STL"):
                released -= place
                continue
            if stale := place & released:
                lower = ".64" in name and max(stale) < begin + 4
                if not (lower and _written_next(operands.split(",")[0], instructions[i + 1 :])):
                    lines.append(line)
            if ".LU" in name and "@" not in line:
                released |= place
    return lines


def _written_next(register: str, instructions: list[tuple[str, str, str]]) -> bool:
    """Return whether the first instruction that names the register writes it."""
    named = re.compile(rf"\b{register}\b")
    for _, _, operands in instructions:
        if count := len(named.findall(operands)):
            return count == 1 and operands.split(",")[0] == register
    return False
