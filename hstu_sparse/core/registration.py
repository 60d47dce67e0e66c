"""Register operators with kernels in torch: schemas, fakes, autograd.

An `Operator` is registered with torch.library, so that torch.compile and opcheck support it. It has two launchers, for
the forward and the backward pass. They run on the device of the tensors, which need not be the current one. Integer
and one-dimensional tensors are made contiguous for them.

For a short kernel the call takes longer on the host than on the GPU. Calls in eager mode with plain tensors therefore
bypass torch's dispatcher: an autograd.Function calls the launchers. All other calls (torch.compile, fake tensors,
tensor subclasses, dispatch modes) use the registered operators. torch.library.custom_op would take several times as
long.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch.autograd import forward_ad

from hstu_sparse.core.launch import is_imagined, on_device
from hstu_sparse.core.precision import without_autocast

_library = torch.library.Library("hstu_sparse", "FRAGMENT")


def plain(x: torch.Tensor) -> bool:
    """Return whether x is a plain tensor, not of a subclass (such as a fake tensor), outside of dispatch modes."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) and not torch._C._len_torch_dispatch_stack()


def launches_directly(x: torch.Tensor) -> bool:
    """Return whether a call with x bypasses the dispatcher: x is `plain`, or the code runs inside `launch.imagined`."""
    return plain(x) or is_imagined()


Constant = TypeVar("Constant")


def cached_constant(function: Callable[..., Constant]) -> Callable[..., Constant]:
    """Decorate a function that creates tensors from its arguments: cache the last 64 results.

    Results are not cached under torch.compile, torch.func and dispatch modes, nor while a CUDA graph is captured: these
    tensors get their values only when the graph runs. The function must name the device of every tensor that it
    creates, since torch's default device may change between calls.
    """
    stored: dict[tuple, Constant] = {}

    @functools.wraps(function)
    def get(*arguments):
        transforms = torch._C._functorch.peek_interpreter_stack()
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or transforms is not None:
            return function(*arguments)
        value = stored.get(arguments)
        if value is None:
            with torch.inference_mode(False):  # an inference tensor cannot be saved for a later backward pass
                value = function(*arguments)
            if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
                if len(stored) == 64:
                    del stored[next(iter(stored))]
                stored[arguments] = value
        return value

    return get


def _tensor_indices(arguments: str) -> tuple[int, ...]:
    """Return the indices of the tensor arguments of a schema."""
    types = (argument.split(" ")[0] for argument in arguments.split(", "))
    return tuple(i for i, type_ in enumerate(types) if type_ in ("Tensor", "Tensor?"))


def _on_device_of_arguments(launch: Callable, tensors: Sequence[int]) -> Callable:
    """Wrap `launch` to run on the device of the first argument that is not None.

    tensors: indices of arguments; those that are integer or one-dimensional tensors are made contiguous.
    """

    @functools.wraps(launch)
    def run(*arguments):
        x = next(a for a in arguments if a is not None)
        for i in tensors:
            a = arguments[i]
            if a is not None and not a.is_contiguous() and (a.dim() == 1 or not a.is_floating_point()):
                arguments = *arguments[:i], a.contiguous(), *arguments[i + 1 :]
        if x.get_device() >= 0 and x.get_device() != torch.cuda.current_device():
            with on_device(x.device):
                return launch(*arguments)
        return launch(*arguments)

    return run


