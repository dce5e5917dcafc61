"""What is replaced in Ray. The version is checked, and the replacement has a test that fails once it does nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray._private import ray_constants

RAY = "2.60."


@contextmanager
def loopback_only() -> Iterator[None]:
    """A cluster that starts in here stays on loopback.

    Ray replaces 127.0.0.1 by an outside address, on which it then listens, unless clusters are off
    (_private/services.py 798, 815); the switch is read from the environment at Ray's import, long before this, and is
    not meant for Linux, so another release may drop it: a run must not open its ports to the network without a word.
    """
    if not ray.__version__.startswith(RAY):
        raise RuntimeError(f"{__name__} is written for ray {RAY}x, found {ray.__version__}: check what it replaces")
    enabled = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled
