"""The compiled fast path, where it was built and fits this torch; otherwise the same classes in Python.

``FLA_DISPATCH_EXTENSION=0`` (read at import) leaves it out. It reads tensors through torch's DLPack exchange
functions, which exist from torch 2.10 on, so an older torch takes the Python path too.
"""

import importlib
import importlib.util
import os
import threading

import torch

from fla_dispatch import gates
from fla_dispatch.guard import plain

__all__ = ["BoundCall", "last_route", "note_route", "registry", "watch_gates"]


def _load():
    """The extension, ready for use, or None."""
    api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if os.environ.get("FLA_DISPATCH_EXTENSION") == "0" or api is None:
        return None
    if importlib.util.find_spec("fla_dispatch._registry") is None:
        return None
    module = importlib.import_module("fla_dispatch._registry")
    fits = module.configure(
        api,
        torch.Tensor,
        torch.nn.Parameter,
        torch.dtype,
        torch._C.TensorBase.requires_grad,
        torch.is_grad_enabled,
        torch.is_inference_mode_enabled,
        os.environ._data,
        gates.forced_backend,
        plain,
    )
    return module if fits else None


registry = _load()


def watch_gates() -> None:
    """Let the compiled path see the environment variables that steer the choice."""
    if registry is not None:
        registry.set_gates(tuple(os.environ.encodekey(name) for name in gates.variables()))


watch_gates()

if registry is not None:
    BoundCall = registry.BoundCall
    note_route = registry.note_route
    last_route = registry.last_route
else:

    class BoundCall:
        """A plan and the values bound to it."""

        __slots__ = ("plan", "values")

        def __init__(self, plan, values):
            object.__setattr__(self, "plan", plan)
            object.__setattr__(self, "values", values)

    _thread = threading.local()

    def note_route(route):
        _thread.route = route

    def last_route():
        """The route of this thread's last call, or None."""
        return getattr(_thread, "route", None)