class Operator:
    """The operators torch.ops.hstu_sparse.<name>_fwd and <name>_bwd. A call runs the forward operator with autograd.

    Args:
        name: the name of the operator.
        arguments: the schema, like "Tensor q, Tensor? u, Tensor?[] plan, SymInt n, float eps"; the first is a Tensor.
        forward: (*arguments) -> the output, or a tuple of `outputs` tensors. The first `graded` are differentiable; the
            others are saved for backward.
        backward: (gradients of the graded outputs, *arguments, *saved outputs) -> the gradient of each differentiable
            argument that is not None, in order, contiguous, with the argument's shape and dtype. With several graded
            outputs, some of their gradients may be None.
        fake: (*arguments) -> outputs of the right shape and dtype (new_empty), computed without the data.
        differentiable: the names of the differentiable arguments, separated by spaces.
        outputs: the number of tensors that forward returns.
        graded: the number of differentiable outputs.
        keep_output: backward also gets the first output, before the saved outputs.
        overwrites_saved: backward overwrites the last saved output. A second backward pass through a retained graph
            runs `forward` again; the registered backward operator overwrites a copy.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        forward: Callable,
        backward: Callable,
        fake: Callable,
        differentiable: str,
        *,
        outputs: int = 1,
        graded: int = 1,
        keep_output: bool = False,
        overwrites_saved: bool = False,
    ):
        names = [argument.split(" ")[1] for argument in arguments.split(", ")]
        self.name, self.outputs, self.graded = name, outputs, graded
        self.keep_output, self.overwrites_saved = keep_output, overwrites_saved
        self.tensors = _tensor_indices(arguments)
        self.others = [i for i in range(len(names)) if i not in self.tensors]
        self.differentiable = [names.index(argument) for argument in differentiable.split()]
        self.forward = _on_device_of_arguments(forward, self.tensors)
        tensors = [*range(graded), *(i + graded for i in self.tensors)]
        self.backward = without_autocast(_on_device_of_arguments(backward, tensors))
        self.function = _autograd(self)

        saved_outputs = "".join(f", Tensor saved_{i}" for i in range(0 if keep_output else graded, outputs))
        grads = "Tensor grad" if graded == 1 else ", ".join(f"Tensor? grad_{i}" for i in range(graded))
        result = "Tensor" if outputs == 1 else f"({', '.join(['Tensor'] * outputs)})"
        for part, schema in (
            ("fwd", f"({arguments}) -> {result}"),
            ("bwd", f"({grads}, {arguments}{saved_outputs}) -> Tensor[]"),
        ):
            _library.define(f"{name}_{part}{schema}", tags=torch.Tag.pt2_compliant_tag)
        backward = self._backward_on_copy if overwrites_saved else self.backward
        for device in ("CPU", "CUDA"):
            _library.impl(f"{name}_fwd", self.forward, device)
            _library.impl(f"{name}_bwd", backward, device)
        _library.impl(f"{name}_fwd", self.function.apply, "Autograd")
        torch.library.register_fake(f"hstu_sparse::{name}_fwd", fake, lib=_library)
        torch.library.register_fake(f"hstu_sparse::{name}_bwd", self._fake_gradients, lib=_library)
        self.registered_forward = getattr(torch.ops.hstu_sparse, f"{name}_fwd").default
        self.registered_backward = getattr(torch.ops.hstu_sparse, f"{name}_bwd").default

    def __call__(self, *arguments):
        if torch.compiler.is_compiling():
            return self.registered_forward(*arguments)
        # Inside forward_ad.dual_level the Function raises an error for a tangent, which a launcher would ignore.
        if not torch.is_grad_enabled() and launches_directly(arguments[0]) and forward_ad._current_level < 0:
            return self.forward(*arguments)
        return self.function.apply(*arguments)

    def _backward_on_copy(self, *arguments):
        return self.backward(*arguments[:-1], arguments[-1].clone())

    def _fake_gradients(self, *arguments):
        differentiable = (arguments[i + self.graded] for i in self.differentiable)
        return [x.new_empty(x.shape) for x in differentiable if x is not None]


def _autograd(operator: Operator) -> type[torch.autograd.Function]:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            if launches_directly(arguments[0]):
                result = operator.forward(*arguments)
            else:
                with torch._C._AutoDispatchBelowAutograd():
                    result = operator.registered_forward(*arguments)
            outputs = (result,) if operator.outputs == 1 else result
            saved, output = list(outputs[operator.graded :]), outputs[:1] if operator.keep_output else ()
            ctx.others = [arguments[i] for i in operator.others]
            ctx.mark_non_differentiable(*saved)
            if operator.overwrites_saved:
                ctx.overwritten = saved.pop()
            ctx.save_for_backward(*(arguments[i] for i in operator.tensors), *output, *saved)
            ctx.set_materialize_grads(False)
            return result

        @staticmethod
        def backward(ctx, *grads):
            count, grads = len(operator.tensors) + len(operator.others), grads[: operator.graded]
            grad = next((x for x in grads if x is not None), None)
            if grad is None:
                return (None,) * count
            arguments, saved = [None] * count, ctx.saved_tensors
            for places, values in ((operator.tensors, saved), (operator.others, ctx.others)):
                for place, value in zip(places, values):
                    arguments[place] = value
            inputs = (*grads, *arguments, *saved[len(operator.tensors) :])
            if operator.overwrites_saved:
                overwritten, ctx.overwritten = ctx.overwritten, None
                inputs += (operator.registered_forward(*arguments)[-1] if overwritten is None else overwritten,)
            if not launches_directly(grad):
                computed = operator.registered_backward(*inputs)
            elif torch.is_grad_enabled():
                raise RuntimeError(f"{operator.name} has no second derivative in Triton: use backend='reference'")
            else:
                computed = operator.backward(*inputs)
            gradients = [None] * len(arguments)
            differentiable = [i for i in operator.differentiable if arguments[i] is not None]
            for place, gradient in zip(differentiable, computed, strict=True):
                gradients[place] = gradient
            return tuple(gradients)

    Function.__name__ = Function.__qualname__ = operator.name
    return Function


def no_second_derivative(name: str) -> Callable:
    """Decorate the backward of an autograd.Function that is not twice differentiable: raise under create_graph.

    torch's once_differentiable raises only if the incoming gradient requires grad; otherwise the second derivative
    would silently be 0.
    """

    def decorate(backward: Callable) -> Callable:
        @functools.wraps(backward)
        def run(ctx, *grads):
            twice = not torch.compiler.is_compiling() and torch.is_grad_enabled()
            if twice and all(launches_directly(grad) for grad in grads if grad is not None):
                raise RuntimeError(f"{name} has no second derivative")
            return backward(ctx, *grads)

        return run

    return decorate


def register_preparation(name: str, arguments: str, launch: Callable, fake: Callable) -> Callable:
    """Register torch.ops.hstu_sparse.<name>, which computes tensors, such as a plan of a batch; not differentiable.

    Args:
        name, arguments: as for an `Operator`.
        launch: (*arguments) -> list of new tensors.
        fake: (*arguments) -> list of tensors of the right shapes and dtypes, computed without the data.

    Returns:
        A function (*arguments) -> the list, which bypasses the dispatcher for plain tensors.
    """
    ready = _on_device_of_arguments(launch, _tensor_indices(arguments))
    _library.define(f"{name}({arguments}) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
    for device in ("CPU", "CUDA"):
        _library.impl(name, ready, device)
    torch.library.register_fake(f"hstu_sparse::{name}", fake, lib=_library)
    registered = getattr(torch.ops.hstu_sparse, name).default

    def call(*inputs):
        return (
            registered(*inputs) if torch.compiler.is_compiling() or not launches_directly(inputs[0]) else ready(*inputs)
        )

    return call
