"""Compiling and launching: the one file that knows Triton's driver and launcher.

``kernel[grid](...)`` binds, inspects and hashes its arguments on every call, which costs 20 µs. Here a kernel is
compiled once per specialisation and its binary launched with addresses. All that the compiler specialises on is fixed
in a ``Launch``: the device, the dtypes of tensors and which of them are None. Tensors start at multiples of 16 bytes
(those that do not are copied), and integers are declared ``tl.int64`` and not specialised, so that no size enters.

A kernel's parameters are its tensors, then its numbers (a float where not annotated), then its constants.
"""

import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
import triton
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from fla_triton.config import Config, Problem, preferred

ALIGNMENT = 16  # bytes, of addresses: the compiler relies on it
PIECE = 128  # bytes: what the pieces of a workspace start at multiples of
INTERPRETED = triton.knobs.runtime.interpret  # kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1)

# Called with (kernel, problem, config, constants, compiled) for every kernel that is made ready.
on_compile: list[Callable] = []
compile_only = False  # set where there is no device: kernels are compiled and not run
apart = INTERPRETED  # kernels get tensors, each allocated by itself, not addresses: set where launches are looked at
kernels: dict[str, "Kernel"] = {}  # every kernel by name
_loading = threading.Lock()  # launchers are modules of one name: two loaded at once were seen to change places
_remembered: list = []  # caches of what operators prepare for a plan


def remembered(build: Callable) -> Callable:
    """Decorator: what calls of equal plans share is built once."""
    cached = functools.lru_cache(maxsize=1024)(build)
    _remembered.append(cached)
    return cached


def forget() -> None:
    """Forget all that was built and compiled."""
    for cached in _remembered:
        cached.cache_clear()
    for kernel in kernels.values():
        kernel.launches.clear()


class Kernel:
    """A ``triton.jit`` function and its candidate configurations, best first.

    ``splits_values``: a program has only BV of the V columns, so that a grid counts V / BV times.
    """

    def __init__(self, function, candidates: Callable[[Problem], tuple[Config, ...]], splits_values: bool = False):
        self.function, self.candidates, self.name = function, candidates, function.__name__
        self.splits_values = splits_values
        self.launches: dict[tuple, Launch] = {}
        kernels[self.name] = self

    def blocks(self, problem: Problem, config: Config) -> int:
        """Programs per unit of the grid."""
        return -(-problem.V // config.BV) if self.splits_values else 1

    def launch(
        self, device: torch.device, problem: Problem, dtypes: Sequence, config: Config | None = None, **constants
    ) -> "Launch":
        """The kernel with these constants, for tensors of ``dtypes`` (None: absent), the same for all who ask;
        ``config`` overrides the choice."""
        key = device.index, problem, tuple(dtypes), config, tuple(sorted(constants.items()))
        if key not in self.launches:
            self.launches[key] = Launch(self, device, problem, tuple(dtypes), constants, config)
        return self.launches[key]


class Launch:
    """A kernel with all that its binary depends on: call it with a grid size, a stream and the arguments in the
    kernel's order. Its device is the current one."""

    __slots__ = ("config", "constants", "device", "dtypes", "kernel", "problem", "ready")

    def __init__(self, kernel, device: torch.device, problem: Problem, dtypes: tuple, constants: Mapping, config):
        self.kernel, self.device, self.problem, self.dtypes = kernel, device, problem, dtypes
        self.constants, self.config = dict(constants), config
        self.ready: tuple | None = None

    def __call__(self, grid: int, stream: int, *arguments):
        if INTERPRETED:
            return self._interpret(grid, arguments)
        run, before, blocks, behind = self.ready or self.compile()
        if grid and not compile_only:
            run(grid * blocks, 1, 1, stream, *before, *arguments, *behind)

    def configured(self, config: Config) -> "Launch":
        """The same with another configuration."""
        return self.kernel.launch(self.device, self.problem, self.dtypes, config, **self.constants)

    def candidates(self) -> tuple[Config, ...]:
        return preferred(self.kernel.name, self.problem, device_name(), self.kernel.candidates(self.problem))

    def compile(self) -> tuple:
        """Make the first configuration ready that fits the device: → what runs it, what that takes before and behind
        the arguments, and how many programs there are per unit of the grid."""
        function, limit = self.kernel.function, _shared_memory(driver.active.get_current_device())
        numbers = [p for p in function.params[len(self.dtypes) :] if not p.is_constexpr]
        stand_ins = [dtype and _Address(dtype) for dtype in self.dtypes]
        stand_ins += [2 if p.annotation_type else 0.5 for p in numbers]
        for config in (self.config,) if self.config else self.candidates():
            given = self._given(config)
            compiled = function.warmup(*stand_ins, grid=(1,), **given, **config.options)
            if compiled.metadata.shared <= limit:
                break
        else:
            raise triton.OutOfResources(compiled.metadata.shared, limit, "shared memory")
        for observe in on_compile:
            observe(self.kernel, self.problem, config, given, compiled)
        blocks = self.kernel.blocks(self.problem, config)
        constants = tuple(given[name] for name in function.arg_names[len(stand_ins) :])
        run, before = (None, ()) if compile_only else _runner(compiled)
        self.ready = run, before, blocks, constants
        return self.ready

    def _given(self, config: Config) -> dict:
        """Every constant of the kernel."""
        given = self.constants | config.tiles
        return given | {"STAGES": config.num_stages} if "STAGES" in self.kernel.function.arg_names else given

    def _interpret(self, grid: int, arguments) -> None:
        if grid == 0:
            return
        config = self.config or self.kernel.candidates(self.problem)[0]
        self.kernel.function[(grid * self.kernel.blocks(self.problem, config),)](*arguments, **self._given(config))


class _Address:
    """Stands for a tensor of any size while a kernel is compiled."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def data_ptr(self) -> int:
        return ALIGNMENT

    def ptr_range(self) -> float:
        return math.inf


def _runner(compiled) -> tuple[Callable, tuple]:
    """What launches a binary, and what it takes between the stream and the kernel's arguments."""
    with _loading:
        launcher, hooks = compiled.run, (None, None, None)
    scratch = getattr(launcher, "global_scratch_size", None), getattr(launcher, "profile_scratch_size", None)
    if hasattr(nvidia, "make_launcher") and isinstance(launcher, nvidia.CudaLauncher) and scratch == (0, 0):
        # Up to Triton 3.6 a CUDA launcher's own call does nothing then but pass this on.
        switches = launcher.launch_cooperative_grid, launcher.launch_pdl, None, None
        return launcher.launch, (compiled.function, *switches, compiled.packed_metadata, *hooks)
    return launcher, (compiled.function, compiled.packed_metadata, *hooks)


def compile_each(launches: Sequence[Launch], jobs: int) -> Iterator[BaseException | None]:
    """Compile side by side, for most of the work holds no lock: yields what went wrong with one, or None."""
    device = driver.active.get_current_device()

    def compile_one(launch):
        if not compile_only:
            torch.cuda.set_device(device)  # of this thread
        launch.compile()

    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(compile_one, launch) for launch in launches]):
            yield done.exception()


