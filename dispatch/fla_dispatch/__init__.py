"""The contract between operators and backends: declare, bind, choose, differentiate.

An operator is declared once, by its annotated signature (``dispatch``). A call is checked once and becomes an immutable
``Call``. A ``Backend`` is data that says what it takes, and two functions. The rest of the package derives from these.
"""

from fla_dispatch.backend import Backend, Saved
from fla_dispatch.bind import Described
from fla_dispatch.bridge import refuse_double_backward
from fla_dispatch.call import Call, Facts, TensorFacts
from fla_dispatch.declaration import ACCUMULATOR, Declaration, Result, Rule
from fla_dispatch.errors import BackendRefused
from fla_dispatch.extension import last_route
from fla_dispatch.gates import use_backend
from fla_dispatch.guard import autocast_custom_bwd, autocast_custom_fwd, input_guard
from fla_dispatch.operator import Operator, dispatch, operator_of, operators
from fla_dispatch.registry import Route, register, unregister
from fla_dispatch.sequences import Sequences

__all__ = [
    "ACCUMULATOR",
    "Backend",
    "BackendRefused",
    "Call",
    "Declaration",
    "Described",
    "Facts",
    "Operator",
    "Result",
    "Route",
    "Rule",
    "Saved",
    "Sequences",
    "TensorFacts",
    "autocast_custom_bwd",
    "autocast_custom_fwd",
    "dispatch",
    "input_guard",
    "last_route",
    "operator_of",
    "operators",
    "refuse_double_backward",
    "register",
    "unregister",
    "use_backend",
]


def explain(function, *args, **kwargs) -> Route:
    """Who would run ``function(*args, **kwargs)``, and why every other backend would not. Runs nothing.

    ``function`` is a public operator or its name.
    """
    return operator_of(function).explain(*args, **kwargs)


__all__ += ["explain"]
