"""Kernels of the Triton tree as they are launched: recorded from whole calls, run again with other configurations.

    with recorded() as launches: chunk_kda(...)          what ran, with its arguments
    with forced("prepare", config): chunk_kda(...)       the same call, one kernel configured otherwise
    pickable(launches)                                   every configuration that a file or the heuristic can pick

A test of every configuration alone is a loop over ``pickable`` with ``forced`` around the call and the oracle behind.
"""

import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock


class Recorded(NamedTuple):
    launch: object  # fla_triton.launch.Launch
    grid: int
    arguments: tuple

    @property
    def kernel(self) -> str:
        return self.launch.kernel.name

    @property
    def problem(self):
        return self.launch.problem


@contextmanager
def recorded() -> Iterator[list[Recorded]]:
    """Every launch of the block; holds its arguments, so that memory is not used again while the list lives."""
    from fla_triton.launch import Launch

    found, call = [], Launch.__call__

    def record(launch, grid, *arguments):
        found.append(Recorded(launch, grid, arguments))
        return call(launch, grid, *arguments)

    with mock.patch.object(Launch, "__call__", record):
        yield found


@contextmanager
def forced(kernel: str, config, problem=None) -> Iterator[list]:
    """Run a kernel (of one problem, or of any) with ``config``; yields the launches for which that was done.

    Raises ``triton.OutOfResources`` from the call where the configuration does not fit the device.
    """
    from fla_triton.launch import Launch

    done, call = [], Launch.__call__

    def run(launch, grid, *arguments):
        if launch.kernel.name != kernel or problem not in (None, launch.problem) or launch.config is not None:
            return call(launch, grid, *arguments)
        done.append(launch)
        return call(configured(launch, config), grid, *arguments)

    with mock.patch.object(Launch, "__call__", run):
        yield done


@functools.lru_cache(maxsize=4096)
def configured(launch, config):
    """The same launch with another configuration."""
    return launch.kernel.launch(launch.problem, config=config, **launch.constants)


def pickable(launches: Iterable[Recorded]) -> list[tuple[str, object]]:
    """(kernel, configuration) of everything that may be picked for these launches, on any device that has a file."""
    found = {}
    for one in launches:
        for config in (*one.launch.kernel.candidates(one.problem), *measured(one.kernel, one.problem)):
            found[one.kernel, config] = None
    return list(found)


def measured(kernel: str, problem) -> list:
    """What the files of all devices hold for a kernel's problem."""
    from fla_triton.config import FOLDER, Config

    found = []
    for file in sorted(FOLDER.glob("*.json")):
        fields = json.loads(file.read_text())["kernels"].get(kernel, {}).get(str(problem))
        if fields is not None:
            found.append(Config(**fields))
    return found


def compile_ahead(launches: Iterable[Recorded], configs: Mapping[tuple, Iterable], jobs: int, progress) -> None:
    """Compile ``configs`` ((kernel, problem) → configurations) side by side; Triton's cache holds the binaries then.

    What fails here fails again when it is run, where the failure is reported. ``progress(total, words)`` → ``tell()``.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed

    from fla_triton import launch as module

    unique = {_specialisation(one): one for one in launches}.values()
    work = [(one, config) for one in unique for config in configs.get((one.kernel, one.problem), ())]

    def compile_one(one, config):
        fresh = one.launch.kernel.launch(one.problem, config=config, **one.launch.constants)
        fresh(one.grid, *one.arguments)

    tell = progress(len(work), "compile")
    with mock.patch.object(module, "compile_only", True), ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        for done in as_completed([pool.submit(compile_one, *item) for item in work]):
            done.exception()
            tell()


def _specialisation(one: Recorded) -> tuple:
    """Launches that are equal in this share a binary, but for the alignment of pointers."""
    kinds = tuple(str(getattr(x, "dtype", type(x))) for x in one.arguments)
    return one.kernel, one.problem, tuple(sorted(one.launch.constants.items())), kinds
