"""Define how all tests run kernels where there is no GPU: in Triton's interpreter, held to their tensors."""

import contextlib
import importlib.util
import os


@contextlib.contextmanager
def interpreted():
    """Within, interpreted kernels are checked for accesses outside of their tensors and spared needless work."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        yield
    else:
        from tests.operators.addresses import addresses_held
        from tests.operators.interpreter import quick_interpreter

        with addresses_held(), quick_interpreter():
            yield
