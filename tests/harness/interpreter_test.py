"""C098: the plain interpreter computes with the bits of bfloat16 numbers; mended it computes with the numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

# Which of a kernel's results differ from torch's, with the interpreter "plain" or "mended".
PROGRAM = '''
import json, sys
import torch, triton, triton.language as tl
from harness import interpreter

@triton.jit
def arithmetic(x, y, z, n: tl.constexpr):
    i = tl.arange(0, n)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(z + 0 * n + i, a + b)
    tl.store(z + 1 * n + i, a - b)
    tl.store(z + 2 * n + i, a * b)
    tl.store(z + 3 * n + i, tl.maximum(a, b))
    tl.store(z + 4 * n + i, tl.where(a < b, a, b))
    tl.store(z + 5 * n + i, tl.abs(a))

@triton.jit
def constant(z, n: tl.constexpr):
    tl.store(z + tl.arange(0, n), tl.full([n], 1.5, tl.bfloat16))

@triton.jit
def conversions(x, i32, z, wide, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(z + 0 * n + i, tl.load(x + i).to(tl.bfloat16))
    tl.store(z + 1 * n + i, tl.load(x + i).to(tl.float64).to(tl.bfloat16))
    tl.store(z + 2 * n + i, tl.load(i32 + i).to(tl.bfloat16))
    narrow = tl.load(x + i).to(tl.bfloat16)
    tl.store(z + 3 * n + i, narrow.to(tl.float16).to(tl.bfloat16))
    tl.store(wide + i, narrow.to(tl.float32))

@triton.jit
def product(x, y, z, n: tl.constexpr):
    i = tl.arange(0, n)
    at = i[:, None] * n + i[None, :]
    tl.store(z + at, tl.dot(tl.load(x + at), tl.load(y + at)))

@triton.jit
def loop(x, z, n):
    total = 0.0
    for i in range(0, tl.load(n)):
        total += tl.load(x + i)
    tl.store(z, total)

if sys.argv[1] == "mended":
    interpreter.mend()
wrong = []

def expect(name, found, right):
    if not torch.equal(found, right.to(found.dtype)):
        wrong.append(name)

n, bf16 = 1024, torch.bfloat16
a, b = torch.randn(n).to(bf16), torch.randn(n).to(bf16)
z = torch.empty(6, n, dtype=bf16)
arithmetic[(1,)](a, b, z, n)
right = [a + b, a - b, a * b, torch.maximum(a, b), torch.minimum(a, b), a.abs()]
for name, found, expected in zip(("add", "sub", "mul", "max", "less", "abs"), z, right):
    expect(name, found, expected)

z = torch.zeros(n, dtype=bf16)
try:
    constant[(1,)](z, n)
except Exception:
    pass  # z stays 0
expect("constant", z, torch.full((n,), 1.5))

x = torch.randn(n) * 2.0 ** torch.randint(-140, 120, (n,))
x[:8] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), torch.inf, torch.nan, 3.4e38, 1e-45, -0.0])
whole = torch.randint(-(2**30), 2**30, (n,), dtype=torch.int32)
z, wide = torch.empty(4, n, dtype=bf16), torch.empty(n)
conversions[(1,)](x, whole, z, wide, n)
right = [x.to(bf16), x.to(bf16), whole.to(bf16), x.to(bf16).half().to(bf16)]
for name, found, expected in zip(("from fp32", "from fp64", "from int", "by fp16"), z, right):
    expect(name, found.nan_to_num(nan=7), expected.nan_to_num(nan=7))
expect("to fp32", wide.nan_to_num(nan=7), x.to(bf16).float().nan_to_num(nan=7))

for dtype in (bf16, torch.float16, torch.float32):
    p, q, z = torch.randn(32, 32).to(dtype), torch.randn(32, 32).to(dtype), torch.empty(32, 32)
    product[(1,)](p, q, z, 32)
    if not torch.allclose(z, p.float() @ q.float(), atol=1e-4):
        wrong.append(f"dot of {dtype}")

z = torch.empty(1)
loop[(1,)](torch.arange(5.0), z, torch.tensor([5]))
expect("loop", z, torch.tensor([10.0]))
print(json.dumps(wrong))
'''


def wrong(tmp_path, mode: str) -> set[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    tests = str(Path(__file__).parent.parent)
    path = os.pathsep.join([tests, *filter(None, sys.path)])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, program, mode], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_plain_interpreter_computes_with_bits(tmp_path):
    """If this fails Triton has learnt it: take what is no longer needed out of interpreter.py."""
    found = wrong(tmp_path, "plain")
    assert {"add", "sub", "mul", "less", "from fp32", "from int", "dot of torch.bfloat16"} <= found


def test_the_mended_interpreter_computes_with_numbers(tmp_path):
    assert wrong(tmp_path, "mended") == set()
