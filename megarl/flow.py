"""The flow that theory predicts for agents that teach each other answers to one problem with two of them (2608.17253).

Binary reduction: each of K votes is right with probability p, K odd, no clipping and no KL term. Axes: A agents,
P problems.
"""

from collections.abc import Sequence
from math import comb

import numpy as np


def majority_right(p: np.ndarray, votes: int) -> np.ndarray:
    """V_K(p) = P(Bin(K, p) > K/2): the probability that the vote is right; any shape."""
    wins = range(votes // 2 + 1, votes + 1)
    return np.sum([comb(votes, k) * p**k * (1 - p) ** (votes - k) for k in wins], axis=0)


def pull(p: np.ndarray, votes: int) -> np.ndarray:
    """phi_K(p) = 2 V_K(p) - 1: how surely, and in which direction, a teacher with accuracy p pulls."""
    return 2 * majority_right(p, votes) - 1


def mobility(p: np.ndarray, votes: int) -> np.ndarray:
    """q_K(p) = p (1 - p) E[sqrt(C (K - C)) / K], C ~ Bin(K, p): how far a student at accuracy p is moved (eta = 1)."""
    spread = np.sum(
        [comb(votes, c) * p**c * (1 - p) ** (votes - c) * np.sqrt(c * (votes - c)) / votes for c in range(votes + 1)],
        axis=0,
    )
    return p * (1 - p) * spread


def velocity(p_AP: np.ndarray, teachers: Sequence[int], votes: int) -> np.ndarray:
    """dp/dt, float64[A, P]: agent a is taught by agent ``teachers[a]`` (itself: TTRL)."""
    return mobility(p_AP, votes) * pull(p_AP, votes)[list(teachers)]


def settle(p_AP: np.ndarray, teachers: Sequence[int], votes: int, *, step: float = 0.5, steps: int = 400) -> np.ndarray:
    """Where the flow leads, float64[A, P], by Heun's method from p_AP. 0 and 1 are fixed points.

    Two agents end at 1 exactly where p_A + p_B > 1 at first, and one that teaches itself where p > 1/2.
    """
    if votes % 2 == 0:
        raise ValueError(f"votes={votes}: the flow is that of an odd number of votes, where no tie can be")
    p_AP = np.asarray(p_AP, np.float64)
    for _ in range(steps):
        first = velocity(p_AP, teachers, votes)
        guess = np.clip(p_AP + step * first, 0, 1)
        p_AP = np.clip(p_AP + step / 2 * (first + velocity(guess, teachers, votes)), 0, 1)
    return p_AP
