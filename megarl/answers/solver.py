"""The worker process: one question per line on standard input, one answer per line on standard output.

Every question is worked on by a child that is forked for it from a parent that only ever imported its libraries. So a
question finds the same caches whatever came before it, and nothing it does outlives it. Its budget is a number of
Python calls and jumps, which is the same on a busy machine; limits of CPU seconds and memory stand behind it for what
happens inside of a single call. Whoever exceeds one of the three is undecided.

A question is {"key": the spelling of a value} or {"latex": text}; see ``answers`` for what comes back.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any

EVENTS = 1_500_000  # Python calls and jumps of one question: about one second
CPU_SECONDS = 4
MEMORY = 512 << 20  # bytes beyond what the parent holds

OUT_OF_WORK, OUT_OF_MEMORY, FAILED = 11, 12, 13  # exit codes of a child
_REASONS = {0: "no answer", OUT_OF_WORK: "work", OUT_OF_MEMORY: "memory", FAILED: "not worked out"}

_FIRST = {
    "key": {"key": "+1[sin(+1[x])]+1[pow(+2[],+1/3[])]+1[log(+2[])]"},
    "latex": {"latex": r"\int_0^1 \frac{x^2+1}{2} dx"},
}

Reply = dict[str, Any]


def main(kind: str) -> None:
    """Serve questions of one kind until standard input ends."""
    sys.setrecursionlimit(8000)
    list(answers(_FIRST[kind]))  # imports what such questions need, and fills the caches that all of them use
    base = _size()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(_forked(line, base) + "\n")
        sys.stdout.flush()


def _size() -> int:
    """Bytes of address space."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _forked(line: str, base: int) -> str:
    """The answer of a child with its own budget."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(line, writer, base)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        best = pipe.read().decode("utf-8").splitlines()
    _, status, used = os.wait4(child, 0)
    if best:
        answer = json.loads(best[-1])
    else:
        code = os.waitstatus_to_exitcode(status)
        answer = {"undecided": signal.Signals(-code).name if code < 0 else _REASONS[code]}
    return json.dumps({**answer, "cpu": used.ru_utime + used.ru_stime})


def _child(line: str, writer: int, base: int) -> None:
    """Work on the question and leave, without the parent's buffers and handlers. Better answers follow on worse."""

    def say(answer: Reply) -> None:
        os.write(writer, json.dumps(answer).encode("utf-8") + b"\n")

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (base + MEMORY, base + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    left = EVENTS

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os._exit(OUT_OF_WORK)

    tool, events = sys.monitoring.PROFILER_ID, sys.monitoring.events
    sys.monitoring.use_tool_id(tool, "budget")
    for event in (events.PY_START, events.JUMP):
        sys.monitoring.register_callback(tool, event, count)
    sys.monitoring.set_events(tool, events.PY_START | events.JUMP)
    code = 0
    try:
        for answer in answers(json.loads(line)):
            say(answer)
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException:  # whatever a library raises on hostile input ends this child alone, and is no verdict
        code = FAILED
    os._exit(code)


def answers(question: Mapping[str, str]) -> Iterator[Reply]:
    """{"prints": [...]}: one entry per setting of numeric.SETTINGS, each [digits, left, lossy] or [reason];
    {"rough": digits} where only some are known; {"text": true} for what is no mathematics; {"undecided": reason}.
    The parent adds "cpu", the seconds that it took."""
    from megarl.answers import numeric

    if "latex" in question:
        from megarl.answers.latex import read_latex

        yield from read_latex(question["latex"])
        return
    prints: list[list[Any]] = []
    key = question["key"]
    for setting in numeric.SETTINGS:
        if setting.log_base == "e" and "log(" not in key:
            prints.append(prints[0])
            continue
        try:
            p = numeric.take_print(key, setting)
        except numeric.Undefined as error:
            prints.append([f"undefined: {error}"])
        except (numeric.Unclear, OverflowError, ZeroDivisionError, ValueError) as error:
            yield {"undecided": str(error) or type(error).__name__}
            return
        else:
            prints.append([p.digits, p.left, p.lossy])
    yield {"prints": prints}


if __name__ == "__main__":
    main(sys.argv[1])
