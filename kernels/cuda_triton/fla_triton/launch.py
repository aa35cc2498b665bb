"""Compiling and launching: the one file that knows Triton's driver and launcher.

``kernel[grid](...)`` binds, inspects and hashes its arguments on every call, which costs 20 µs. Here a kernel is
compiled once per specialisation and its binary launched directly. What the compiler specialises on is in the key: the
dtypes of the arguments, which of them are None, and which pointers are multiples of 16 bytes. Integers are declared
``tl.int64`` and not specialised, so that no size enters a key.
"""

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fla_triton.config import Config, Problem, preferred

ALIGNMENT = 16  # bytes

# Called with (kernel, problem, config, constants, compiled) for every kernel that is made ready.
on_compile: list[Callable] = []
compile_only = False  # set where there is no device: kernels are compiled and not run
kernels: dict[str, "Kernel"] = {}  # every kernel by name


class Kernel:
    """A ``triton.jit`` function and its candidate configurations, best first.

    ``splits_values``: a program has only BV of the V columns, so that a grid counts V / BV times.
    """

    def __init__(self, function, candidates: Callable[[Problem], tuple[Config, ...]], splits_values: bool = False):
        self.function, self.candidates, self.name = function, candidates, function.__name__
        self.splits_values = splits_values
        self._launches: dict[tuple, Launch] = {}
        kernels[self.name] = self

    def blocks(self, problem: Problem, config: Config) -> int:
        """Programs per unit of the grid."""
        return -(-problem.V // config.BV) if self.splits_values else 1

    def launch(self, problem: Problem, config: Config | None = None, **constants) -> "Launch":
        """The kernel with these constants, the same for all who ask; ``config`` overrides the choice."""
        key = problem, config, tuple(sorted(constants.items()))
        if key not in self._launches:
            self._launches[key] = Launch(self, problem, constants, config)
        return self._launches[key]


class Launch:
    """A kernel with its constants: call it with a grid size and the arguments, in the kernel's order."""

    __slots__ = ("compiled", "config", "constants", "kernel", "pointers", "problem")

    def __init__(self, kernel: Kernel, problem: Problem, constants: Mapping, config: Config | None):
        self.kernel, self.problem, self.constants, self.config = kernel, problem, dict(constants), config
        self.compiled: dict[tuple, tuple] = {}  # by device, dtypes and alignment
        self.pointers: tuple[int, ...] = ()  # positions of the arguments that are tensors or None

    def compile(self, *arguments) -> None:
        """Make ready for such arguments, without running."""
        if isinstance(self.kernel.function, JITFunction):
            self._compiled(driver.active.get_current_device(), arguments)

    def __call__(self, grid: int, *arguments):
        if grid == 0:
            return
        if not isinstance(self.kernel.function, JITFunction):  # interpreted
            config = self.config or self.kernel.candidates(self.problem)[0]
            grid *= self.kernel.blocks(self.problem, config)
            self.kernel.function[(grid,)](*arguments, **self._given(config))
            return
        device = driver.active.get_current_device()
        run, function, metadata, blocks, constants = self._compiled(device, arguments)
        if not compile_only:
            stream = driver.active.get_current_stream(device)
            run(grid * blocks, 1, 1, stream, function, metadata, None, None, None, *arguments, *constants)

    def _compiled(self, device: int, arguments):
        """What fits the arguments: the compiler knows their dtypes, which are None, and which start at 16 bytes."""
        if not self.compiled:
            self.pointers = tuple(i for i, x in enumerate(arguments) if x is None or isinstance(x, torch.Tensor))
        addresses, types = 0, []
        for i in self.pointers:
            x = arguments[i]
            if x is None:
                types.append(None)
            else:
                types.append(x.dtype)
                addresses |= x.data_ptr()
        key = device, tuple(types), _alignment(arguments) if addresses % ALIGNMENT else None
        found = self.compiled.get(key)
        if found is None:
            found = self.compiled[key] = self._compile(arguments)
        return found

    def _given(self, config: Config) -> dict:
        """Every constant of the kernel."""
        given = self.constants | config.tiles
        return given | {"STAGES": config.num_stages} if "STAGES" in self.kernel.function.arg_names else given

    def _compile(self, arguments):
        """The first configuration that fits the device."""
        function, limit = self.kernel.function, _shared_memory(driver.active.get_current_device())
        candidates = (self.config,) if self.config else self.candidates()
        for config in candidates:
            given = self._given(config)
            compiled = function.warmup(*arguments, grid=(1,), **given, **config.options)
            if compiled.metadata.shared <= limit:
                break
        else:
            raise triton.OutOfResources(compiled.metadata.shared, limit, "shared memory")
        for observe in on_compile:
            observe(self.kernel, self.problem, config, given, compiled)
        constants = tuple(given[name] for name in function.arg_names[len(arguments) :])
        blocks = self.kernel.blocks(self.problem, config)
        if compile_only:
            return None, None, None, blocks, constants
        return compiled.run, compiled.function, compiled.packed_metadata, blocks, constants

    def candidates(self) -> tuple[Config, ...]:
        return preferred(self.kernel.name, self.problem, device_name(), self.kernel.candidates(self.problem))


def compile_together(*pending: tuple[Launch, tuple]) -> None:
    """Compile each (launch, arguments) that is not yet compiled, side by side: most of the work holds no lock."""
    if interpreted() or compile_only:
        return
    device = driver.active.get_current_device()

    def compile_one(one):
        torch.cuda.set_device(device)  # of this thread
        one[0].compile(*one[1])

    with ThreadPoolExecutor(max_workers=len(pending)) as pool:
        list(pool.map(compile_one, pending))


def _alignment(arguments) -> tuple:
    return tuple(isinstance(x, torch.Tensor) and x.data_ptr() % ALIGNMENT == 0 for x in arguments)


@functools.cache
def _shared_memory(device: int) -> int:
    """Bytes of shared memory that a program may take on ``device``, the tensors' own."""
    return driver.active.utils.get_device_properties(device)["max_shared_mem"]


@functools.cache
def _name_of(device: int) -> str:
    return torch.cuda.get_device_name(device).lower().replace(" ", "_")


def device_name() -> str:
    """The name of the current device as files are called: "nvidia_h200"; "" where there is none."""
    return _name_of(torch.cuda.current_device()) if torch.cuda.is_available() else ""


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1)."""
    return triton.knobs.runtime.interpret


def tensor_float(bits: int) -> str:
    """``input_precision`` of products of fp32 numbers that need ``bits`` (10 or 21): "tf32" and "tf32x3" on NVIDIA."""
    if interpreted() or driver.active.get_current_target().backend != "cuda":
        return "ieee"
    return "tf32" if bits <= 10 else "tf32x3"
