"""The batch step of a Slurm job: brings a Ray cluster up on its nodes, drives the run, and knows why it ended.

``supervise.py PLAN`` with the plan that `megarl launch slurm` renders (JSON). One srun task per node runs ``node.py``;
the driver (`megarl train`) is a child of this process. All that belongs to one try of a job stands in a folder of its
own, ``job-<id>.<try>`` on the shared file system:

    node.py, plan.json   what the nodes run, and with what
    token                Ray's, of this try; readable by this user alone
    report-<rank>.json   what a node found about itself, before anything is started
    go, head             the nodes are fit to start; where Ray's head listens
    beat-<rank>, beat    signs of life: of the nodes, of this process
    node-<name>.log      what a node said

Exit codes: 0 done; 75 checkpointed, put back into the queue; 76 lost a node, put back into the queue; 2 and 3 those of
the run (bad input, stopped by a guard); 1 anything else, among it nodes that are not fit to begin with.
Standard library only, Python 3.9 or newer: where processes live in a container, this one does not.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

DONE, LOST, BAD_INPUT, GUARD, CHECKPOINTED, NODE_LOST = 0, 1, 2, 3, 75, 76
POLL_S = 0.5
BEAT_S = 2.0  # nodes give a sign of life that often
CLOCKS_APART_S = 5.0
RESTARTS_WITHOUT_PROGRESS = 2
GRACE_S = 60.0  # for the driver to close engines and files


class Unfit(Exception):
    """The nodes cannot carry the run; the message names the culprit."""


class Interrupted(Exception):
    """A signal asks to end, or to leave, and nothing has begun."""


class Nodes:
    """The srun step with one task per node, and what its tasks have written into the folder of this try."""

    def __init__(self, plan, folder):
        self.plan, self.folder = plan, folder
        self.wanted = len(plan["slots"])
        self._seen = {}  # rank -> (last sign of life, when it was new here)

    def start(self):
        self.folder.mkdir(parents=True)  # twice the same job and try: an error
        here = Path(__file__).resolve().parent / "node.py"
        shutil.copyfile(here, self.folder / "node.py")  # the container may not see where this file stands
        write(self.folder / "plan.json", json.dumps(self.plan))
        secret = self.folder / "token"  # nobody without it joins this Ray, nor does anybody's job by mistake
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(secret)})
        files = [str(self.folder / "node.py"), str(self.folder / "plan.json")]
        command = [*self.plan["srun"], *self.plan["inside"], self.plan["python"], *files]
        self.step = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def reports(self):
        """rank -> report, of the nodes that have given one; ``skew``: seconds of its clock before the file server's."""
        found = {}
        for file in self.folder.glob("report-*.json"):
            report = json.loads(file.read_text())
            report["skew"] = report["time"] - file.stat().st_mtime
            found[int(file.stem.split("-")[1])] = report
        return dict(sorted(found.items()))

    def wait_for(self, what, ready, deadline):
        """Until ``ready()``; Unfit where the step ends or the time is up."""
        while not ready():
            if self.step.poll() is not None:
                raise Unfit(f"{what}: the nodes' step ended with {self.step.returncode}{self._silent()}")
            if time.monotonic() > deadline:
                raise Unfit(f"{what}: not within {self.plan['form_timeout_s']} s{self._silent()}")
            time.sleep(POLL_S)

    def _silent(self):
        names = hostnames()
        silent = sorted(set(names) - {report["name"] for report in self.reports().values()})
        return f"; no sign of {', '.join(silent)}" if silent else ""

    def lost(self):
        """Which node is gone, or None. Looked at every second or so, else all of them look gone."""
        if self.step.poll() is not None:
            return f"the nodes' step ended with {self.step.returncode}"
        now = time.monotonic()
        for rank, report in self.reports().items():
            beat = read(self.folder / f"beat-{rank}")
            if self._seen.get(rank, ("", 0.0))[0] != beat:
                self._seen[rank] = (beat, now)
            elif now - self._seen[rank][1] > self.plan["beat_timeout_s"]:
                return f"no sign of life from {report['name']} for {self.plan['beat_timeout_s']} s"
        return None

    def all_alive_since(self, moment):
        return len(self._seen) == self.wanted and all(seen > moment for _, seen in self._seen.values())

    def stop(self):
        """End our own step, nobody else's Ray."""
        if self.step.poll() is None:
            end(self.step)

    def last_words(self):
        for file in sorted(self.folder.glob("node-*.log")):
            lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
            for line in lines[-15:]:
                print(f"    {file.stem}: {line}", flush=True)


