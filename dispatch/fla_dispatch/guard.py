"""What kernels may take for granted, set once for every operator: contiguous tensors, the right device, autocast.

``input_guard``, ``autocast_custom_fwd`` and ``autocast_custom_bwd`` give kernels from outside the same.
"""

import contextlib
import functools
import sys

import torch


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as its memory shows it: contiguous, with no pending negation or conjugation."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def is_fake(value) -> bool:
    """Whether ``value`` is a FakeTensor. Their module costs a second to import, and without it there are none."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(value, module.FakeTensor)


def device_guard(device: torch.device):
    """Make ``device`` current, where a device can be current."""
    if device.type == "cpu" or device.type == "meta":
        return contextlib.nullcontext()
    module = getattr(torch, device.type)
    if device.index is None or module.current_device() == device.index:
        return contextlib.nullcontext()
    return module.device(device.index)


def input_guard(function=None, *, no_guard_contiguous: bool | tuple[str, ...] = False):
    """Decorator: every tensor argument contiguous (or all but those named), and the first one's device current."""
    if function is None:
        return functools.partial(input_guard, no_guard_contiguous=no_guard_contiguous)
    spared = no_guard_contiguous if isinstance(no_guard_contiguous, tuple) else ()
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]

    def guarded(name, value):
        if not isinstance(value, torch.Tensor) or no_guard_contiguous is True or name in spared:
            return value
        return plain(value)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        labels = (*names, *(None,) * (len(args) - len(names)))[: len(args)]
        args = tuple(guarded(name, value) for name, value in zip(labels, args, strict=True))
        kwargs = {name: guarded(name, value) for name, value in kwargs.items()}
        first = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)), None)
        with contextlib.nullcontext() if first is None else device_guard(first.device):
            return function(*args, **kwargs)

    return wrapper


def autocast_custom_fwd(function=None, *, device_type: str = "cuda"):
    """``torch.amp.custom_fwd`` without casting: forward runs in the ambient autocast state and records it."""
    if function is None:
        return functools.partial(autocast_custom_fwd, device_type=device_type)
    return torch.amp.custom_fwd(function, device_type=device_type)


def autocast_custom_bwd(function=None, *, device_type: str = "cuda"):
    """``torch.amp.custom_bwd``: backward re-enters the autocast state of its forward."""
    if function is None:
        return functools.partial(autocast_custom_bwd, device_type=device_type)
    return torch.amp.custom_bwd(function, device_type=device_type)


def autocast_setting(device_type: str):
    """The autocast state of now, for ``autocast_again``; None where the device has none."""
    if not torch.amp.is_autocast_available(device_type):
        return None
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def autocast_again(device_type: str, setting):
    """A context in the autocast state of then."""
    if setting is None or setting == autocast_setting(device_type):
        return contextlib.nullcontext()
    enabled, dtype = setting
    return torch.autocast(device_type, dtype=dtype, enabled=enabled)
