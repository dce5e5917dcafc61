"""Diagnostics of the later turns: what the verifier is worth, what the filter drops, what revisions change.

Like all diagnostics it may know the truth, and nothing here reaches a reward.
"""

from collections.abc import Iterable, Mapping, Sequence

from megarl.answers.equal import equal
from megarl.types import Gold, Group, Labels, Metrics, Rollout, RolloutKey

_SIDES = (("wrong", False), ("right", True))


def verification(own: Sequence[Rollout], labels: Labels, groups: Sequence[Group], gold: Gold) -> Metrics:
    """Metrics of one agent's rollouts, labels and groups; none where nothing was verified.

    verified_share, kept_share (of the prompts: have verdicts, train), well_formed_share and said_correct_share (of the
    verdicts), revisions (count). Against the truth: correct_recall (of the verdicts on right answers, the share that
    says so), wrong_recall, accuracy, precision (of "correct"); malformed verdicts count as not said, and where none
    could be read there is no such metric. drop_rate_wrong_label and drop_rate_right_label: of the prompts whose label
    is wrong (right), the share that does not train; label_accuracy_kept: of those that do train. changed_share,
    wrong_to_right, right_to_wrong: of the revisions.
    """
    verdicts = [r for r in own if r.prompt.role == "verify"]
    if not verdicts:
        return {}
    prompts = {(r.prompt.agent, r.prompt.uid) for r in own if r.prompt.role == "solve"}
    kept = {(g.rollouts[0].agent, g.rollouts[0].uid) for g in groups if g.rollouts}
    revisions = [r for r in own if r.prompt.role == "revise"]
    return {
        "verifier/verified_share": len({(r.prompt.agent, r.prompt.uid) for r in verdicts}) / len(prompts),
        "verifier/kept_share": len(prompts & kept) / len(prompts),
        "verifier/well_formed_share": _share(v.well_formed for v in verdicts),
        "verifier/said_correct_share": _share(v.answer == "correct" for v in verdicts),
        "verifier/revisions": float(len(revisions)),
        **_confusion(own, verdicts, gold),
        **drops(labels, kept, gold, "verifier"),
        **_revisions(own, revisions, gold),
    }


def _confusion(own: Sequence[Rollout], verdicts: Sequence[Rollout], gold: Gold) -> Metrics:
    judged = {r.key: r for r in own}
    truth: dict[bool, list[str | None]] = {True: [], False: []}  # is the answer right? -> what was said of it
    for v in verdicts:
        answer = None if v.prompt.parent is None else judged.get(v.prompt.parent)
        if v.prompt.uid in gold and answer is not None:
            truth[_right(answer, gold)].append(v.answer)
    hits = {True: truth[True].count("correct"), False: truth[False].count("wrong")}
    said_of = {right: any(said is not None for said in of) for right, of in truth.items()}
    out: Metrics = {}
    if said_of[True]:
        out["verifier/correct_recall"] = hits[True] / len(truth[True])
    if said_of[False]:
        out["verifier/wrong_recall"] = hits[False] / len(truth[False])
    if said_of[True] or said_of[False]:
        out["verifier/accuracy"] = (hits[True] + hits[False]) / (len(truth[True]) + len(truth[False]))
    if said := hits[True] + truth[False].count("correct"):
        out["verifier/precision"] = hits[True] / said
    return out


def drops(labels: Labels, kept: set[tuple[str, str]], gold: Gold, section: str) -> Metrics:
    """Drop rates and label_accuracy_kept of the prompts that have a label, as metrics of this section."""
    dropped: dict[bool, list[bool]] = {True: [], False: []}  # is the label right? -> was the prompt dropped
    for key, ballot in labels.items():
        if ballot.answer is not None and key[1] in gold:
            dropped[equal(ballot.answer, gold[key[1]])].append(key not in kept)
    out = {f"{section}/drop_rate_{name}_label": _share(dropped[right]) for name, right in _SIDES if dropped[right]}
    trained = {right: dropped[right].count(False) for _, right in _SIDES}
    if sum(trained.values()):
        out[f"{section}/label_accuracy_kept"] = trained[True] / sum(trained.values())
    return out


def _revisions(own: Sequence[Rollout], revisions: Sequence[Rollout], gold: Gold) -> Metrics:
    if not revisions:
        return {}
    by_key = {r.key: r for r in own}
    pairs = [(r, first) for r in revisions if (first := _first_answer(r, by_key)) is not None]
    out = {"verifier/changed_share": _share(not _same(r, first) for r, first in pairs)}
    known = [(_right(first, gold), _right(r, gold)) for r, first in pairs if r.prompt.uid in gold]
    if known:
        out["verifier/wrong_to_right"] = _share(pair == (False, True) for pair in known)
        out["verifier/right_to_wrong"] = _share(pair == (True, False) for pair in known)
    return out


def _first_answer(revision: Rollout, by_key: Mapping[RolloutKey, Rollout]) -> Rollout | None:
    parent = revision.prompt.parent
    return by_key.get(parent.parent) if parent is not None and parent.parent is not None else None


def _same(a: Rollout, b: Rollout) -> bool:
    return a.answer is not None and b.answer is not None and equal(a.answer, b.answer)


def _right(r: Rollout, gold: Gold) -> bool:
    return r.answer is not None and equal(r.answer, gold[r.prompt.uid])


def _share(values: Iterable[bool]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0
