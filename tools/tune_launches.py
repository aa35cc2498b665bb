"""Kernels of the Triton tree as they are launched: recorded from whole calls, run again with other configurations.

    with recorded() as launches: chunk_kda(...)          what ran, with its arguments
    with forced("prepare", config): chunk_kda(...)       the same call, one kernel configured otherwise
    pickable(launches)                                   every configuration that a file or the heuristic can pick

A test of every configuration alone is a loop over ``pickable`` with ``forced`` around the call and the oracle behind.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock


class Recorded(NamedTuple):
    launch: object  # fla_triton.launch.Launch
    grid: int
    stream: int
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
    from fla_triton import launch as module

    found, call = [], module.Launch.__call__

    def record(launch, grid, stream, *arguments):
        found.append(Recorded(launch, grid, stream, arguments))
        return call(launch, grid, stream, *arguments)

    with mock.patch.object(module.Launch, "__call__", record), mock.patch.object(module, "apart", True):
        yield found


@contextmanager
def forced(kernel: str, config, problem=None) -> Iterator[list]:
    """Run a kernel (of one problem, or of any) with ``config``; yields the launches for which that was done.

    Raises ``triton.OutOfResources`` from the call where the configuration does not fit the device.
    """
    from fla_triton.launch import Launch

    done, call = [], Launch.__call__

    def run(launch, grid, stream, *arguments):
        if launch.kernel.name != kernel or problem not in (None, launch.problem) or launch.config is not None:
            return call(launch, grid, stream, *arguments)
        done.append(launch)
        return call(launch.configured(config), grid, stream, *arguments)

    with mock.patch.object(Launch, "__call__", run):
        yield done


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
    """Compile ``configs`` ((kernel, problem) → configurations) side by side, for the current device.

    What fails here fails again when it is run, where the failure is reported. ``progress(total, words)`` → ``tell()``.
    """
    from fla_triton.launch import compile_each

    work = [
        launch.configured(config)
        for launch in dict.fromkeys(one.launch for one in launches)
        for config in configs.get((launch.kernel.name, launch.problem), ())
    ]
    tell = progress(len(work), "compile")
    for _ in compile_each(work, jobs or os.cpu_count()):
        tell()
