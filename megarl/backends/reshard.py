"""A policy's weights into its engine, under their Hugging Face names, bucket by bucket."""

from contextlib import closing

from megarl.backends.protocols import Engine, Policy
from megarl.types import Metrics


def reshard(policy: Policy, engine: Engine, version: int, bucket_bytes: int) -> Metrics:
    """Give the engine the policy's present weights and stamp them ``version``.

    Returns bytes and buckets. Where it raises, the engine refuses to generate until a refit has succeeded.
    """
    nbytes = buckets = 0
    engine.begin_refit()
    with closing(policy.weights(bucket_bytes)) as weights:  # a bucket that could not be loaded is removed at once
        for bucket in weights:
            engine.load_weights(bucket)
            nbytes += bucket.nbytes
            buckets += 1
    engine.finish_refit(version)
    return {"bytes": float(nbytes), "buckets": float(buckets)}
