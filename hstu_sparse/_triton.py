"""Names that moved, until dense and bsa have followed."""

from hstu_sparse.launch import INTERPRET, cdiv, next_power_of_2, padded_head  # noqa: F401
from hstu_sparse.registration import plain  # noqa: F401
from hstu_sparse.tiles import COMPILED, sigmoid, silu, silu_and_grad, tanh_approx  # noqa: F401


def require_runnable(tensor, op):
    from hstu_sparse.validation import choose_backend

    choose_backend("triton", tensor, op)


def __getattr__(name):
    if name == "compile_ahead":
        from hstu_sparse.ahead import compile_ahead

        return compile_ahead
    raise AttributeError(name)
