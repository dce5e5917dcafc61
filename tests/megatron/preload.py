"""Imported once by the process that the rank processes are forked from."""

from megarl.backends.megatron import cpu, patches, worker

__all__ = ["worker"]

cpu.enable()
patches.import_bridge()
