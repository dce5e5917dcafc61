"""`megarl report` without a browser: what is read, what is kept of it, and what a hostile answer can do to the page."""

import base64
import gzip
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from megarl import cli, rollouts
from megarl.report.command import katex
from megarl.report.page import as_json, page
from megarl.report.run import collapses, columns, open_run
from megarl.report.steps import evenly, kept, step_block, step_data
from megarl.types import Ballot, Message, Prompt
from tests.unit import records

HOSTILE = "</script><script>window.pwned=1</script><!--<script> $\\def\\x{\\x\\x}\\x$ \u2028 \x00"


class Scripts(HTMLParser):
    """The script elements of a page, as a browser's parser cuts them: [attributes, text]."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._inside = tag == "script"
        if self._inside:
            self.found.append((dict(attrs), ""))

    def handle_endtag(self, tag):
        self._inside = False

    def handle_data(self, data):
        if self._inside:
            attributes, text = self.found[-1]
            self.found[-1] = attributes, text + data


def run_dir(folder: Path, rows: list[dict], **changes) -> Path:
    """A run's folder with these rows of metrics."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "experiment": "made",
        "name": folder.name,
        "steps": 9,
        "algo": {"name": "ttrl"},
        "agents": {"a": {"model": "models/a"}},
        "data": {"path": "nowhere.jsonl", "gold": "answer"},
        "sampling": {"max_tokens": 8},
        **changes,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def read_block(block: str) -> dict:
    return json.loads(gzip.decompress(base64.b64decode(block)))


@pytest.mark.parametrize(
    ("count", "wanted"),
    [(1, [9]), (2, [0, 9]), (3, [0, 4, 9]), (4, [0, 3, 6, 9]), (10, list(range(10))), (99, list(range(10)))],
)
def test_evenly_spaced(count, wanted):
    assert evenly(range(10), count) == wanted


def test_evenly_never_names_a_step_twice_and_gaps_differ_by_one_at_most():
    for size in range(1, 60):
        for count in range(1, size + 1):
            found = evenly(range(size), count)
            gaps = {b - a for a, b in pairwise(found)}
            assert len(found) == count and all(gap > 0 for gap in gaps) and (not gaps or max(gaps) - min(gaps) <= 1)


def test_the_budget_keeps_as_many_steps_as_fit():
    sizes = {step: 100 + 10 * step for step in range(0, 40, 2)}
    made = []

    def block(step: int) -> str:
        made.append(step)
        return "x" * sizes[step]

    assert list(kept(list(sizes), block, sum(sizes.values()))) == list(sizes)
    some = kept(list(sizes), block, 1500)
    assert list(some) == evenly(list(sizes), len(some)) and sum(map(len, some.values())) <= 1500
    more = evenly(list(sizes), len(some) + 1)
    assert sum(sizes[step] for step in more) > 1500
    assert list(kept(list(sizes), block, sizes[38])) == [38]
    assert kept(list(sizes), block, 99) == {} and kept([], block, 10**9) == {} and kept([1], lambda _: "xx", 0) == {}
    before = len(made)
    kept(list(range(1000)), lambda step: block(0), 1000)
    assert len(made) - before < 40  # what cannot fit is not made


def test_a_step_says_who_voted_what_and_who_was_right(tmp_path):
    seen = records.rollouts("a", "q", ["1/2", "0.5", "3", None, "1/2"], text="so it is")
    seen += records.rollouts("b", "q", ["7", "7", "8", None, "8"])
    first = seen[2]
    ask = Prompt(agent="a", uid="q", role="verify", messages=(Message("user", "Check:"),), n=1, parent=first.key)
    check = replace(records.rollout(answer="wrong", text="No."), prompt=ask)
    labels = {
        ("a", "q"): Ballot(answer="7", count=2, parsed=4, total=5, tie=True),
        ("b", "q"): Ballot(answer="1/2", count=3, parsed=4, total=5),
    }
    path = tmp_path / "step.parquet"
    rewards = {seen[0].key: 0.0, seen[5].key: float("nan")}
    rollouts.write(path, [*seen, check], step=3, labels=labels, rewards=rewards, advantages={seen[0].key: -0.123456})
    data = step_data(path, {"q": "0.5"})
    a, b = data["questions"]
    assert (a["label"], a["right"], a["count"], a["tie"]) == ("7", False, 2, True)
    assert (b["label"], b["right"], b["total"], b["gold"]) == ("1/2", True, 5, "0.5")
    assert [(c["answer"], c["count"], c["right"]) for c in a["clusters"]] == [("1/2", 3, True), ("3", 1, False)]
    of = data["rollouts"]
    assert of["right"] == [True, True, False, False, True, False, False, False, False, False, True]
    assert of["cluster"][:5] == [0, 0, 1, -1, 0] and of["cluster"][-1] == -1
    assert of["parent"] == [-1] * 10 + [2] and of["role"][-1] == "verify"
    assert of["reward"][:2] == [0.0, None] and of["reward"][5] == "nan" and of["advantage"][0] == -0.1235
    assert of["tokens"][0] == 3 and data["conversations"][of["conversation"][-1]][0]["content"] == "Check:"
    unknown = step_data(path, {})
    assert set(unknown["rollouts"]["right"]) == {None} and unknown["questions"][1]["right"] is None
    assert read_block(step_block(path, {"q": "0.5"})) == data


def test_a_file_that_is_none_is_named(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ValueError, match=r"x.parquet is no rollout file"):
        step_block(tmp_path / "x.parquet", {})


