"""Triton kernels compiled for a GPU that is not there, and what their machine code shows.

Triton's wheel holds ptxas and cuobjdump, so registers, spills and the width of the loads can be read on any machine.
A module of kernels lists one ``Specimen`` per kernel, with the types and constants it is launched with, in ``KERNELS``.
"""

import collections
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ALIGNMENT = 16  # bytes of a pointer, as torch allocates; and what Triton's launcher finds out of an integer by itself
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Specimen:
    """One kernel as it is launched on the hardware it is made for."""

    kernel: Any  # what @triton.jit returned
    arguments: Mapping[str, str]  # name -> Triton's type: "*fp32", "*i64", "i32", "fp32"
    constants: Mapping[str, Any]  # name -> value of the tl.constexpr; None for a pointer left out
    aligned: tuple[str, ...] = ()  # integer arguments that are multiples of 16; pointers always are
    num_warps: int = 4
    num_stages: int = 3
    wide_loads: bool = True  # 16-byte loads are expected
    tensor_cores: bool = False  # HGMMA is expected
    label: str = ""

    @property
    def name(self) -> str:
        return self.kernel.__name__ + (f" ({self.label})" if self.label else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the cubin says."""

    registers: int  # per thread
    stack: int  # bytes per thread: above 0 something was spilled
    shared: int  # bytes per block
    opcodes: Mapping[str, int] = field(repr=False)  # SASS instruction -> how often it stands in the code
    ttir: str = field(repr=False)  # the program before any layout is chosen

    def count(self, prefix: str) -> int:
        """Instructions whose name begins with ``prefix``: "LDG.E.128", "HGMMA", "LDL" (a spill read back)."""
        return sum(n for name, n in self.opcodes.items() if name.startswith(prefix))


def compiled(specimen: Specimen, capability: int = 90) -> Machine:
    """The specimen compiled for sm_``capability``; RuntimeError where Triton's tools say no.

    Triton must not be in interpreter mode (TRITON_INTERPRET): there kernels are plain Python functions.
    """
    names = list(specimen.kernel.arg_names)
    types = {**dict.fromkeys(specimen.constants, "constexpr"), **specimen.arguments}
    missing = [n for n in names if n not in types]
    if missing:
        raise ValueError(f"{specimen.name}: neither a type nor a constant for {', '.join(missing)}")
    source = ASTSource(
        fn=specimen.kernel,
        signature={n: types[n] for n in names},
        constexprs={(names.index(n),): value for n, value in specimen.constants.items()},
        attrs={
            (names.index(n),): [["tt.divisibility", ALIGNMENT]]
            for n, kind in specimen.arguments.items()
            if kind.startswith("*") or n in specimen.aligned
        },
    )
    binary = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": specimen.num_warps, "num_stages": specimen.num_stages},
    )
    usage, listing = _disassembled(binary.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says no resource usage for {specimen.name}:\n{usage}")
    return Machine(
        registers=int(found[1]),
        stack=int(found[2]),
        shared=binary.metadata.shared,
        opcodes=dict(collections.Counter(_OPCODE.findall(listing))),
        ttir=str(binary.asm["ttir"]),
    )


def _disassembled(cubin: bytes) -> tuple[str, str]:
    """(resource usage, SASS) as cuobjdump prints them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return tuple(  # type: ignore[return-value]
            subprocess.run(
                [_TOOLS / "cuobjdump", option, file.name], capture_output=True, text=True, check=True, timeout=60
            ).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
