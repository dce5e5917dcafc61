"""Imported once by the process that the rank processes are forked from."""

from megarl.backends.megatron import cpu

cpu.enable()  # ahead of megatron-core, as in a worker

from megarl.backends.megatron import patches, worker  # noqa: E402

__all__ = ["worker"]

patches.import_bridge()
