"""What the Triton kernels share: device functions, and helpers to launch and compile them.

Imported only when a kernel is needed, so `import hstu_sparse` works where triton is absent.

Two environments run the same kernel source. On CUDA they are compiled; under `TRITON_INTERPRET=1`, which must be set
before triton is first imported, they run on the CPU, where there is no inline assembly.
"""

import os

import torch
import triton
import triton.language as tl

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"

# Constexpr switches: inline assembly is there only in compiled kernels, tanh in one instruction too.
COMPILED = tl.constexpr(not INTERPRET)
FAST_TANH = COMPILED


@triton.jit
def tanh_approx(x):
    """tanh in one special-function instruction (relative error 2^-11): only where the result is rounded to 16 bits."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", constraints="=f,f", args=[x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    """1 / (1 + exp(-x)) in fp32. FAST uses tanh.approx, good to 2^-11: for fp16 and bf16 inputs."""
    if FAST and FAST_TANH:
        return 0.5 * tanh_approx(0.5 * x) + 0.5
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x, FAST: tl.constexpr):
    """x * sigmoid(x) in fp32."""
    if FAST and FAST_TANH:
        half = 0.5 * x
        return half * tanh_approx(half) + half
    else:
        return x / (1.0 + tl.exp(-x))


@triton.jit
def silu_and_grad(x, FAST: tl.constexpr):
    """(silu(x), its derivative) in fp32: the derivative is s + x s (1 - s) = s + y (1 - s) with y = x s."""
    s = sigmoid(x, FAST)
    y = x * s
    return y, s + y * (1.0 - s)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, (n - 1).bit_length())


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def padded_head(size: int) -> int:
    """Width of the tile that holds a head of `size`: a power of two, at least 16 (the least that tl.dot takes)."""
    return max(16, next_power_of_2(size))


def require_runnable(tensor: torch.Tensor, op: str) -> None:
    """Raises unless Triton kernels can run on this tensor: CUDA, or a CPU tensor under the interpreter."""
    if tensor.is_cuda:
        if INTERPRET:
            raise ValueError(f"{op}: TRITON_INTERPRET=1 is set, unset it to run on {tensor.device}")
        return
    if tensor.device.type == "cpu" and INTERPRET:
        return
    raise ValueError(
        f"{op}: backend='triton' needs CUDA tensors, got {tensor.device}; use backend='reference', or set "
        "TRITON_INTERPRET=1 before the first import to run the kernels in Triton's interpreter"
    )


def plain(x: torch.Tensor) -> bool:
    """No tensor subclass (a fake tensor is one) and no mode wants to see the operator.

    Then a launcher may be called as it is: dispatcher and torch.library's checks cost more time than a small kernel.
    """
    return type(x) in (torch.Tensor, torch.nn.Parameter) and not torch._C._len_torch_dispatch_stack()


def compile_ahead(
    kernel, signature: dict, constexprs: dict, *, arch: int, num_warps=4, num_stages=2, divisible=True, **options
):
    """Compiles one kernel for sm_`arch` without a GPU and reports what it uses.

    Args:
        kernel: a triton.jit function (not autotuned: pass `.fn` of an autotuned one).
        signature: argument name -> Triton type, e.g. {"q": "*bf16", "n": "i32"}; every argument must be in it or in
            `constexprs`.
        constexprs: argument name -> value.
        arch: 80 or 90.
        divisible: strides (`*stride_t`, `*stride_h`) are multiples of 16, as they are for most head sizes.
        options: Triton's other compile options, e.g. maxnreg.

    Returns:
        dict with `registers`, `local_bytes` (stack and spills, per thread), `shared_bytes`, `name`, `unset_registers`
        (see below), `asm`.
    """
    import re
    import subprocess
    import tempfile

    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if INTERPRET:
        raise RuntimeError("compile_ahead needs a process without TRITON_INTERPRET")
    names = kernel.arg_names
    signature = {name: signature.get(name, "constexpr") for name in names}
    aligned = [n for n in names if signature[n].startswith("*") or (n.endswith(("stride_t", "stride_h")) and divisible)]
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constexprs.items()}, attrs)
    options = {"num_warps": num_warps, "num_stages": num_stages, **options}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    tools = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        found, listing = (
            subprocess.run([os.path.join(tools, tool), option, file.name], capture_output=True, text=True, check=True)
            for tool, option in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "-c"))
        )
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", found.stdout)
    registers, stack, _, local = (int(x) for x in usage.groups())
    return {
        "name": kernel.__name__,
        "registers": registers,
        "local_bytes": stack + local,
        "shared_bytes": compiled.metadata.shared,
        "unset_registers": _unset_registers(listing.stdout),
        "asm": compiled.asm,
    }


def _unset_registers(listing: str) -> list[str]:
    """Instructions of a disassembly that read a uniform register which none before them has written.

    ptxas 12.8 was seen to forget a copy where two wgmma descriptors begin alike (two tiles that take turns in one
    buffer of shared memory), and the kernel to read outside of its memory on some data only. Nothing reports it.
    """
    import re

    written: set[int] = set()
    found = []
    for line in listing.splitlines():
        match = re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s+(.*?);", line)
        if not match:
            continue
        name, operands = match.groups()
        target, _, sources = operands.partition(",")
        if target.startswith("UP") and sources.lstrip().startswith("UR"):  # a predicate comes before the number
            target, _, sources = sources.partition(",")
        writes = name.startswith(("U", "R2UR", "S2UR", "VOTEU", "REDUX", "CS2UR"))
        if not writes:
            sources = operands
        wide = 2 if "desc[" in sources or (writes and ".64" in name) else 1
        read = {int(r) + i for r in re.findall(r"UR(\d+)", sources) for i in range(wide)}
        descriptors = re.search(r"gdesc\[UR(\d+)\]", sources)
        if descriptors:  # of both operands; with the left one in registers only the second pair counts
            first = 2 if re.match(r"\s*R\d+, R\d+", operands) else 0
            read = {int(descriptors[1]) + i for i in range(first, 4)}
        if read - written:
            found.append(line.strip())
        if writes:
            span = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
            written |= {int(r) + i for r in re.findall(r"UR(\d+)", target) for i in range(span)}
    return found
