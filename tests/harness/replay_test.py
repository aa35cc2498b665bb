"""What the interpreter repeats is, bit for bit, what it would have done again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Prints the bytes of every kernel's results, with the interpreter "plain" or "mended"; and how many programs of each
# ran as Python.
PROGRAM = '''
import functools, json, sys
import torch, triton, triton.language as tl

ran = []  # a kernel's name for each program that is not repeated

@triton.jit
def apart(a, b):
    return a * 2.0 - b

@triton.jit
def one_tensor_twice_and_two(x, y, n: tl.constexpr):
    ran.append("one_tensor_twice_and_two")
    i = tl.arange(0, n)
    a, b = tl.load(x + i), tl.load(x + n + i)
    tl.store(y + i, apart(a, a))
    tl.store(y + n + i, apart(a, b))
    tl.store(y + 2 * n + i, apart(b, a))

@triton.jit
def times(a, factor: tl.constexpr):
    return a * factor

@triton.jit
def constants_that_are_equal(x, y, n: tl.constexpr):
    ran.append("constants_that_are_equal")
    i = tl.arange(0, n)
    k = (tl.load(x + i) * 100).to(tl.int32)
    half = times(k, 1.0) * 0.5
    tl.store(y + i, half + (times(k, 1) >> 1))  # an integer

@triton.jit
def turned(a):
    return a.T * 2.0

@triton.jit
def what_is_not_seen(x, y, n: tl.constexpr):
    """A tensor's property is no operation of the language."""
    ran.append("what_is_not_seen")
    program = tl.program_id(0)
    i = tl.arange(0, n)
    square = tl.load(x + program * n + i)[:, None] + i[None, :]
    tl.store(y + program * n + i, tl.sum(turned(square) * square, 1))

@triton.jit
def signed(a):
    if tl.sum(a) > 0:
        b = a + 1.0
    else:
        b = a - 1.0
    return b

@triton.jit
def questions(x, y, n: tl.constexpr):
    """In a function; as the bound of a loop; before a return."""
    ran.append("questions")
    program = tl.program_id(0)
    i = program * n + tl.arange(0, n)
    a = signed(tl.load(x + i))
    total = tl.zeros((n,), tl.float32)
    for step in range(0, program % 2 + 1):
        total += a * (step + 1)
    tl.store(y + i, total)
    if tl.load(x + program) > 0.5:
        return
    tl.store(y + i, total * 3.0)

@triton.jit
def writes_before_a_question(x, y, n: tl.constexpr):
    """A way that turns out to be another has written nothing."""
    ran.append("writes_before_a_question")
    program = tl.program_id(0)
    i = program * n + tl.arange(0, n)
    tl.store(y + i, tl.load(y + i) + 1.0)
    tl.store(y + i, tl.load(y + i) * 2.0, mask=tl.load(x + i) > 0)
    tl.store(y + program * n, tl.load(y + program * n) + 5.0)
    if tl.load(x + program) > 0:
        tl.store(y + i, tl.load(y + i) * 10.0)

@triton.jit
def acts_before_a_question(x, y, n: tl.constexpr):
    ran.append("acts_before_a_question")
    program = tl.program_id(0)
    tl.atomic_add(y, 1.0)
    if tl.load(x + program) > 0:
        tl.atomic_add(y + 1, 1.0)

@triton.jit
def every_program_goes_its_way(x, y, n: tl.constexpr):
    ran.append("every_program_goes_its_way")
    program = tl.program_id(0)
    total = 0.0
    for step in range(0, program):
        total += tl.load(x + step)
    tl.store(y + program, total)

@triton.jit
def both(a, b):
    return a * b + 1.0

@triton.jit
def reductions(x, y, n: tl.constexpr):
    ran.append("reductions")
    program = tl.program_id(0)
    i = tl.arange(0, n)
    a = tl.load(x + program * n + i)
    pairs = tl.reshape(a, (n // 2, 2))
    y += program * 4 * n
    tl.store(y + i, tl.cumsum(a, 0))
    tl.store(y + n + i, a - tl.max(a, 0) + tl.min(a, 0))
    tl.store(y + 2 * n + tl.arange(0, n // 2), tl.sum(pairs, 1))
    tl.store(y + 3 * n + i, tl.cumsum(a, 0, reverse=True) + tl.reduce(a, 0, both))

@triton.jit
def numbers_and_addresses(x, y, n: tl.constexpr):
    ran.append("numbers_and_addresses")
    program = tl.program_id(0)
    i = tl.arange(0, n)
    a = tl.load(x + program * n + i, mask=i < n - program, other=7.0)
    k = (a * 100).to(tl.int32)
    y += program * 3 * n
    tl.store(y + i, (k // 7 + k % 7 + (k >> 1) + (k & 3)).to(tl.float32))
    at = tl.load(x + program, mask=program > 1, other=-1.0)
    tl.store(y + n + i, tl.where(a > at, tl.abs(a), tl.exp2(a)))
    square = a[:, None] * a[None, :]
    tl.store(y + 2 * n + i, tl.sum(tl.dot(square, tl.trans(square) + 1.0, input_precision="ieee"), 0))

KERNELS = {name: kernel for name, kernel in list(globals().items())
           if hasattr(kernel, "run") and name not in ("apart", "times", "turned", "signed", "both")}

if sys.argv[1] == "mended":
    from harness import interpreter
    interpreter.mend()

n, programs, found = 16, 12, {}
generator = torch.Generator().manual_seed(0)
for launch in range(3):  # with other numbers at other places
    x = torch.randn(programs * n, generator=generator)
    for name, kernel in KERNELS.items():
        y = torch.zeros(programs * 4 * n)
        kernel[(programs,)](x, y, n)
        found[f"{name} {launch}"] = y.numpy().tobytes().hex()
    for width in (8, 32):
        y = torch.zeros(4 * n * programs)
        one_tensor_twice_and_two[(1,)](x, y, width)
        found[f"width {width} {launch}"] = y.numpy().tobytes().hex()
print(json.dumps([found, {name: ran.count(name) for name in KERNELS}]))
'''


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """``outcome[mode]`` → (results by kernel and launch, programs that ran as Python by kernel)."""
    program = tmp_path_factory.mktemp("replay") / "program.py"
    program.write_text(PROGRAM)
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    outcomes = {}
    for mode in ("plain", "mended"):
        done = subprocess.run([sys.executable, program, mode], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        outcomes[mode] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


def test_what_is_repeated_is_what_was_done(outcome):
    (right, _), (found, _) = outcome["plain"], outcome["mended"]
    assert [name for name in right if found[name] != right[name]] == []
    assert len(set(right.values())) == len(right)  # no kernel does nothing, or the same whatever the numbers


def test_most_programs_are_repeated(outcome):
    """Else nothing is tested above, and every cell takes six times as long."""
    every, ran = outcome["plain"][1], outcome["mended"][1]
    assert set(every.values()) <= {36, 42}
    assert ran["reductions"] == ran["numbers_and_addresses"] == ran["constants_that_are_equal"] == 1
    assert ran["one_tensor_twice_and_two"] == 3  # widths
    assert ran["writes_before_a_question"] == 2
    assert ran["questions"] <= 12  # two questions in the kernel and one in a function, which fails once
    assert all(ran[name] == every[name] for name in ("acts_before_a_question", "what_is_not_seen"))
    assert ran["every_program_goes_its_way"] < every["every_program_goes_its_way"]
