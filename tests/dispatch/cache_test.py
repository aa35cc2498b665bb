"""Remembered decisions: few, right under threads, and never older than the gates and the registrations they rest on."""

import contextlib
import gc
import itertools
import os
import resource
import sys
import threading
import time
import weakref

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import facade
import fla_dispatch
from fla_dispatch import Backend, Result, dispatch
from fla_dispatch.extension import registry as compiled

LIMIT = 1024  # decisions of an operator
GATE = "FLA_TOY_CACHE"


@dispatch("toy_cache", returns=Result("", "x"))
def toy_cache(x: Float[Tensor, "B T H K"], scale: float | None = None):
    return "body"


class Toy(Backend):
    operation, priority = "toy_cache", 1
    handles = frozenset({"scale"})
    differentiable = False

    def __init__(self, name, env=None):
        self.name, self.env = name, env

    def forward(self, call):
        return (self.name,), ()


def held() -> int:
    """Decisions that the operator holds on to, on both paths."""
    operator = toy_cache.operator
    return max(len(operator._plans), 0 if operator.compiled is None else operator.compiled.cached())


def resident() -> int:
    """Bytes of memory in use."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def shapes(count, start=0):
    """Shapes that need a decision each."""
    for i in range(start, start + count):
        yield 1, 1, 1 + i % 50, 1 + i // 50


STORAGE = torch.zeros(1)


def view(shape):
    """A tensor of any shape that takes no memory: all its elements are one."""
    return STORAGE.expand(shape)


# --- bounded ---------------------------------------------------------------------------------------------------------


def test_bounded_under_a_million_shapes():
    """No growth over 1,000,000 different shapes, which need more decisions than may be kept."""
    count = 1_000_000 if compiled is not None else 100_000  # Python alone takes too long for more
    storage = torch.empty(4_000_000)

    def call_with(numbers):
        most = 0
        for i in numbers:
            rows, tokens, heads = 1 + i % 10, 1 + i // 1000, 1 + (i // 10) % 100
            toy_cache(storage.as_strided((rows, tokens, heads, 1), (tokens * heads, heads, 1, 1)))
            if i % 1000 == 0:
                most = max(most, held())
        gc.collect()
        return most

    call_with(range(0, 1_000_000, 13))  # warm: all memory that is ever used at once is in use
    before = resident()
    assert call_with(range(count)) <= LIMIT
    # Full caches take some MB more than half-full ones; whatever each call left behind would take 16 MB at least.
    assert resident() - before < 12 << 20


def test_every_decision_a_new_one():
    """A cache that is full starts afresh instead of growing."""
    for i in range(3 * LIMIT):
        toy_cache(torch.zeros(1, 1, 1, 1), scale=float(i))
        assert held() <= LIMIT
    assert held() > 0


def test_equal_calls_share_a_decision(register):
    asked = []
    backend = Toy("toy_counted")
    backend.also_refuses = lambda facts: asked.append(facts) or ()
    register(backend)
    for rows, tokens in itertools.product((1, 1, 1), range(65, 128)):
        toy_cache(torch.zeros(rows, tokens, 2, 3))
    assert len(asked) == 1
    toy_cache(torch.zeros(1, 128, 2, 3))  # the next power of two
    toy_cache(torch.zeros(1, 65, 3, 3))  # another head count
    toy_cache(torch.zeros(1, 65, 2, 3, dtype=torch.float16))
    toy_cache(torch.zeros(1, 65, 2, 3), scale=1.0)
    assert len(asked) == 5


def test_every_option_value_arrives(register):
    """-0.0 and 0.0 compare equal and divide differently; NaN does not even equal itself."""
    backend = Toy("toy_scaled")
    backend.forward = lambda call: ((call.scale,), ())
    register(backend)
    for scale in 0.0, -0.0, 1.0, float("nan"), float("inf"):
        assert repr(toy_cache(torch.zeros(1, 1, 1, 1), scale=scale)) == repr(scale)


def test_nothing_outlives_its_call():
    """A decision keeps no tensor alive."""
    tensor = torch.zeros(1, 2, 3, 4)
    toy_cache(tensor), toy_cache(tensor, scale=2.0), toy_cache.operator.call_in_python(tensor)
    gone = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("fails", ["in the backend", "in the binding", "in the choice"])
def test_failures_leak_nothing(register, fails):
    def fail(*_):
        raise RuntimeError("as asked")

    backend = Toy("toy_failing", env=GATE)
    if fails == "in the backend":
        backend.forward = fail
    if fails == "in the choice":
        backend.also_refuses = fail
    register(backend)
    arguments = dict(x=torch.zeros(1, 2, 3, 4), scale="1" if fails == "in the binding" else 1.0)
    operator = toy_cache.operator

    def references():
        gc.collect()
        held = (arguments["x"], operator, operator.plan_for, backend, fla_dispatch.Call, arguments["scale"])
        return [sys.getrefcount(thing) for thing in held]

    def provoke():
        for _ in range(200):
            with contextlib.suppress(RuntimeError, TypeError):
                toy_cache(**arguments)

    provoke()
    before = references()
    provoke()
    assert references() == before


# --- threads ---------------------------------------------------------------------------------------------------------


def in_threads(count, work):
    """Run ``work(i)`` in threads that start together; the first exception is raised here."""
    failures, barrier = [], threading.Barrier(count)

    def run(i):
        try:
            barrier.wait(30)
            work(i)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


@pytest.fixture
def eager_switching():
    """Let the interpreter change threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_gates_flipping_under_eight_threads(register, monkeypatch, eager_switching):
    """A call that starts after a flip is complete obeys it, in every thread; and no old decision comes back."""
    register(Toy("toy_gated", env=GATE))
    monkeypatch.setenv(GATE, "1")
    flips, done = [0], threading.Event()  # odd while the gate changes
    right = {"1": "toy_gated", "0": "body"}

    def work(i):
        if i == 0:
            for n in range(400):
                flips[0] += 1
                os.environ[GATE] = "01"[n % 2]
                flips[0] += 1
                time.sleep(0.0002)
            done.set()
            return
        for shape in itertools.cycle(shapes(600, start=0 if i < 5 else 600 * i)):
            before, gate = flips[0], os.environ[GATE]
            ran = toy_cache(view(shape))
            if before == flips[0] and before % 2 == 0:
                assert ran == right[gate]
            assert ran in right.values()
            if done.is_set():
                break

    in_threads(8, work)
    for gate in "0", "1", "0":
        os.environ[GATE] = gate
        assert {toy_cache(view(shape)) for shape in shapes(1200)} == {right[gate]}
    assert held() <= LIMIT