class Supervisor:
    def __init__(self, plan):
        self.plan = plan
        self.started = time.monotonic()
        self.job = os.environ["SLURM_JOB_ID"]
        self.attempt = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self.folder = Path(plan["logs"]) / f"job-{self.job}.{self.attempt}"
        self.run_dir = Path(plan["run_dir"])
        self.driver = None
        self.leaving = self.ending = False
        self.nodes = Nodes(plan, self.folder)

    def say(self, text):
        seconds = int(time.monotonic() - self.started)
        print(f"[{seconds // 60}m{seconds % 60:02d}s] {text}", flush=True)

    def run(self):
        signal.signal(signal.SIGUSR1, self._leave)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        self.say(f"job {self.job}, try {self.attempt}: {len(self.plan['slots'])} nodes, logs in {self.folder}")
        self.nodes.start()
        try:
            head = self._bring_up()
            code = self._drive(head)
            if code == NODE_LOST and not self._checkpoint():
                raise Unfit("a node was lost before the first checkpoint: there is nothing to go on from")
        except Unfit as unfit:
            self.say(f"error: {unfit}")
            self.nodes.last_words()
            # at first somebody should look; later, the night's work is at stake
            code = NODE_LOST if self._checkpoint() else LOST
        except Interrupted:
            self.say("a signal came before the run began")
            code = 128 + signal.SIGTERM if self.ending else CHECKPOINTED
        finally:
            self.nodes.stop()
        return self._finish(code)

    def _bring_up(self):
        """Address of Ray's head, with all nodes up and alike."""
        deadline = time.monotonic() + self.plan["form_timeout_s"]
        nodes = self.nodes
        nodes.wait_for("all nodes' reports", lambda: self._alive() and len(nodes.reports()) == nodes.wanted, deadline)
        if faults := unfit(self.plan, nodes.reports()):
            raise Unfit("; ".join(faults))
        write(self.folder / "go", "go\n")
        nodes.wait_for("Ray's head", lambda: self._alive() and bool(read(self.folder / "head")), deadline)
        head = read(self.folder / "head").strip()
        self.say(f"{', '.join(report['name'] for report in nodes.reports().values())} are fit; Ray's head is at {head}")
        return head

    def _alive(self):
        """Our own sign of life, without which the nodes end by themselves; and a look for signals."""
        write(self.folder / "beat", str(time.time()))
        if self.ending or self.leaving:
            raise Interrupted
        return True

    def _drive(self, head):
        """Code of the run. Where a rank or an engine of it died on nodes that live, all agents go back to the newest
        checkpoint and on from there, in this very job."""
        futile, before = 0, self._checkpoint()
        while True:
            code = self._one_driver(head)
            if code in (DONE, BAD_INPUT, GUARD, CHECKPOINTED, NODE_LOST) or self.ending:
                return code
            if self.leaving and (code == -signal.SIGUSR1 or self._checkpoint()):
                return (
                    CHECKPOINTED  # the signal came before it could be heard, or the last step failed: go on elsewhere
                )
            if (reason := self._gone_since(time.monotonic())) is not None:
                self.say(f"error: {reason}")
                return NODE_LOST
            futile = 0 if self._checkpoint() > before else futile + 1
            before = self._checkpoint()
            if not before or futile > RESTARTS_WITHOUT_PROGRESS:
                self.nodes.last_words()
                return LOST
            self.say(f"the run ended with {code} and all nodes live: on from step {before}")

    def _one_driver(self, head):
        settings = [f"cluster.address='{head}'", f"cluster.start_timeout_s={self.plan['form_timeout_s']}.0"]
        begun = (self.run_dir / "config.yaml").is_file() and (self.attempt > 0 or self.driver is not None)
        words = ["-m", "megarl", "train", "--resume", str(self.run_dir)] if begun else self.plan["train"]
        # of a run that is taken up again the plan's words are all in its configuration
        environment = {**os.environ, "MEGARL_TRY": f"{self.job}.{self.attempt}"}
        if (moment := end_time(self.job)) is not None:
            environment["MEGARL_END_TIME"] = str(moment)
        command = [*self.plan["inside"], self.plan["python"], *words, *settings]
        self.driver = driver = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        while True:
            try:
                return driver.wait(POLL_S)
            except subprocess.TimeoutExpired:
                write(self.folder / "beat", str(time.time()))
            if (reason := self.nodes.lost()) is not None:
                self.say(f"error: {reason}")
                end(driver)
                return NODE_LOST

    def _gone_since(self, moment):
        """Which node is gone; None once every one has given a sign of life after ``moment``."""
        while (reason := self.nodes.lost()) is None and not self.nodes.all_alive_since(moment):
            write(self.folder / "beat", str(time.time()))
            time.sleep(POLL_S)
        return reason

    def _checkpoint(self):
        """Steps of the newest complete checkpoint, 0 for none."""
        found = self.run_dir.glob("checkpoints/step_*/COMPLETE")
        return max((int(n) for n in (file.parent.name[len("step_") :] for file in found) if n.isdigit()), default=0)

    def _leave(self, number, frame):
        """The job's time is nearly over, or somebody else needs the nodes: checkpoint after the present step."""
        self.leaving = True
        if self.driver is not None and self.driver.poll() is None:
            self.driver.send_signal(signal.SIGUSR1)

    def _end(self, number, frame):
        if self.leaving:  # it is saving: what it is given until Slurm kills it is its own
            return
        self.ending = True
        if self.driver is not None and self.driver.poll() is None:
            self.driver.terminate()

    def _finish(self, code):
        words = {CHECKPOINTED: "checkpointed, and wants its nodes again", NODE_LOST: "lost a node"}
        self.say(f"ended with {code}{': ' + words[code] if code in words else ''}")
        if code not in words or self.ending:
            return code
        if self.attempt + 1 >= self.plan["max_tries"]:
            self.say(f"not put back into the queue: {self.plan['max_tries']} tries are used up (max_tries)")
            return code
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # requeueing ends this very job
        asked = subprocess.run(["scontrol", "requeue", self.job], capture_output=True, text=True)
        self.say(f"put back into the queue {asked.stderr.strip()}".strip())
        return code


