"""The vote: answers -> ballot."""

from collections.abc import Sequence

from megarl.answers.equal import canonical
from megarl.types import Ballot


def vote(answers: Sequence[str | None]) -> Ballot:
    """The largest class of equal answers. ``answers`` stand in index order; None and empty ones do not vote.

    A tie goes to the class whose first member has the lowest index, and is flagged. The label is that member's
    spelling. Nobody parsed: answer None, count 0.

    Example: ``vote(["a", "b", "b", "a"])`` is a, with 2 of 4 votes and tie=True.
    """
    classes: dict[str, list[int]] = {}
    for i, answer in enumerate(answers):
        key = canonical(answer) if answer is not None else None
        if key is not None:
            classes.setdefault(key, []).append(i)
    parsed = sum(len(members) for members in classes.values())
    if not classes:
        return Ballot(answer=None, count=0, parsed=0, total=len(answers))
    winners = max(classes.values(), key=len)  # the first of the largest: classes are in order of their first member
    return Ballot(
        answer=answers[winners[0]],
        count=len(winners),
        parsed=parsed,
        total=len(answers),
        winners=tuple(winners),
        tie=sum(len(members) == len(winners) for members in classes.values()) > 1,
    )