def test_metrics_become_columns():
    rows = [{"step": 0.0, "a": 0.123456789, "b": float("nan")}, {"step": 1.0, "c": 1e-9}]
    assert columns(rows) == {"step": [0, 1], "a": [0.123457, None], "b": [None, None], "c": [None, 1e-9]}


def test_signs_are_told_once_and_at_their_step(tmp_path):
    course = [1, 2, 3, 4, 5, 5, 5, 4, 3, 2, 1, 0.5, 0.5, 0.5]
    rows = [{"step": i, "agent/a/policy/entropy": value} for i, value in enumerate(course)]
    run = open_run(run_dir(tmp_path / "r", rows, guard={"smooth": 1, "entropy": {"rise": 0.5, "fall": 0.5}}))
    (told,) = collapses(run)
    assert told == {"step": 9, "key": "agent/a/policy/entropy", "text": "rose from 1 to 5 and fell to 2"}
    calm = [{"step": i, "agent/a/policy/entropy": 1.0} for i in range(14)]
    assert collapses(open_run(run_dir(tmp_path / "calm", calm))) == []


def test_nothing_in_the_data_ends_its_element():
    data = {"runs": [{"name": HOSTILE}]}
    text = page(HOSTILE, data, {(0, 3): "QUJD"}, "katex = {};")
    scripts = Scripts(text).found
    assert [(a.get("type"), a.get("id")) for a, _ in scripts] == [
        ("application/json", "data"),
        (None, None),
        (None, None),
        ("text/plain", "rollouts-0-3"),
    ]
    assert json.loads(scripts[0][1]) == data
    assert scripts[3][1] == "QUJD"
    assert "window.pwned" not in "".join(s for a, s in scripts if "type" not in a)
    assert "<" not in as_json({HOSTILE: HOSTILE})
    naive = Scripts(f'<script type="application/json">{json.dumps(data)}</script>').found  # the control
    assert len(naive) > 1 and "window.pwned=1" in naive[1][1]


def test_a_placeholder_in_the_data_stays_what_it_is():
    scripts = Scripts(page("{{katex}}", {"x": "{{script}} {{blocks}}"}, {}, "katex = {};")).found
    assert json.loads(scripts[0][1]) == {"x": "{{script}} {{blocks}}"}


def test_the_page_asks_for_nothing():
    text = page("t", {"runs": []}, {}, "katex = {};")
    assert "default-src 'none'" in text and not re.search(r'(?:src|href)="', text)
    assert katex() in page("t", {"runs": []}, {}, katex())
    ours = "\n".join(p.read_text() for p in (Path(cli.__file__).parent / "report").glob("*.js"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", ours)
    assert "fetch(" not in ours and "XMLHttpRequest" not in ours


@pytest.mark.parametrize(
    ("make", "arguments", "wanted"),
    [
        (lambda p: None, [], "no such folder"),
        (lambda p: p.mkdir(), [], "no run there (no config.yaml)"),
        (lambda p: run_dir(p, []), [], "no step of this run is done yet"),
        (
            lambda p: run_dir(p, [{"step": 0}], steps="many"),
            [],
            "not the configuration of a run of this version: steps",
        ),
        (lambda p: run_dir(p, [{"step": 0}]), ["--out", "/nowhere/x.html"], "its folder does not exist"),
        (lambda p: run_dir(p, [{"step": 0}]), ["--out", "."], "a folder; name a file"),
        (lambda p: run_dir(p, [{"step": 0}]), ["--rollouts-mb", "-1"], "--rollouts-mb -1: from 0 to 512"),
        (lambda p: run_dir(p, [{"step": 0}]), ["TWICE"], "RUN given twice"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, capsys, make, arguments, wanted):
    make(tmp_path / "r")
    with pytest.raises(SystemExit) as left:
        cli.main(["report", str(tmp_path / "r"), *(str(tmp_path / "r") if a == "TWICE" else a for a in arguments)])
    assert left.value.code == cli.BAD_INPUT
    said = capsys.readouterr().err
    assert wanted in said and "Traceback" not in said
    assert not list(tmp_path.glob("**/*.html*"))


def test_the_command_writes_a_page_and_says_what_it_left_out(tmp_path, capsys):
    folder = run_dir(tmp_path / "r", [{"step": step, "agent/a/reward/reward_mean": 0.5} for step in range(6)])
    for step in range(6):
        seen = records.rollouts("a", f"q{step}", ["1", HOSTILE], text=HOSTILE)
        rollouts.write(rollouts.step_path(folder, step), seen, step=step)
    assert cli.report([str(folder)]) == 0
    assert "left out" not in capsys.readouterr().out
    text = (folder / "report.html").read_text()
    assert len(re.findall(r'id="rollouts-0-\d+"', text)) == 6
    size = len(step_block(rollouts.step_path(folder, 5), {}))
    assert cli.report([str(folder), "--out", str(tmp_path / "small.html"), "--rollouts-mb", str(2.5 * size / 1e6)]) == 0
    assert "made/r: rollouts of 2 of 6 steps fit in --rollouts-mb" in capsys.readouterr().out
    scripts = Scripts((tmp_path / "small.html").read_text()).found
    assert [a["id"] for a, _ in scripts if "rollouts" in (a.get("id") or "")] == ["rollouts-0-0", "rollouts-0-5"]
    data = json.loads(scripts[0][1])["runs"][0]
    assert data["rollouts"]["steps"] == [0, 5] and data["rollouts"]["of"] == 6
    assert "nowhere.jsonl" in data["rollouts"]["unknown"]
    assert read_block(scripts[-1][1])["rollouts"]["text"] == [HOSTILE, HOSTILE]