def unfit(plan, reports):
    """What is wrong with the nodes, one line per fault; [] for nothing."""
    faults = []
    for package in plan["packages"]:
        where = {}
        for report in reports.values():
            where.setdefault(report["packages"][package], []).append(report["name"])
        if len(where) > 1:
            versions = ", ".join(f"{version} on {' and '.join(names)}" for version, names in where.items())
            faults.append(f"{package} is not the same everywhere: {versions}")
    needed = 2 * plan["object_store_mib"]
    for rank, report in reports.items():
        name, free = report["name"], report["shm_free"] >> 20
        if not report["address"]:
            faults.append(f"{name}: its name has no address that other nodes could reach (getent ahostsv4 {name})")
        if free < needed:
            faults.append(f"{name}: /dev/shm has {free} MiB free, {needed} are needed (twice object_store_mib)")
        if report["gpus"] is not None and report["gpus"] < plan["slots"][rank]:
            faults.append(f"{name}: {report['gpus']} GPUs are to be seen, {plan['slots'][rank]} are wanted")
    skews = {report["skew"]: report["name"] for report in reports.values()}
    if max(skews) - min(skews) > CLOCKS_APART_S:
        first, last = skews[max(skews)], skews[min(skews)]
        faults.append(f"the clock of {first} is {max(skews) - min(skews):.1f} s before that of {last}")
    return faults


def end(process):
    """Ask it to end, and see to it."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def hostnames():
    """Of all nodes of the job, those of every component."""
    lists = [os.environ[key] for key in sorted(os.environ) if key.startswith("SLURM_JOB_NODELIST_HET_GROUP_")]
    names = []
    for nodes in lists or [os.environ.get("SLURM_JOB_NODELIST", "")]:
        done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True)
        names += done.stdout.split()
    return names


def end_time(job):
    """When Slurm ends the job, in seconds of the epoch; None where it has no limit."""
    done = subprocess.run(["squeue", "--noheader", "--jobs", job, "--format=%e"], capture_output=True, text=True)
    words = done.stdout.split()
    try:
        return int(time.mktime(time.strptime(words[0], "%Y-%m-%dT%H:%M:%S"))) if words else None
    except ValueError:  # NONE, N/A
        return None


def read(path):
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def write(path, text):
    """Whole or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)


if __name__ == "__main__":
    sys.exit(Supervisor(json.loads(sys.argv[1])).run())
