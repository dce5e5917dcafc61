"""The vote: answers -> ballot."""

from collections.abc import Sequence

from megarl.answers.equal import partition
from megarl.answers.form import read_form
from megarl.types import Ballot


def vote(answers: Sequence[str | None]) -> Ballot:
    """The largest class of equal answers. ``answers`` stand in index order; None and empty ones do not vote.

    A tie goes to the class whose first member has the lowest index, and is flagged. The label is that member's
    spelling. Nobody parsed: answer None, count 0. ``undecided`` counts the pairs of classes that could neither be
    shown equal nor different: they stay apart.

    Example: ``vote(["a", "b", "b", "a"])`` is a, with 2 of 4 votes and tie=True.
    """
    classes, undecided = clusters(answers)
    if not classes:
        return Ballot(answer=None, count=0, parsed=0, total=len(answers))
    winners = max(classes, key=len)  # the first of the largest: classes are in order of their first member
    return Ballot(
        answer=answers[winners[0]],
        count=len(winners),
        parsed=sum(len(members) for members in classes),
        total=len(answers),
        winners=tuple(winners),
        tie=sum(len(members) == len(winners) for members in classes) > 1,
        undecided=undecided,
    )


def clusters(answers: Sequence[str | None]) -> tuple[list[list[int]], int]:
    """Positions by class, classes in order of their first member; and the number of undecided pairs of classes."""
    read = [(i, read_form(answer)) for i, answer in enumerate(answers) if answer is not None]
    voters = [(i, form) for i, form in read if form is not None]
    classes, undecided = partition([form for _, form in voters])
    return [[voters[k][0] for k in members] for members in classes], undecided
