"""What users import: ``import facade.ops as fla_ops``, and a few questions about who runs what.

facade.explain(op, ...)      who would run this call, and why every other backend would not
facade.last_route()          who ran the last call of this thread
facade.use_backend("...")    force a backend inside a ``with`` block
"""

from fla_dispatch import BackendRefused, explain, last_route, use_backend

__all__ = ["BackendRefused", "explain", "last_route", "use_backend"]
__version__ = "0.1.0"
