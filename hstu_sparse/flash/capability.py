"""Return the compute capability of a GPU as a constant of torch.compile.

The function has its own module, since its decorator imports torch._dynamo, which takes a second and is not needed
elsewhere.
"""

import torch

from hstu_sparse.core.launch import architecture


@torch.compiler.assume_constant_result
def constant_architecture(device: int) -> int:
    """Return the compute capability of the CUDA device with this index as one number, 90 for 9.0."""
    return architecture(torch.device("cuda", device))
