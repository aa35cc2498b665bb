"""Whose operators are timed: ours, and fla-core's as a black box, where it is installed."""

import importlib
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path

import facade
from benchmarks.workloads import Workload

OURS, FLA = "facade", "fla"
# Where fla.ops keeps what it does not export.
MODULES = {"fused_kda_gate": "fla.ops.kda.gate", "kda_gate_chunk_cumsum": "fla.ops.kda.gate"}
# fla's Triton kernels; other backends of it would be other rows.
# Promises that our fast path asks for. fla's needs none, and its winners are known for the form without them.
PROMISES = frozenset({"safe_gate", "lower_bound"})
ENVIRONMENT = {"FLA_TILELANG": "0", "FLA_FLASH_QLA": "0", "FLA_FLASH_KDA": "0", "FLA_CACHE_RESULTS": "0"}


def available(wanted: str) -> list[str]:
    """Libraries in the order in which they take turns. Raises ``SystemExit`` where fla is asked for and absent."""
    peers = [name for name in wanted.split(",") if name not in ("", "none")]
    for name in peers:
        if name != FLA:
            raise SystemExit(f"--peers {name}: there is only {FLA}")
        if importlib.util.find_spec("fla") is None:
            raise SystemExit(
                f"--peers {name}: it is not installed; unpack its wheel on the import path, or leave it out"
            )
    return [OURS, *peers]


def version(library: str) -> str | None:
    if library == OURS:
        return facade.__version__
    try:
        return importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return None


def function(library: str, workload: Workload) -> Callable[..., tuple]:
    """``f(**inputs)`` → a tuple of results."""
    if library == OURS:
        call = workload.operator.public
    else:
        os.environ.update(ENVIRONMENT)
        module = importlib.import_module(
            MODULES.get(workload.name, f"fla.ops.{workload.operator.declaration.operation}")
        )
        call = getattr(module, workload.name)
    options = workload.options
    if library != OURS:
        options = {name: value for name, value in options.items() if name not in PROMISES}

    def run(**inputs):
        results = call(**inputs, **options)
        return results if isinstance(results, tuple) else (results,)

    return run


def backend(library: str) -> str:
    """Who ran the last call."""
    return facade.last_route().backend if library == OURS else library


class Winners:
    """Autotuning winners of another library, from JSON: {section: {kernel: [{"full", "red", "cfg"}, ...]}}.

    Spares its search, and with it minutes, when its rows are measured again. What the file does not know it searches
    for as it always does. ``reused`` and ``searched`` count launches sites of either kind.
    """

    # Keys by which a search is repeated although the best configuration barely depends on them.
    LOOSE = frozenset({"H", "HV", "HQ", "B", "N", "IS_VARLEN", "num_heads", "T_BUCKET", "LAYOUT", "G"})

    def __init__(self, path: Path):
        self.known: dict[str, list[dict]] = {}
        for section in json.loads(path.read_text()).values():
            for kernel, entries in section.items():
                self.known.setdefault(kernel, []).extend(entries)
        self.reused = self.searched = 0

    def find(self, kernel: str, named: list[tuple], dtypes: list[str]) -> dict | None:
        """The winner for exactly these keys, else for the same but for loose ones, else None."""
        entries = self.known.get(kernel, [])
        full, red = str(named) + str(dtypes), str([(key, value) for key, value in named if key not in self.LOOSE])
        for kind, wanted in (("full", full), ("red", red)):
            for entry in entries:
                if entry[kind] == wanted:
                    return entry["cfg"]
        return None

    def install(self) -> None:
        """Let Triton's autotuner, which only the other library uses, take them."""
        from triton.runtime.autotuner import Autotuner, Config

        search = Autotuner.run

        def run(tuner, *args, **kwargs):
            if len(tuner.configs) > 1:
                given = {**dict(zip(tuner.arg_names, args)), **kwargs}
                given = {name: x for name, x in given.items() if name in tuner.arg_names}
                named = [(key, given[key]) for key in tuner.keys if key in given]
                dtypes = [str(x.dtype) for x in given.values() if hasattr(x, "dtype")]
                key = (*(value for _, value in named), *dtypes)
                if key not in tuner.cache:
                    kernel = tuner.fn
                    while not hasattr(kernel, "cache_key"):
                        kernel = kernel.fn
                    found = self.find(f"{kernel.fn.__module__}.{kernel.fn.__name__}", named, dtypes)
                    if found is None:
                        self.searched += 1
                    else:
                        extra = {name: found[name] for name in ("num_ctas", "maxnreg") if found.get(name) is not None}
                        tuner.cache[key] = Config(
                            found["kwargs"], num_warps=found["num_warps"], num_stages=found["num_stages"], **extra
                        )
                        self.reused += 1
            return search(tuner, *args, **kwargs)

        Autotuner.run = run
