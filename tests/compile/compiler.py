"""Rows of the table through the kernel tree's own host code and Triton's compiler, up to the launch."""

import functools
import importlib
import re
import subprocess
import tempfile
from dataclasses import dataclass

import cases
import torch
import triton
from harness.subject import BRIEF, arguments, cases_of
from triton.runtime import driver

from compile.table import ROWS, prepared
from compile.targets import TARGETS, PaperDriver
from fla_dispatch import operator_of
from fla_triton import OPERATIONS, launch

SIZES = ("K", "V", "WIDTH", "BK", "BV")  # constants of kernels that are no switches


@dataclass(frozen=True)
class Compiled:
    """A kernel as it would be launched, on ``target``. ``spilled``: bytes per thread that its registers do not hold."""

    kernel: str
    config: str
    registers: int
    spilled: int
    shared: int


class Compiler:
    """For one target; one a process, because Triton keeps one driver."""

    def __init__(self, target: str):
        for module in OPERATIONS.values():
            importlib.import_module(module)
        self.target = TARGETS[target]
        self.drivers = functools.cache(functools.partial(PaperDriver, self.target))
        launch.compile_only = True
        launch.device_name = lambda: self.target.device

    def version(self) -> str:
        return triton.__version__

    def compile(self, row: int, backward: bool, shared: int | None = None) -> list[dict]:
        """The kernels of a row's forward, or those that its backward adds, in the order of their first launches; each
        in the configuration that would be launched where a program may take ``shared`` bytes of shared memory, by
        default what the target has."""
        driver.set_active(self.drivers(shared))
        found = {}

        def observe(kernel, problem, config, constants, compiled):  # later candidates take the place of earlier ones
            found[kernel.name, str(compiled.src.signature), str(without(constants, config.tiles))] = config, compiled

        launch.on_compile[:] = [observe]
        launch.forget()  # rows share launches: each is to show all that it takes
        call, *after = forward(ROWS[row].call())
        if backward:
            found.clear()
            back(call, *after)
        return [vars(Compiled(name, str(config), *resources(compiled))) for (name, *_), (config, compiled)
                in found.items()]

    def missing(self) -> list[str]:
        """What the cases of the op tests make of a kernel, sizes apart, and no row does."""
        driver.set_active(PaperDriver(self.target))
        compile_, launch.Launch.compile = launch.Launch.compile, _note
        try:
            covered = _switches((row.call(), row.backward) for row in ROWS)
            launch.forget()
            needed = _switches(op_test_calls())
        finally:
            launch.Launch.compile = compile_
            launch.forget()  # what seems compiled
        return sorted(needed - covered)


def op_test_calls():
    """(call, whether it has a backward) of all that the op tests hold against the recurrence."""
    for subject in cases.SUBJECTS.values():
        for operator in (o for o in subject.operators() if o.declaration.operation in OPERATIONS):
            for case in cases_of(subject, operator, BRIEF):
                for backward in (False, True):
                    yield prepared(operator, arguments(subject, operator, case), backward), backward


def forward(call) -> tuple:
    """→ what ``back`` takes."""
    with torch.no_grad():
        return call, *call.plan.backend.forward(call)


def back(call, results, saved) -> None:
    backend, declaration = call.plan.backend, operator_of(call.function).declaration
    with torch.no_grad():
        backend.backward(call, dict(zip(backend.saves, saved)), dict(zip(declaration.results, results)))


def _switches(calls) -> set[str]:
    _noted.clear()
    for call, backward in calls:
        after = forward(call)
        if backward:
            back(*after)
    return set(_noted)


_noted: set[str] = set()


def _note(self):
    """In place of ``Launch.compile``: writes down the types of the tensors and the switches."""
    for name, dtype in zip(self.kernel.function.arg_names, self.dtypes):
        _noted.add(f"{self.kernel.name}: {name} is {str(dtype).removeprefix('torch.')}")
    for name, value in without(self.constants, SIZES).items():
        _noted.add(f"{self.kernel.name}: {name} = {value}")
    self.ready = None, (), 1, ()
    return self.ready


def without(constants: dict, names) -> dict:
    return {name: value for name, value in constants.items() if name not in names}


def resources(compiled) -> tuple[int, int, int]:
    """(registers per thread, bytes of local memory per thread, bytes of shared memory per program)."""
    if "cubin" in compiled.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            told = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], text=True, check=True,
                                  capture_output=True).stdout
        registers, spilled = re.search(r"REG:(\d+) STACK:(\d+)", told).groups()
    else:
        registers, spilled = (re.search(rf"\.{what}:\s*(\d+)", compiled.asm["amdgcn"])[1]
                              for what in ("vgpr_count", "private_segment_fixed_size"))
    return int(registers), int(spilled), compiled.metadata.shared
