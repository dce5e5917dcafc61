"""`megarl rewrite` against a server that gives recorded replies: those of SmolLM2-135M-Instruct behind vLLM's server.

The model is small: some replies are refused. Which ones is read off the recorded texts here by other means.
"""

import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megarl import cli
from megarl.config import validate
from megarl.log import read_metrics
from megarl.rollouts import read, step_path
from megarl.rows import read_rows
from megarl.train import train
from tests import cohort

EXCHANGE = json.loads((Path(__file__).parent / "rewrite_exchange.json").read_text())
COMPLETION = EXCHANGE["exchanges"]
ONCE = {"x-should-retry": "false"}  # the client then does not ask again


class Recorded:
    """A server of the recorded exchanges; requests that nobody recorded, and those beyond ``most``, get ``fault``."""

    def __init__(self) -> None:
        self.most, self.fault = 10**6, (404, "application/json", b'{"error": {"message": "never recorded"}}')
        self.asked: list[str] = []
        self.keys: set[str | None] = set()
        self._answers = {_request(e["request"]): e for e in COMPLETION}
        recorded = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                found = recorded._answers.get(_request(body)) if len(recorded.asked) < recorded.most else None
                recorded.asked.append(_request(body))
                recorded.keys.add(self.headers["authorization"])
                status, kind, content = recorded.fault
                if found is not None:
                    status, kind, content = found["status"], "application/json", json.dumps(found["response"]).encode()
                self.send_response(status)
                for name, value in (("content-type", kind), ("content-length", str(len(content))), *ONCE.items()):
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _request(body: dict) -> str:
    return json.dumps(body, sort_keys=True)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    made = Recorded()
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in EXCHANGE["rows"]))
    (tmp_path / "instruction.txt").write_text(EXCHANGE["instruction"])
    return tmp_path


def rewrite(folder, url, out="out.jsonl", *more):
    command = ["rewrite", folder / "problems.jsonl", folder / out, "--id", "id", "--column", "reworded"]
    command += ["--instruction", folder / "instruction.txt", *(("--endpoint", url) if url else ())]
    with pytest.raises(SystemExit) as ended:
        cli.main([str(part) for part in (*command, *more)])
    return ended.value.code


ASKED = ("--model", "smollm2-135m-instruct", "--max-tokens", "96", "--seed", "1", "--attempts", "4")


def texts() -> dict[str, list[str]]:
    """problem -> the texts that are right between one pair of marks, of its replies in the order of attempts."""
    out: dict[str, list[str]] = {}
    for e in sorted(COMPLETION, key=lambda e: e["request"]["seed"]):
        choice, asked = e["response"]["choices"][0], e["request"]["messages"][0]["content"]
        before, _, after = EXCHANGE["instruction"].partition("{problem}")
        problem = asked.removeprefix(before).removesuffix(after)
        said = choice["message"]["content"]
        if choice["finish_reason"] == "stop" and said.count("<problem>") == said.count("</problem>") == 1:
            inner = said.split("<problem>")[1].split("</problem>")[0].strip()
            if inner and re.findall(r"\w+", inner.lower()) != re.findall(r"\w+", problem.lower()):
                out.setdefault(problem, []).append(inner)
    return out