def test_forcing_in_eight_threads(register, eager_switching):
    """use_backend holds in the thread that says it, and nowhere else."""
    names = [f"toy_{i}" for i in range(8)]
    register(*map(Toy, names))

    def work(i):
        for shape in shapes(300):
            with facade.use_backend(names[i]):
                assert toy_cache(view(shape)) == names[i]
                assert facade.last_route().backend == names[i]
            assert toy_cache(view(shape)) == "toy_0"

    in_threads(8, work)


def test_registering_while_others_call(register, eager_switching):
    """A call obeys every registration that was complete when it started."""
    register(Toy("toy_always"))
    done, first = threading.Event(), Toy("toy_first")
    first.priority = 0
    changes = [0]

    def work(i):
        if i == 0:
            for n in range(100):
                changes[0] += 1
                if n % 2:
                    fla_dispatch.unregister("toy_first", "toy_cache")
                else:
                    fla_dispatch.register(first)
                changes[0] += 1
            done.set()
            return
        for shape in itertools.cycle(shapes(300)):
            before = changes[0]
            ran = toy_cache(view(shape))
            if before == changes[0] and before % 2 == 0:
                assert ran == ("toy_first" if before % 4 else "toy_always")
            if done.is_set():
                break

    in_threads(8, work)
    assert {toy_cache(view(shape)) for shape in shapes(300)} == {"toy_always"}


def test_a_cache_emptied_by_the_call_it_serves(register):
    """A backend that registers another, or runs into the limit, pulls the decision from under its own call."""
    backend = Toy("toy_restless")

    def forward(call):
        toy_cache.operator.forget()
        return (call.scale,), ()

    backend.forward = forward
    register(backend)
    for scale in range(100):
        assert toy_cache(torch.zeros(1, 1, 1, 1), scale=scale) == float(scale)


def test_threads_come_and_go(register):
    """Nothing is kept for a thread that has ended."""
    register(Toy("toy_gone"))
    for i in range(100):
        thread = threading.Thread(target=toy_cache, args=(torch.zeros(1, 1, 1, 1), float(i)))
        thread.start()
        thread.join()
    toy_cache.operator.forget()
    gc.collect()
    routes = [thing for thing in gc.get_objects() if type(thing) is fla_dispatch.Route and thing.backend == "toy_gone"]
    assert len(routes) < 10
