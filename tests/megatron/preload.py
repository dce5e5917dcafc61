"""Imported once by the process that the rank processes are forked from."""

import megarl.backends.megatron.worker
from megarl.backends.megatron import cpu, patches

cpu.enable()
patches.import_bridge()
