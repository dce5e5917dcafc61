"""case-A3: an asynchronous Ray actor votes as this process does."""

import ray

from megarl.answers.vote import vote
from megarl.backends.cluster import connect
from megarl.settings import ClusterConfig

GROUP = ["1/2", "0.5", r"\sin 30^\circ", "3"]


def test_case_a3_an_async_actor_votes(tmp_path):
    class Voter:  # here, so that it travels by value
        """Its methods run on the actor's event loop, off the main thread."""

        async def vote(self, answers):
            return vote(answers)

    made = connect(ClusterConfig(device="cpu", gpus_per_node=1), tmp_path)
    try:
        voter = ray.remote(Voter).options(max_concurrency=4, num_cpus=0).remote()
        ballots = ray.get([voter.vote.remote(GROUP) for _ in range(8)], timeout=300)
    finally:
        made.close()
    here = vote(GROUP)
    assert here.count == 3 and here.share_total == 3 / 4
    assert set(ballots) == {here}
