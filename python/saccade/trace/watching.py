"""What a mod reads of real tensors while it is traced, besides elements at traced indices."""

from __future__ import annotations

import random
import sys

from .errors import fail, of_name
from .grad_mode import of_caller
from .symbols import Symbol, find_tracer

_SHAPES = frozenset(
    "shape ndim size dim numel nelement stride ndimension __len__ is_contiguous".split()
)
_OF_VALUES = frozenset(("__len__", "is_contiguous"))  # of these that Python has a value of
_HARMLESS = frozenset(
    "dtype device is_cuda is_cpu layout requires_grad is_leaf is_floating_point element_size "
    "is_complex grad_fn get_device itemsize names __hash__ is_signed is_nested is_sparse "
    "is_quantized is_meta is_mkldnn is_mps is_xpu __format__ is_grad_enabled "
    "_set_grad_enabled is_inference_mode_enabled".split()
)
_VIEWS = frozenset(  # the result is the tensor's own memory
    "view transpose permute t T mT swapaxes swapdims movedim unsqueeze squeeze expand data "
    "expand_as select narrow detach unbind split chunk view_as broadcast_to diagonal".split()
)


_RANDOM = frozenset(
    "rand randn randint randperm normal bernoulli multinomial poisson rand_like randn_like "
    "randint_like bernoulli_ normal_ uniform_ random_ exponential_".split()
)
_AUGMENTED = frozenset(
    f"__i{n}__" for n in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()
)


NO_DRAWS = (
    "got {}, whose one draw would serve all scores, expected a tensor of draws made outside of "
    "the mod: draws[b, h, q_idx, kv_idx]"
)


def draws() -> list:
    """The states of Python's and NumPy's own generators, which drawing changes."""
    found: list = [random.getstate()]
    if "numpy.random" in sys.modules:
        state = sys.modules["numpy.random"].get_state(legacy=False)
        found += [state.get("has_gauss"), state.get("gauss")]  # a draw of two leaves one
        numbers = state["state"].values()
        found += [x.tobytes() if hasattr(x, "tobytes") else x for x in numbers]
    return found


def _changes_its_argument(name: str) -> bool:
    if name.startswith("__"):
        return name in _AUGMENTED or name == "__setitem__"
    return name.endswith("_")


def _has_tensor(arguments) -> bool:
    return any(
        _has_tensor(a) if isinstance(a, (tuple, list)) else hasattr(a, "stride")
        for a in arguments
    )


def _is_view(name, args) -> bool:
    if name in _VIEWS:
        return True
    if name != "__getitem__":
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(i is None or i is Ellipsis or type(i) in (int, slice) for i in index)


def watching(tracer, gradients: bool):
    """Notes what the mod reads of real tensors besides elements at traced indices, which it
    computes with gradients as its caller does."""
    from torch.overrides import TorchFunctionMode

    own: dict[int, object] = {}  # what the mod itself made; it may change that

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if tracer.inside:
                return func(*args, **kwargs)
            if find_tracer(args, kwargs) is not None:
                return Symbol.__torch_function__(func, types, args, kwargs)
            first = next(iter((*args, *kwargs.values())), None)
            name = getattr(func, "__name__", "")
            if name == "__get__":
                name = getattr(func.__self__, "__name__", "")
            if name in _RANDOM:
                fail(NO_DRAWS.format(f"torch.{name}"))
            if name in _SHAPES:
                tracer.uses_shapes = True  # a graph's are numbers that are captured
                tracer.is_fixed |= name in _OF_VALUES
            elif _changes_its_argument(name) and id(first) not in own:
                fail(
                    f"got {name}, which changes a captured tensor{of_name(first)}; mods only "
                    "compute, they change nothing: clone() it, or compute it outside of the mod"
                )
            elif name not in _HARMLESS:
                is_view = _is_view(name, args)
                if not is_view:
                    tracer.volatile |= _has_tensor(args) or _has_tensor(kwargs.values())
                result = of_caller(gradients, func, args, kwargs)
                if not is_view or id(first) in own:
                    own[id(result)] = result
                return result
            return func(*args, **kwargs)

    return Watching()
