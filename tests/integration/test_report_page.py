"""The report in a real browser, from a file: a short run as trained here, and a folder of 100,000 rollouts."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from playwright.sync_api import Browser, Page, expect, sync_playwright

from megarl import rollouts
from megarl.answers.equal import equal
from megarl.config import validate
from megarl.log import read_metrics
from megarl.report.command import run as report
from megarl.train import train
from megarl.types import Ballot, Message, Prompt, Rollout
from tests import cohort


def chromium() -> str | None:
    """A browser that starts: the name may be that of a stub which asks for a snap."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        path = shutil.which(name)
        if path and subprocess.run([path, "--version"], capture_output=True, timeout=60).returncode == 0:
            return path
    return None


CHROMIUM = chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH (launch/browser_ci.sh installs one)")

STEPS, QUESTIONS, SAMPLES = 20, 156, 16  # of two agents; with what is written besides 100,000 rollouts
PWNED = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1>"
BOMBS = [
    r"$\def\a{\a\a}\a$",
    r"$\def\b#1{#1#1#1#1#1#1#1#1}\b{\b{\b{\b{\b{\b{\b{x}}}}}}}$",
    r"$\href{javascript:window.pwned=1}{x} \htmlData{pwned=1}{y} \includegraphics{http://example.invalid/x.png}$",
    r"$\rule{99999em}{99999em} \kern{99999em}$",
    "$" + "{" * 990 + "}" * 990 + "$",
    "$" + r"\frac{1}{" * 90 + "2" + "}" * 90 + "$",
    r"\[" * 50_000,
    r"$x^2$ " * 5_000,
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser) -> Iterator:
    """Open a file; at the end of the test it must have had no errors, and asked for nothing else."""
    seen = SimpleNamespace(errors=[], requests=[])
    page = browser.new_page(viewport={"width": 1360, "height": 900})
    page.set_default_timeout(60_000)
    page.on("console", lambda m: seen.errors.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("request", lambda request: seen.requests.append(request.url))

    def go(path: Path) -> Page:
        page.goto(path.as_uri())
        settled(page)
        return page

    yield go
    assert seen.errors == []
    assert len(seen.requests) == 1 and seen.requests[0].startswith("file://")
    assert page.evaluate("window.pwned") is None
    page.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def plain(folder):
    return train(validate(cohort.raw(folder, name="plain", checkpoint={})))


def settled(page: Page) -> str:
    """What the browser of rollouts says once it has looked through all it was told to."""
    status = page.locator("#rollouts .status")
    expect(status).to_have_text(re.compile("^[0-9,]+ rollouts"), timeout=30_000)
    return status.inner_text()


def choose(page: Page, label: str, value: str) -> str:
    """Set a filter; what the status says then."""
    page.evaluate("document.querySelector('#rollouts .status').textContent = ''")
    page.locator(f'#rollouts select[aria-label="{label}"]').select_option(value)
    return settled(page)


def search(page: Page, text: str) -> str:
    page.evaluate("document.querySelector('#rollouts .status').textContent = ''")
    page.locator('#rollouts input[type="search"]').fill(text)
    return settled(page)


def counts(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([\d,]+) rollouts of ([\d,]+) questions", text)
    assert found, text
    return int(found[1].replace(",", "")), int(found[2].replace(",", ""))


def test_a_run_as_it_was_trained(plain, folder, visit):
    assert report([str(plain)]) == 0
    page = visit(plain / "report.html")
    rows = read_metrics(plain)
    for metric in ("label/label_accuracy", "label/majority_share_total", "policy/entropy", "engine/response_tokens"):
        figure = page.locator("figure", has=page.get_by_text(metric, exact=True))
        assert figure.locator("path.line").count() == 2, metric
    first, last = (rows[i]["agent/ann/label/label_accuracy"] for i in (0, -1))
    told = page.locator("#overview tbody tr").first.inner_text()
    assert all(f"{float(f'{value:.4g}'):g}" in told for value in (first, last)), told
    bars = page.locator("#time svg.waterfall rect:not(.waits)").count()
    assert bars == 4 + 2 * 4  # generate, measure, update, reshard: of the cohort and of each agent
    assert "steps: 4" in page.locator("#config pre").first.text_content()

    gold = {r["id"]: r["answer"] for r in map(json.loads, (folder / "problems.jsonl").read_text().splitlines())}
    seen = rollouts.read(rollouts.step_path(plain, 3))
    right = [r.answer is not None and equal(r.answer, gold[r.prompt.uid]) for r in seen]
    assert counts(settled(page)) == (len(seen), 8)
    assert counts(choose(page, "answer", "right"))[0] == sum(right)
    assert counts(choose(page, "answer", "unread"))[0] == sum(r.answer is None for r in seen)
    choose(page, "answer", "")
    assert counts(choose(page, "agent", "ann")) == (32, 4)
    by_label = {value: counts(choose(page, "label", value))[1] for value in ("right", "wrong", "none", "unknown")}
    assert sum(by_label.values()) == 4 and by_label["unknown"] == 0
    choose(page, "label", "")
    uid = seen[0].prompt.uid
    assert counts(search(page, f"{uid}=="))[0] == 0  # the control
    assert counts(search(page, f"{uid}="))[0] == 8
    assert counts(choose(page, "step", "all"))[1] >= 1


def test_runs_are_compared(folder, plain, visit):
    other = train(validate(cohort.raw(folder, name="other", seed=8, steps=2, checkpoint={})))
    assert report([str(plain), str(other), "--out", str(folder / "both.html")]) == 0
    page = visit(folder / "both.html")
    figure = page.locator("figure", has=page.get_by_text("label/label_accuracy", exact=True))
    assert figure.locator("path.line").count() == 4
    styles = figure.locator("path.line").evaluate_all("lines => lines.map(l => getComputedStyle(l).stroke)")
    assert len(set(styles)) == 2  # a colour per run, a dash per agent
    differing = page.locator("#config tbody th").all_inner_texts()
    assert {"name", "seed", "steps"} == set(differing)
    figure.locator("svg[role=img]").hover()
    assert "test/other ann" in figure.locator(".note").inner_text()
    assert counts(choose(page, "run", "1")) == (64, 8)


def response(agent: str, uid: str, index: int, text: str, answer: str | None, parent=None, role="solve") -> Rollout:
    prompt = Prompt(
        agent=agent,
        uid=uid,
        role=role,
        messages=(Message("user", f"What is the root of {uid}? Give it as $\\sqrt{{{uid}}}$."),),
        n=SAMPLES,
        parent=parent,
    )
    return Rollout(
        prompt=prompt,
        index=index,
        prompt_ids=np.arange(12, dtype=np.int32),
        token_ids=np.arange(120, dtype=np.int32),
        logprobs=np.zeros(120, np.float32),
        text=text,
        stop="end",
        version=0,
        answer=answer,
        well_formed=answer is not None,
    )


def written(step: int, rng: np.random.Generator) -> tuple[list[Rollout], dict]:
    """One step's rollouts, all different, of about 400 characters, and the labels."""
    seen, labels = [], {}
    for agent in ("ann", "bob"):
        for q in range(QUESTIONS):
            uid = f"{step}-{q}"
            for i in range(SAMPLES):
                value = int(rng.integers(3))
                shown = " + ".join(map(str, rng.integers(1000, size=60)))
                text = f"So we add {shown}: \\(\\frac{{{q}}}{{{value + 1}}}\\), hence \\boxed{{{value}}}."
                seen.append(response(agent, uid, i, text, str(value)))
            labels[agent, uid] = Ballot(answer=str(q % 3), count=6, parsed=16, total=16)
    judged = seen[3].key
    check = response("ann", f"{step}-0", 0, "The answer is wrong.", "wrong", judged, "verify")
    seen += [check, response("ann", f"{step}-0", 0, "Rather \\boxed{1}.", "1", check.key, "revise")]
    return seen, labels


@pytest.fixture(scope="module")
def big(folder):
    """A run's folder with 100,000 rollouts, a hostile question at its last step, and a course that collapses."""
    made = folder / "runs" / "big"
    made.mkdir(parents=True)
    raw = cohort.raw(folder, name="big", steps=STEPS, guard={"smooth": 1, "entropy": {"rise": 0.5, "fall": 0.5}})
    problems = folder / "roots.jsonl"
    lines = [{"id": f"{s}-{q}", "prompt": "?", "answer": str(q % 3)} for s in range(STEPS) for q in range(QUESTIONS)]
    problems.write_text("".join(json.dumps(line) + "\n" for line in lines))
    raw["data"]["path"] = str(problems)
    (made / "config.yaml").write_text(yaml.safe_dump(raw))
    course = [min(step, 14 - step) if step < 14 else 0.5 for step in range(STEPS)]
    still = {"agent/bob/policy/entropy": 1.0, "agent/ann/memory/peak_gib": 3.5, "agent/bob/policy/kl": 0.0}
    rows = [{"step": step, "agent/ann/policy/entropy": entropy, **still} for step, entropy in enumerate(course)]
    (made / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rng, total = np.random.default_rng(0), 0
    for step in range(STEPS):
        seen, labels = written(step, rng)
        if step == STEPS - 1:
            seen += [response("ann", "evil", i, f"{PWNED} {bomb}", f"{PWNED}{i}") for i, bomb in enumerate(BOMBS)]
            labels["ann", "evil"] = Ballot(answer=PWNED, count=1, parsed=8, total=8)
            fill = 100_000 - total - len(seen)
            seen += [response("bob", "needle", i, f"needle number {i:04d}", None) for i in range(fill)]
        total += len(seen)
        rollouts.write(rollouts.step_path(made, step), seen, step=step, labels=labels)
    assert total == 100_000
    assert report([str(made)]) == 0
    return made / "report.html"


def test_a_hundred_thousand_rollouts_paint_at_once(big, visit, capsys):
    page = visit(big)
    paints = page.evaluate("performance.getEntriesByType('paint').map(p => [p.name, p.startTime])")
    began = time.perf_counter()
    assert counts(choose(page, "step", "all"))[0] == 100_000
    read = time.perf_counter() - began
    began = time.perf_counter()
    assert counts(search(page, "NEEDLE NUMBER 0017")) == (1, 1)
    found = time.perf_counter() - began
    with capsys.disabled():
        print(
            f"\n100,000 rollouts, {big.stat().st_size / 1e6:.1f} MB: "
            + ", ".join(f"{name} {at:.0f} ms" for name, at in paints)
            + f"; all steps read in {read:.1f} s, searched in {found:.1f} s"
        )
    assert dict(paints)["first-contentful-paint"] < 5000  # some 0.3 s; the machine may be busy
    page.locator(".card summary").click()
    expect(page.locator(".card .turn")).to_have_count(1)
    assert "needle number 0017" in page.locator(".card .turn .text").inner_text()


def test_signs_of_collapse_are_circled(big, visit):
    page = visit(big)
    figure = page.locator("figure", has=page.get_by_text("policy/entropy", exact=True))
    assert figure.locator("circle.mark").count() == 1
    title = figure.locator("circle.mark title").text_content()
    assert title.startswith("step 11, ann: rose from 0 to 7 and fell to 3"), title
    assert "rose from 0 to 7" in page.locator("#signs tbody").inner_text()
    titles = page.locator("figcaption").all_inner_texts()
    assert "memory/peak_gib" in titles and "policy/kl" not in titles
    assert page.get_by_text("0 throughout: policy/kl").count() == 1
    figure.locator("svg[role=img]").click(position={"x": 150, "y": 60})
    settled(page)
    assert page.locator('#rollouts select[aria-label="step"]').input_value() == "6"


def test_verdicts_stand_under_the_answer_they_speak_of(big, visit):
    page = visit(big)
    assert counts(choose(page, "turn", "revise")) == (1, 1)
    page.locator(".card summary").click()
    answer = page.locator(".card .body > .turn")
    expect(answer).to_have_count(1)
    assert "context" in answer.get_attribute("class")
    assert "solve 3" in answer.locator("> .facts").inner_text()
    assert "The answer is wrong." in answer.locator("> .verify > .text").inner_text()
    assert answer.locator("> .verify > .revise").count() == 1
    assert answer.locator("math mfrac").count() >= 1  # KaTeX made MathML of \frac


def test_what_a_hostile_model_writes_is_text(big, visit):
    page = visit(big)
    assert counts(search(page, "window.pwned")) == (len(BOMBS), 1)
    began = time.perf_counter()
    page.locator(".card summary").click()
    expect(page.locator(".card .turn .text")).to_have_count(len(BOMBS), timeout=30_000)
    texts = page.locator(".card .turn .text").all_inner_texts()
    assert time.perf_counter() - began < 30
    assert all(text.startswith(PWNED) for text in texts)
    assert page.locator("main script, main img, main a").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator(".card .turn math").count() > 100  # of the last, as many as the bounds allow
    assert page.evaluate("Object.keys(document.body.dataset).length") == 0
