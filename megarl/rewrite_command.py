"""`megarl rewrite`: a second wording of every prompt of a file, by an OpenAI-compatible endpoint or a vLLM engine here.

OUT has the rows of IN with one column more; rows whose replies were refused are left out, counted and named. Beside it
OUT.record.jsonl holds the model, the instruction, the sampling and every reply: an interrupted command goes on from it.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import batched
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ValidationError

from megarl import __version__
from megarl.agents import generate, open_agents, open_chats, reshard_all, rolling
from megarl.backends.cluster import WorkerLost
from megarl.config import compose_raw, validate
from megarl.endpoint import open_endpoint
from megarl.evaluation.command import completed, prepared
from megarl.evaluation.sets import ExamSet
from megarl.rows import Row, read_rows
from megarl.settings import DataConfig, SamplingConfig
from megarl.types import Message, Prompt, Seed
from megarl.views import (
    INSTRUCTION,
    PLACE,
    Outcome,
    Record,
    Reply,
    Request,
    checked_instruction,
    digest,
    json_row,
    open_record,
    problems,
    reworded,
    with_view,
    write_rows,
)

Ask = Callable[
    [Mapping[str, str], int], Iterator[tuple[str, Reply]]
]  # (id -> request, attempt) -> replies as they come

_LOST = 1
_CHUNK = 256  # requests that a local engine answers before any is recorded
_HOPELESS = 10  # faults one after the other, before any reply, that end the command
_SHOWN = 10  # refused rows that are named; the record has all


def run(argv: Sequence[str]) -> int:
    """Check everything that can be checked, ask for what the record lacks, write OUT."""
    args = _parse(argv)
    rows = read_rows(args.source)[: args.limit]
    asked = problems(rows, args.prompt, args.id, str(args.source))
    _check_columns(rows, args)
    request = _request(args)
    record_path = args.target.with_name(args.target.name + ".record.jsonl")
    facts = {"version": __version__, "source": str(args.source), "by": args.endpoint or "a vLLM engine of its own"}
    with open_record(record_path, request, facts) as record:
        todo = {uid: text for uid, text in asked.items() if uid not in record.done}
        if record.done:
            print(f"{record_path}: {len(asked) - len(todo)} of {len(asked)} rows are done", file=sys.stderr)
        try:
            if todo:
                with _opened(args, request, todo) as ask:
                    _ask(ask, record, request, todo)
        except (WorkerLost, TimeoutError, ConnectionError) as lost:
            print(f"megarl rewrite: {lost}; the same command goes on from {record_path}", file=sys.stderr)
            return _LOST
        return _finish(args, rows, list(asked), record, request)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megarl rewrite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="IN", help="a prompt file: .parquet, .jsonl, .json, .csv")
    parser.add_argument("target", type=Path, metavar="OUT", help="the same with a second wording: .jsonl or .parquet")
    parser.add_argument("overrides", nargs="*", help="agents.NAME.model=DIR and key=value of a vLLM engine here")
    parser.add_argument(
        "--endpoint", metavar="URL", help="of a server with /chat/completions, e.g. http://host:8000/v1"
    )
    parser.add_argument("--model", help="the model's name at the endpoint")
    parser.add_argument("--key-env", default="OPENAI_API_KEY", metavar="NAME", help="variable that holds the key")
    parser.add_argument("--workers", type=int, default=16, help="requests at once to the endpoint")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one request to the endpoint")
    parser.add_argument("--prompt", default="prompt", help="column of the prompt (data.prompt)")
    parser.add_argument("--id", help="column of a unique id (data.id); without it, row numbers")
    parser.add_argument("--column", default="rewrite", help="column that the second wording goes into")
    parser.add_argument("--instruction", type=Path, metavar="FILE", help=f"instead of the built-in one; holds {PLACE}")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=0.8)
    parser.add_argument("--max-tokens", type=int, default=4096, help="of a reply, thoughts included")
    parser.add_argument("--seed", type=int, help="of the sampling; not every endpoint takes one")
    parser.add_argument("--attempts", type=int, default=2, help="replies per row, until one is not refused")
    parser.add_argument("--limit", type=int, help="first rows only")
    parser.add_argument("--config-dir", type=Path, help="a folder of your own experiment/ ... YAML files")
    args = parser.parse_intermixed_args(argv)
    for name, least in (("workers", 1), ("attempts", 1), ("limit", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} {value}: at least {least}")
    if not args.timeout > 0:
        raise ValueError(f"--timeout {args.timeout}: more than 0 seconds")
    _check_places(args)
    _check_who(args)
    return args


def _check_places(args: argparse.Namespace) -> None:
    if args.target.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"OUT {args.target}: a name that ends with .jsonl or .parquet")
    if args.target.exists():
        raise ValueError(f"OUT {args.target} exists: choose another name")
    if not args.target.parent.is_dir():
        raise ValueError(f"OUT {args.target}: no place for a file; name one in a folder that exists")


def _check_who(args: argparse.Namespace) -> None:
    if args.endpoint is None:
        if args.model is not None:
            raise ValueError(f"--model {args.model} is of an endpoint: give --endpoint URL, or agents.NAME.model=DIR")
        if not args.overrides:
            raise ValueError("who rewrites? --endpoint URL --model NAME, or agents.NAME.model=DIR for an engine here")
        return
    if args.overrides:
        raise ValueError(f"{args.overrides[0]} is of an engine here, and there is --endpoint {args.endpoint}")
    if args.model is None:
        raise ValueError(f"--endpoint {args.endpoint}: which model? Give --model NAME")
    parts = urlsplit(args.endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--endpoint {args.endpoint}: an address such as http://host:8000/v1")
    if parts.username or parts.password:  # it would be recorded
        raise ValueError("--endpoint: no user or password in the address; the key is read from --key-env")


def _check_columns(rows: list[Row], args: argparse.Namespace) -> None:
    """Before anybody is asked: the new columns must be new, and OUT must be able to hold the rows."""
    for name in (args.column, *(() if args.id else ("row",))):
        if any(name in row for row in rows):
            how = "choose another --column" if name == args.column else "name the column of ids by --id"
            raise ValueError(f"{args.source} has a column {name!r} already: {how}")
    if args.target.suffix == ".jsonl":
        for row in rows:
            json_row(row, args.target)


def _request(args: argparse.Namespace) -> Request:
    instruction = INSTRUCTION
    if args.instruction is not None:
        if not args.instruction.is_file():
            raise ValueError(f"--instruction {args.instruction}: no such file")
        instruction = checked_instruction(args.instruction.read_text("utf-8"), f"--instruction {args.instruction}")
    try:
        sampling = SamplingConfig(temperature=args.temperature, top_p=args.top_p, max_tokens=args.max_tokens)
    except ValidationError as error:
        fault = error.errors()[0]
        raise ValueError(f"--{str(fault['loc'][0]).replace('_', '-')} {fault['input']}: {fault['msg']}") from error
    return Request(
        model=args.model or _local_model(args),
        source_sha256=digest(args.source),
        prompt=args.prompt,
        id=args.id,
        column=args.column,
        instruction=instruction,
        sampling=sampling,
        seed=args.seed,
        attempts=args.attempts,
    )


def _local_model(args: argparse.Namespace) -> str:
    agents = compose_raw(args.overrides, args.config_dir).get("agents", {})
    if not isinstance(agents, dict) or len(agents) != 1:
        raise ValueError(
            f"one agent rewrites, and here are {', '.join(agents) or 'none'}: give agents.NAME.model=DIR and no other"
        )
    (agent,) = agents.values()
    if not isinstance(agent, dict) or not isinstance(agent.get("model"), str):
        raise ValueError(f"agents.{next(iter(agents))}.model: which model rewrites?")
    return agent["model"]


def _opened(args: argparse.Namespace, request: Request, todo: Mapping[str, str]) -> AbstractContextManager[Ask]:
    if args.endpoint is None:
        return _engine(args, request, todo)
    key = os.environ.get(args.key_env) or "none"  # servers of one's own ask for none
    return open_endpoint(
        args.endpoint, key, request.model, request.sampling, args.seed, workers=args.workers, timeout_s=args.timeout
    )


@contextmanager
def _engine(args: argparse.Namespace, request: Request, todo: Mapping[str, str]) -> Iterator[Ask]:
    """One agent of this configuration, built as for an examination; its weights are those of its files."""
    raw = compose_raw(args.overrides, args.config_dir)
    raw["evaluation"] = {**raw.get("evaluation", {}), "sampling": request.sampling.model_dump()}
    exam = ExamSet(name="rewrite", data=DataConfig(path=str(args.source), prompt=args.prompt))
    cfg = validate(completed(raw, [exam]))
    (name,), chats = cfg.agents, open_chats(cfg)
    prompts = {uid: _prompt(name, uid, request.instruction, text) for uid, text in todo.items()}
    lengths = {uid: len(chats[name].render(prompt.messages)) for uid, prompt in prompts.items()}
    data = exam.data.model_copy(update={"max_prompt_tokens": max(lengths.values())})
    cfg = prepared(cfg, [exam.model_copy(update={"data": data})], "--max-tokens")
    with open_agents(cfg, cfg.run_dir / "rewrite", chats) as agents:
        reshard_all(agents, 0, {})
        sampled = {name: replace(agents[name], sampling=request.sampling)}
        limit = cfg.max_prompt_tokens

        def ask(asked: Mapping[str, str], attempt: int) -> Iterator[tuple[str, Reply]]:
            for uid in [uid for uid in asked if lengths[uid] > limit]:
                yield uid, Reply(fault=f"a request of {lengths[uid]} tokens, and the model takes {limit}")
            seed = Seed(run=args.seed or 0, step=attempt)
            for chunk in batched([prompts[uid] for uid in asked if lengths[uid] <= limit], _CHUNK):
                for r in generate(sampled, chunk, seed, {}):
                    yield r.prompt.uid, Reply(text=r.text, complete=r.stop == "end")

        with rolling(agents):
            yield ask


def _prompt(agent: str, uid: str, instruction: str, problem: str) -> Prompt:
    text = instruction.replace(PLACE, problem)
    return Prompt(agent=agent, uid=uid, role="solve", messages=(Message("user", text),), n=1)


def _ask(ask: Ask, record: Record, request: Request, todo: Mapping[str, str]) -> None:
    """Ask for every row; again for those refused, as often as --attempts allows. Outcomes are recorded as they come."""
    pending, heard, faults = dict(todo), False, 0
    for attempt in range(request.attempts):
        again: dict[str, str] = {}
        requests = {uid: request.instruction.replace(PLACE, problem) for uid, problem in pending.items()}
        for uid, reply in ask(requests, attempt):
            heard, faults = heard or reply.fault is None, faults + (reply.fault is not None)
            if not heard and faults == _HOPELESS:
                raise ValueError(f"the first {faults} requests were refused, the last one with: {reply.fault}")
            text, refused = reworded(reply, pending[uid])
            if refused and attempt + 1 < request.attempts:
                again[uid] = pending[uid]
                continue
            record.add(Outcome(id=uid, text=text, refused=refused, reply=reply.text, attempts=attempt + 1))
            if len(record.done) % 100 == 0:
                print(f"{len(record.done)} rows", file=sys.stderr)
        pending = again
        if not pending:
            return


def _finish(args: argparse.Namespace, rows: list[Row], uids: list[str], record: Record, request: Request) -> int:
    refused = [(uid, record.done[uid].refused) for uid in uids if record.done[uid].refused]
    named = "".join(f"\n  {uid}: {why}" for uid, why in refused[:_SHOWN])
    more = f"\n  and {len(refused) - _SHOWN} more, in {record.path}" if len(refused) > _SHOWN else ""
    if len(refused) == len(uids):
        raise ValueError(f"none of {len(uids)} rows was rewritten:{named}{more}")
    write_rows(args.target, with_view(rows, uids, record.done, request))
    written = len(uids) - len(refused)
    print(f"{args.target}: {written} rows by {request.model}, {len(refused)} refused and left out{named}{more}")
    print(f"how it was made: {record.path}")
    print(f"train on it: data.path={args.target} data.views.{args.column}.column={args.column}")
    return 0