def compile_together(launches: Iterable[Launch | None]) -> None:
    """Compile what is not yet compiled."""
    pending = [launch for launch in dict.fromkeys(launches) if launch and launch.ready is None]
    if pending and not INTERPRETED:
        for fault in compile_each(pending, 1 if compile_only else len(pending)):
            if fault is not None:
                raise fault


# --- what kernels are given ---


def address(x: torch.Tensor | None):
    """A kernel's argument for a tensor of our own."""
    return x if x is None or apart else x.data_ptr()


def addresses(tensors) -> list:
    """Likewise for several."""
    return list(tensors) if apart else [None if x is None else x.data_ptr() for x in tensors]


def received(tensors: Sequence) -> tuple[Sequence, list]:
    """A caller's tensors, those copied that start at an odd address, and the arguments of kernels for them."""
    found = [None if x is None else x.data_ptr() for x in tensors]
    bits = 0
    for x in found:
        if x is not None:
            bits |= x
    if bits % ALIGNMENT:
        tensors = tuple(x if x is None or x.data_ptr() % ALIGNMENT == 0 else x.clone() for x in tensors)
        return tensors, addresses(tensors)
    return tensors, list(tensors) if apart else found


def current_stream(device: torch.device) -> int:
    """Where the kernels of a call go."""
    return 0 if INTERPRETED else driver.active.get_current_stream(device.index or 0)


class Workspace:
    """The tensors that live as long as a call, in one allocation: shapes and dtypes of the pieces, None for none."""

    __slots__ = ("device", "offsets", "pieces", "size")

    def __init__(self, device: torch.device, pieces: Sequence[tuple[tuple[int, ...], torch.dtype] | None]):
        self.device, self.pieces, self.offsets, self.size = device, pieces, [], 0
        for piece in pieces:
            self.offsets.append(self.size)
            if piece is not None:
                shape, dtype = piece
                self.size += -(-math.prod(shape) * dtype.itemsize // PIECE) * PIECE

    def allocate(self) -> tuple[object, list]:
        """What holds the memory, and the arguments of kernels for the pieces."""
        if apart:
            tensors = [piece and torch.empty(piece[0], dtype=piece[1], device=self.device) for piece in self.pieces]
            return tensors, tensors
        memory = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        start = memory.data_ptr()
        return memory, [piece and start + offset for piece, offset in zip(self.pieces, self.offsets)]


# --- the device ---


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


def tensor_float(bits: int) -> str:
    """``input_precision`` of products of fp32 numbers that need ``bits`` (10 or 21): "tf32" and "tf32x3" on NVIDIA."""
    if INTERPRETED or driver.active.get_current_target().backend != "cuda":
        return "ieee"
    return "tf32" if bits <= 10 else "tf32x3"