def test_ids_and_answers_are_kept_row_by_row(folder, server, capsys, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    assert rewrite(folder, server.url, "out.jsonl", *ASKED, "--key-env", "MY_KEY") == 0
    assert server.keys == {"Bearer secret"} and "secret" not in (folder / "out.jsonl.record.jsonl").read_text()
    told = capsys.readouterr().out
    wanted = texts()
    made, source = read_rows(folder / "out.jsonl"), EXCHANGE["rows"]
    assert made == [{**row, "reworded": wanted[row["prompt"]][0]} for row in source if row["prompt"] in wanted]
    refused = [row["id"] for row in source if row["prompt"] not in wanted]
    assert made and refused, "the recorded replies hold both kinds"
    assert f"{len(made)} rows by smollm2-135m-instruct, {len(refused)} refused and left out\n" in told
    assert re.findall(r"^  (\S+): ", told, re.MULTILINE) == refused
    head, *rest = map(json.loads, (folder / "out.jsonl.record.jsonl").read_text().splitlines())
    assert head["request"]["model"] == "smollm2-135m-instruct" and head["facts"]["by"] == server.url
    assert head["request"]["instruction"] == EXCHANGE["instruction"] and head["request"]["sampling"]["top_p"] == 0.8
    assert Counter(o["id"] for o in rest) == Counter(row["id"] for row in source)
    assert {o["id"] for o in rest if o["refused"]} == set(refused)
    assert sum(o["attempts"] for o in rest) == len(server.asked) == len(COMPLETION)  # refused rows are asked again
    # a second time: it stands there already
    assert rewrite(folder, server.url, "out.jsonl", *ASKED) == 2
    assert "exists: choose another name" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_was_interrupted_is_gone_on_with(folder, server, capsys, suffix):
    """The server fails half-way; the last line of the record is cut; nothing is asked twice and OUT is the same."""
    assert rewrite(folder, server.url, f"whole.{suffix}", *ASKED) == 0
    server.asked.clear()
    server.most, server.fault = 7, (503, "application/json", b'{"error": {"message": "overloaded"}}')
    one_by_one = ("--workers", "1")
    assert rewrite(folder, server.url, f"out.{suffix}", *ASKED, *one_by_one) == cli.LOST
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert "overloaded" in told and f"goes on from {folder}/out.{suffix}.record.jsonl" in told
    assert not (folder / f"out.{suffix}").exists()
    record = folder / f"out.{suffix}.record.jsonl"
    done = {json.loads(line)["id"] for line in record.read_text().splitlines()[1:]}
    assert done, "some rows were good at the first attempt"
    record.write_text(record.read_text() + '{"id": "p')
    before, server.most = len(server.asked), 10**6
    assert rewrite(folder, server.url, f"out.{suffix}", *ASKED, *one_by_one) == 0
    problems = {row["prompt"] for row in EXCHANGE["rows"] if row["id"] in done}
    assert not any(problem in request for request in server.asked[before:] for problem in map(_inside, problems))
    assert (folder / f"out.{suffix}").read_bytes() == (folder / f"whole.{suffix}").read_bytes()
    assert not list(folder.glob("*.partial"))


def _inside(problem: str) -> str:
    return json.dumps(problem)[1:-1]


def test_faults_are_one_line(folder, server, capsys):
    def told(code, *more, url=server.url):
        assert rewrite(folder, url, "out.jsonl", *more) == code
        lines = capsys.readouterr().err.strip().splitlines()
        assert not (folder / "out.jsonl").exists() and "Traceback" not in "".join(lines)
        return "\n".join(lines)

    other = ("--model", "other")
    assert "--model other: Error code: 404" in told(2, *other)
    server.fault = (401, "application/json", b'{"error": {"message": "no key"}}')
    assert "no key" in told(2, *other)
    server.fault = (200, "text/html", b"<html>welcome</html>")
    assert "is it the address up to /v1?" in told(2, *other)
    server.fault = (400, "application/json", b'{"error": {"message": "temperature is not free"}}')
    assert "the first 10 requests were refused" in told(2, *other) and len(EXCHANGE["rows"]) >= 10
    assert "none of 2 rows was rewritten:\n  p01: bad request: " in told(2, *other, "--limit", "2")
    assert "which model? Give --model NAME" in told(2)
    assert "give --endpoint URL" in told(2, *other, url=None)
    assert "who rewrites?" in told(2, url=None)
    assert "is of an engine here, and there is --endpoint" in told(2, *other, "agents.a.model=x")
    assert "no user or password" in told(2, *other, url="http://me:secret@127.0.0.1/v1")
    assert "an address such as" in told(2, *other, url="127.0.0.1:80")
    assert "--top-p 2.0: Input should be less than or equal to 1" in told(2, *other, "--top-p", "2")
    assert "--attempts 0: at least 1" in told(2, *other, "--attempts", "0")
    assert "has a column 'prompt' already: choose another --column" in told(2, *other, "--column", "prompt")
    assert "one agent rewrites, and here are a, b" in told(2, "agents.a.model=x", "agents.b.model=y", url=None)


def test_corewarding_trains_on_it(folder, server):
    """The file, as it is, through data.views: both wordings under one id, and a label for each from the other."""
    assert rewrite(folder, server.url, "out.jsonl", *ASKED) == 0
    rows = {row["id"]: row for row in read_rows(folder / "out.jsonl")}
    one = cohort.raw(folder)["agents"]["ann"] | {"seats": {"plain": "original", "reworded": "reworded"}}
    data = {"path": str(folder / "out.jsonl"), "gold": "reward_model.ground_truth", "id": "id"}
    data |= {"max_prompt_tokens": 160, "views": {"original": {}, "reworded": {"column": "reworded"}}}
    algo = {"name": "corewarding", "views": ["plain", "reworded"]}
    run = cohort.raw(folder, name="views", steps=1, algo=algo, agents={"ann": one}, data=data)
    run_dir = train(validate(cohort.changed(run, {"batch.prompts_per_step": 2, "batch.tokens_per_microbatch": 256})))
    seen = read(step_path(run_dir, 0))
    assert Counter(r.prompt.agent for r in seen) == {"plain": 16, "reworded": 16}
    for r in seen:
        column = {"plain": "prompt", "reworded": "reworded"}[r.prompt.agent]
        assert r.prompt.messages[-1].content == rows[r.prompt.uid][column]
    assert read_metrics(run_dir)[0]["agent/ann/policy/tokens"] > 0


def test_an_engine_here(folder, capsys):
    """Models of noise find no marks: every row is refused by name, and what they said is on record."""
    agent = cohort.raw(folder)["agents"]["ann"]["model"]
    (folder / "instruction.txt").write_text("Reword {problem}")
    rows = [{"id": str(i), "prompt": f"{i}+1?"} for i in range(3)] + [{"id": "long", "prompt": "1+" * 120}]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine = [f"agents.ann.model={agent}", "agents.ann.backend=reference", "agents.ann.engine.backend=reference"]
    engine += ["agents.ann.dtype=float32", f"output={folder}/runs", "--max-tokens", "8", "--attempts", "2"]
    assert rewrite(folder, None, "out.jsonl", *engine) == 2
    told = capsys.readouterr().err
    assert "none of 4 rows was rewritten:" in told and "  long: a request of " in told
    head, *outcomes = map(json.loads, (folder / "out.jsonl.record.jsonl").read_text().splitlines())
    assert head["request"]["model"] == agent
    said = {o["id"]: o for o in outcomes}
    assert {o["attempts"] for o in outcomes} == {2} and all(said[str(i)]["reply"] for i in range(3))
    assert len({said[str(i)]["reply"] for i in range(3)}) == 3
