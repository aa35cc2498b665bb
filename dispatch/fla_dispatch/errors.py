"""Every message that binding, choosing or differentiating a call can give: one author, one file.

Each function returns the exception (or the text of a warning); the caller raises it.
"""

import difflib
import os
import sys
import warnings

import torch

FRONT = "<front of {}>"  # the file name of a public operator's generated front
_OURS = (os.path.dirname(__file__) + os.sep, FRONT.partition("{")[0])
composing = set()  # code that makes calls of other calls: whoever called it is meant, not who wrote those


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that called the operator."""
    level, depth, frame = None, 0, sys._getframe()
    while frame is not None:
        depth += 1
        if frame.f_code in composing:
            level = None
        elif level is None and not frame.f_code.co_filename.startswith(_OURS):
            level = depth
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=depth if level is None else level)


def _shape(shape) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- arguments -------------------------------------------------------------------------------------------------------


def unknown_keyword(function, name, known):
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean `{near[0]}`?" if near else f"; it takes {', '.join(known)}"
    return TypeError(f"{function}: unknown keyword `{name}`{hint}")


def removed_keyword(function, name, advice):
    return DeprecationWarning(f"{function}: `{name}` has been removed: {advice}")


def renamed_keyword(function, old, new):
    return f"{function}: `{old}` is the deprecated name of `{new}`"


def given_under_both_names(function, old, new):
    return ValueError(f"{function}: `{old}` is the old name of `{new}`; give only `{new}`")


def given_twice(function, name):
    return TypeError(f"{function}: `{name}` is given by position and by keyword")


def too_many_positional(function, given, taken):
    return TypeError(f"{function}: takes {taken} positional arguments, {given} were given")


def missing(function, names):
    return TypeError(f"{function}: missing {', '.join(f'`{name}`' for name in names)}")


def not_a_tensor(function, name, shape, value):
    return TypeError(f"{function}: `{name}` must be a tensor [{shape}], not {type(value).__name__}")


def wrong_pair(function, name, wanted, count):
    return TypeError(f"{function}: `{name}` must be a tensor or a pair {wanted}, not {count} values")


def wrong_option(function, name, expected, value):
    return TypeError(f"{function}: `{name}` must be {expected}, not {type(value).__name__} {value!r}")


# --- shapes, dtypes, devices -----------------------------------------------------------------------------------------


def wrong_rank(function, name, shapes, shape):
    wanted = " or ".join(f"[{', '.join(text.split())}]" for text in shapes)
    return ValueError(f"{function}: `{name}` is {wanted}, but a tensor of shape {_shape(shape)} was given")


def dims_disagree(function, name, dims, shape, letter, size, other, other_dims, other_shape, other_size):
    return ValueError(
        f"{function}: `{name}` [{dims}] has {letter}={size} (shape {_shape(shape)}), "
        f"while `{other}` [{other_dims}] has {letter}={other_size} (shape {_shape(other_shape)})"
    )


def outer_axes_disagree(function, name, shape, other, other_shape):
    return ValueError(
        f"{function}: `{name}` has shape {_shape(shape)}, while `{other}` has shape {_shape(other_shape)}; "
        "they must have the same axes in front"
    )


def wrong_product(function, name, dims, shape, position, expected, text):
    return ValueError(
        f"{function}: `{name}` [{dims}] must have {text} = {expected} in axis {position}, "
        f"but a tensor of shape {_shape(shape)} was given"
    )


def wrong_dtype(function, name, allowed, dtype):
    return TypeError(f"{function}: `{name}` must be {' or '.join(map(_dtype, allowed))}, not {_dtype(dtype)}")


def dtypes_disagree(function, name, dtype, other, other_dtype):
    return TypeError(
        f"{function}: `{name}` is {_dtype(dtype)} while `{other}` is {_dtype(other_dtype)}; they must be the same"
    )


def devices_disagree(function, name, device, other, other_device):
    return ValueError(
        f"{function}: `{name}` is on {device} while `{other}` is on {other_device}; move them to one device"
    )


def must_be_on_host(function, name, device):
    return ValueError(f"{function}: `{name}` is the host copy and must be on the CPU, not on {device}")


def rule_broken(function, message, condition, values, error=ValueError):
    shown = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return error(f"{function}: {message} (rule `{condition}`; {shown})")


# --- packed sequences ------------------------------------------------------------------------------------------------


def packed_batch(function, batch):
    return ValueError(
        f"{function}: the batch size must be 1 with `cu_seqlens`, not {batch}; "
        f"flatten the inputs to one row of tokens first (x.reshape(1, -1, *x.shape[2:]))"
    )


def wrong_state_count(function, name, given, expected, packed):
    origin = "`cu_seqlens` describes" if packed else "the batch holds"
    return ValueError(f"{function}: `{name}` holds {given} initial states, but {origin} {expected} sequences")


def empty_cu_seqlens(function, name):
    return ValueError(f"{function}: `{name}` is empty; it needs at least the entry 0")


def cu_seqlens_start(function, name, first):
    return ValueError(f"{function}: `{name}` must start at 0, not at {first}")


def cu_seqlens_order(function, name, index, before, after):
    return ValueError(f"{function}: `{name}` must not decrease: entry {index} is {after}, the one before is {before}")


def cu_seqlens_end(function, name, last, tokens):
    return ValueError(f"{function}: `{name}` ends at {last}, past the T={tokens} tokens given")


def host_copy_alone(function, name, device_name):
    return ValueError(f"{function}: `{name}` is a host copy of `{device_name}` and needs it")


def host_copy_differs(function, name, device_name):
    return ValueError(f"{function}: `{name}` and `{device_name}` hold different values")


# --- choosing --------------------------------------------------------------------------------------------------------


class BackendRefused(RuntimeError):
    """A backend was forced and cannot take the call; the message holds every reason."""


def forced_refusal(function, name, origin, reasons):
    return BackendRefused(
        f"{function}: backend `{name}` was forced by {origin} and refuses:\n"
        + "\n".join(f"  - {reason}" for reason in reasons)
    )


def unknown_backend(function, name, origin, known):
    return ValueError(f"{function}: {origin} asks for `{name}`, which no one registered; known: {', '.join(known)}")


def unknown_operator(name, known):
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean `{near[0]}`?" if near else f"; declared: {', '.join(known)}"
    return ValueError(f"no operator is called `{name}`{hint}")


def wrong_gate(variable, value):
    return ValueError(f"{variable} must be 0 or 1, not {value!r}")


def fallback_on_accelerator(function, device, refusals):
    lines = "".join(f"\n  - {name}: {reason}" for name, reason in refusals) or "\n  - no backend is registered"
    return (
        f"{function} runs its PyTorch fallback on {device}, which is slow; the backends refused:{lines}\n"
        f"facade.explain({function}, ...) shows the same for any call"
    )


def wrong_registration(problem):
    return TypeError(f"fla_dispatch.register: {problem}")


# --- differentiating -------------------------------------------------------------------------------------------------


def double_backward(function):
    return RuntimeError(
        f"{function} has no second derivative: its backward pass is a fixed computation that autograd cannot "
        f"differentiate. Drop create_graph=True for this operator, or differentiate facade.reference's recurrent form"
    )


def unknown_gradients(function, backend, names):
    return RuntimeError(f"{function}: backend `{backend}` returned gradients of {names}, which are not inputs")


def missing_gradients(function, backend, names):
    return RuntimeError(f"{function}: backend `{backend}` returned no gradient of {names}")
