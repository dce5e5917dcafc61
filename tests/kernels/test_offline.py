"""Every Triton kernel compiled for sm_90 with no GPU at hand, and what its machine code shows."""

import ast
import importlib
import os
import re
from pathlib import Path

import pytest
import triton
import triton.language as tl

import megarl_kernels
from megarl_kernels.offline import Specimen, compiled

FOLDER = Path(megarl_kernels.__file__).parent
MODULES = [
    importlib.import_module(f"megarl_kernels.{path.stem}")
    for path in sorted(FOLDER.glob("*.py"))
    if re.search("^@triton.jit", path.read_text(), re.M)
]
SPECIMENS = [s for module in MODULES for s in module.KERNELS]
MAX_REGISTERS = 255  # of a thread: at that number ptxas begins to spill

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels have nothing to compile"
)


def test_every_kernel_is_a_specimen():
    """A function under @triton.jit is either listed in KERNELS or called from one that is."""
    assert len(MODULES) >= 2
    for module in MODULES:
        tree = ast.parse(Path(module.__file__).read_text())
        jitted = {
            f.name: f
            for f in tree.body
            if isinstance(f, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in f.decorator_list)
        }
        reached = {s.kernel.__name__ for s in module.KERNELS}
        while True:
            names = {n.id for f in reached for n in ast.walk(jitted[f]) if isinstance(n, ast.Name)}
            if (names & jitted.keys()) <= reached:
                break
            reached |= names & jitted.keys()
        assert reached == jitted.keys(), f"{module.__name__}: not in KERNELS: {jitted.keys() - reached}"


@pytest.mark.parametrize("specimen", SPECIMENS, ids=lambda s: s.name)
def test_machine_code(specimen):
    machine = compiled(specimen)
    print(specimen.name, machine)
    assert machine.stack == 0 and machine.count("LDL") == 0 and machine.count("STL") == 0  # nothing spilled
    assert machine.registers < MAX_REGISTERS
    assert (machine.count("LDG.E.128") > 0) >= specimen.wide_loads
    assert (machine.count("HGMMA") > 0) >= specimen.tensor_cores
    assert narrow_offsets(machine.ttir) == []


@pytest.mark.parametrize("specimen", {s.kernel.__name__: s for s in SPECIMENS}.values(), ids=lambda s: s.name)
def test_also_for_sm_80(specimen):
    machine = compiled(specimen, capability=80)
    assert machine.stack == 0 and machine.count("LDL") == 0


def narrow_offsets(ttir: str) -> list[str]:
    """Address arithmetic that would wrap at 2^31: a pointer moved by a product that was taken in 32 bits."""
    defined = dict(re.findall(r"^\s*(%[\w#]+)(?::\d+)? = (.*)$", ttir, re.M))
    found = []
    for text in defined.values():
        if not text.startswith("tt.addptr"):
            continue
        left, seen = operands(text)[1:], set()
        while left:
            name = left.pop()
            body = defined.get(name, "tt.load")  # an argument; what was loaded has the width it was stored in
            if name in seen or body.startswith("tt.load"):
                continue
            seen.add(name)
            left += operands(body)
            if body.startswith("arith.muli") and re.search(r": (tensor<[\dx]*)?i32", body):
                found.append(f"{body}  in  {text}")
    return found


def operands(text: str) -> list[str]:
    return re.findall(r"%[\w#]+", text.split(" : ")[0])


@triton.jit
def narrow_kernel(X, OUT, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + i, tl.load(X + i, mask=i < n), mask=i < n)


@triton.jit
def spilling_kernel(X, OUT, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < n, other=0.0)
    tl.store(OUT + i, x / tl.sum(x, 0), mask=i < n)  # every value is alive until the sum is known


def test_the_checks_can_fail():
    """32-bit offsets, narrow loads and spills are found where they are."""
    types = {"X": "*fp32", "OUT": "*fp32", "n": "i32"}
    narrow = compiled(Specimen(kernel=narrow_kernel, arguments=types, constants={"BLOCK": 1024}))
    assert narrow_offsets(narrow.ttir) and narrow.count("LDG.E.128") == 0  # n is no multiple of 16
    spilled = compiled(
        Specimen(kernel=spilling_kernel, arguments=types, constants={"BLOCK": 8192}, num_warps=1, wide_loads=False)
    )
    assert spilled.stack > 0 and spilled.count("LDL") > 0
