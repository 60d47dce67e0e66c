"""Report the installed packages, whether they work together, and what to install otherwise.

Run it as a file (`python tools/doctor.py`, `make doctor`). It needs Python alone. Exit status: 0 if everything fits
and works, else 1.
"""

import importlib
import platform
import shutil
import subprocess
import sys
from importlib import metadata

# torch's release -> the releases of the packages that are built against it. make setup installs those of TESTED.
COMBINATIONS = {
    "2.11": {"triton": "3.6.0", "fbgemm": "1.6.0", "torchrec": "1.6.1"},
    "2.12": {"fbgemm": "1.7.0", "torchrec": "1.7.0"},
    "2.13": {"triton": "3.7.1", "fbgemm": "1.8.0", "torchrec": "1.8.0"},
    "2.14": {"triton": "3.8.0", "fbgemm": "1.9.0", "torchrec": "1.9.2"},
}
TESTED = "2.13"


def version(*names: str) -> tuple[str, str] | None:
    """Return (name, version) of the first of the distributions that is installed."""
    for name in names:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def gpu() -> str | None:
    """Return the GPU's name and driver from nvidia-smi, or None."""
    if not shutil.which("nvidia-smi"):
        return None
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        process = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip().splitlines()[0] if process.returncode == 0 and process.stdout.strip() else None


def mismatches(versions: dict[str, str | None], fbgemm_name: str | None, has_gpu: bool) -> list[str]:
    """Return what to install, one line for each version that does not fit.

    versions: the versions of torch, triton, torchrec and fbgemm, None if absent; fbgemm_name: the name of the installed
    distribution.
    """
    fbgemm = "fbgemm-gpu" if has_gpu else "fbgemm-gpu-cpu"
    release = ".".join((versions["torch"] or "").split("+")[0].split(".")[:2])
    lines = []
    if versions["torch"] is None:
        release = TESTED
        lines.append(f"torch is missing: pip install torch=={TESTED}.0")
    elif release not in COMBINATIONS:
        lines.append(
            f"torch {versions['torch']} is not one of {', '.join(COMBINATIONS)}: pip install torch=={TESTED}.0"
        )
        release = TESTED
    for name, expected in COMBINATIONS[release].items():
        package = fbgemm if name == "fbgemm" else name
        command = f"pip install {'--no-deps ' if name == 'torchrec' else ''}{package}=={expected}"
        installed = versions[name]
        if installed is None:
            lines.append(f"{package} is missing: {command}")
        elif installed.split("+")[0].split(".")[:2] != expected.split(".")[:2]:
            lines.append(f"{name} {installed} does not work with torch {release}: {command}")
    if versions["fbgemm"] and has_gpu and fbgemm_name == "fbgemm-gpu-cpu":
        expected = COMBINATIONS[release]["fbgemm"]
        lines.append(
            f"fbgemm-gpu-cpu has no CUDA operators: pip uninstall fbgemm-gpu-cpu; pip install fbgemm-gpu=={expected}"
        )
    return lines


def check(label: str, test) -> str | None:
    """Run `test` and print its result; return the error in one line, or None."""
    try:
        print(f"  {label:<28} {test()}")
        return None
    except Exception as error:  # a broken installation may raise anything
        first = (str(error).strip().splitlines() or [""])[0]
        print(f"  {label:<28} FAILS: {type(error).__name__}: {first}")
        return f"{label}: {first}"


def _torch() -> str:
    torch = importlib.import_module("torch")
    return f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"


def _jagged_operators() -> str:
    torch = importlib.import_module("torch")
    importlib.import_module("fbgemm_gpu")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    offsets = torch.tensor([0, 1, 3], device=device)
    dense = torch.ops.fbgemm.jagged_to_padded_dense(torch.ones(3, 1, device=device), [offsets], [2], 0.0)
    if dense.sum().item() != 3:
        raise RuntimeError("jagged_to_padded_dense gives a wrong result")
    return f"work on {device}"


def _torchrec() -> str:
    torch = importlib.import_module("torch")
    torchrec = importlib.import_module("torchrec")
    table = torchrec.EmbeddingConfig(name="t", embedding_dim=2, num_embeddings=3, feature_names=["f"])
    features = torchrec.KeyedJaggedTensor(keys=["f"], values=torch.tensor([2]), lengths=torch.tensor([1]))
    torchrec.EmbeddingCollection(tables=[table])(features)
    return "EmbeddingCollection works"


def _cuda() -> str:
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU: CUDA_VISIBLE_DEVICES, a CPU build, or a driver older than torch's CUDA")
    return f"{torch.cuda.get_device_name()}, capability {torch.cuda.get_device_capability()}"


def _triton() -> str:
    triton = importlib.import_module("triton")
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return f"{triton.__version__} loads; kernels run in its interpreter only (TRITON_INTERPRET=1)"
    return f"{triton.__version__}, active driver: {triton.runtime.driver.active.get_current_target()}"


def _cute() -> str:
    """Import FlashAttention-4 (the extra `cute`) and run it once on a GPU that it supports."""
    attention = importlib.import_module("flash_attn.cute")
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available() or not (9, 0) <= torch.cuda.get_device_capability() < (12, 0):
        return "FlashAttention-4 loads; backend=cute needs a GPU of compute capability 9.0 to 11.x"
    q = torch.ones(1, 128, 1, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    out = attention.flash_attn_func(q, q, q, causal=True, deterministic=True)[0]
    out.sum().backward()
    if not (out == 1).all() or not q.grad.isfinite().all():
        raise RuntimeError("FlashAttention-4 gives a wrong result")
    return "FlashAttention-4 computes: backend=cute works"


def main() -> int:
    """Print what is installed and what to install; return the exit status."""
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    card = gpu()
    print(f"GPU: {card or 'none (nvidia-smi does not answer)'}")
    installed = {
        "torch": version("torch"),
        "triton": version("triton"),
        "torchrec": version("torchrec"),
        "fbgemm": version("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm_gpu-cpu"),
    }
    if not any(installed.values()):
        print("! Nothing is installed yet: make setup installs the tested versions into .venv")
        return 1
    cute = version("flash-attn-4")
    for name, entry in installed.items():
        print(f"  {name:<28} {' '.join(entry) if entry else 'not installed'}")
    print(f"  {'extra cute':<28} {' '.join(cute) if cute else 'not installed: optional, for backend=cute'}")
    versions = {name: entry[1] if entry else None for name, entry in installed.items()}
    fbgemm_name = installed["fbgemm"][0].replace("_", "-") if installed["fbgemm"] else None
    problems = mismatches(versions, fbgemm_name, card is not None)
    print("checks")
    tests = [("torch", _torch), ("fbgemm jagged operators", _jagged_operators), ("torchrec", _torchrec)]
    tests += [("triton", _triton)] + ([("CUDA", _cuda)] if card else []) + ([("extra cute", _cute)] if cute else [])
    failures = [failure for label, test in tests if (failure := check(label, test))]
    for line in problems + failures:
        print(f"! {line}")
    if not problems and not failures:
        print("Everything fits.")
    elif failures and not problems:
        print("! The versions fit but a check fails: remove .venv and run make setup again.")
    return 1 if problems or failures else 0


if __name__ == "__main__":
    # Python puts the folder of this file first on the path; no module must be imported from it by accident.
    sys.path.pop(0)
    sys.exit(main())
