"""Import what processes of `forked` need, in the process that they are forked from.

Garbage is not collected meanwhile, and never what was imported: forked processes would copy its memory.
"""

import gc
import importlib

MODULES = ["pytest", "tests.operators.distributed", "tests.operators.ring_cases", "tests.programs.test_scale"]
MODULES += ["torchrec", "torchrec.distributed.model_parallel", "torch.utils.tensorboard", "training.plots"]
MODULES += ["train", "eval", "serve"]

gc.disable()
for module in MODULES:
    importlib.import_module(module)
gc.freeze()
gc.enable()
