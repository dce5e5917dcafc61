"""One node of a job: says what it is, waits for the word to go, runs Ray until it is told to end.

``node.py PLAN_FILE`` as a task of srun; task 0 is Ray's head. Everything is told through files beside the plan, see
``supervise.py``. Ray is given ports that nobody else holds, so two jobs may share a node; a raylet that dies early is
started again. Ends by itself when the supervisor has given no sign of life for a while: a node that was cut off must
not hold its GPUs for ever. Standard library only.
"""

import contextlib
import importlib.metadata
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

BEAT_S = 2.0
ATTEMPTS = 3
UP_S = 60.0  # a raylet that lived that long had been up: starting it again is another try's business
ORPHANED_S = 180.0
FIRST_PORT, LAST_PORT = 20000, 32767  # below the kernel's own, where its range leaves room


def main(plan_file):
    plan, folder = json.loads(plan_file.read_text()), plan_file.parent
    rank = int(os.environ["SLURM_PROCID"])
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    log = os.open(folder / f"node-{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    address = own_address(name)
    write(folder / f"report-{rank}.json", json.dumps(report(plan, name, address)))
    threading.Thread(target=beat, args=(folder, rank), daemon=True).start()
    deadline = time.monotonic() + plan["form_timeout_s"]
    wait_for(folder / "go", deadline)
    return serve(plan, folder, rank, address, deadline)


def report(plan, name, address):
    """What the supervisor compares before anything is started."""
    shm = os.statvfs("/dev/shm")
    return {
        "name": name,
        "address": address,
        "packages": {package: version(package) for package in plan["packages"]},
        "shm_free": shm.f_bavail * shm.f_frsize,
        "gpus": gpus() if plan["device"] == "cuda" else None,
        "time": time.time(),
    }


def version(package):
    if package == "python":
        return sys.version.split()[0]
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpus():
    """Cards that this job may use; 0 where nvidia-smi cannot be asked."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    seen = done.stdout.count("GPU ")
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen if given is None else min(seen, len([word for word in given.split(",") if word]))


def own_address(name):
    """The node's address as the others know it, or None."""
    try:
        addresses = [str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)]
    except socket.gaierror:
        return None
    return next((address for address in addresses if not address.startswith("127.")), None)


def beat(folder, rank):
    """A sign of life every two seconds; without one from the supervisor, the end."""
    last, since = "", time.monotonic()
    while True:
        write(folder / f"beat-{rank}", str(time.time()))
        now = read(folder / "beat")
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > ORPHANED_S:
            print(f"no sign of life from the supervisor for {ORPHANED_S:.0f} s: this node ends", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        time.sleep(BEAT_S)


def serve(plan, folder, rank, address, deadline):
    """Ray in the foreground; its exit code once it had been up, 1 where it never was."""
    for attempt in range(1, ATTEMPTS + 1):
        began = time.monotonic()
        if rank == 0:
            port, client = two_free_ports(address)
            # its client server is not used, cannot be left out, and would take 10001 from a neighbour's
            where = ["--head", f"--port={port}", f"--ray-client-server-port={client}", "--include-dashboard=false"]
            where += [f"--temp-dir={scratch_of(plan)}"]
            write(folder / "head", f"{address}:{port}\n")
        else:
            head = wait_for(folder / "head", deadline).strip()
            host, _, port = head.rpartition(":")
            if (fault := unreachable(host, int(port), deadline)) is not None:
                print(f"Ray's head at {head} cannot be reached from here: {fault}", flush=True)
                return 1
            where = [f"--address={head}"]
        code = ray(plan, rank, address, where)
        lived = time.monotonic() - began
        print(f"Ray ended with {code} after {lived:.0f} s (attempt {attempt} of {ATTEMPTS})", flush=True)
        if lived > UP_S:
            return code or 1
    return 1


def ray(plan, rank, address, where):
    resources = (
        [f"--num-gpus={plan['slots'][rank]}"]
        if plan["device"] == "cuda"
        else ["--num-gpus=0", f'--resources={{"slot": {plan["slots"][rank]}}}']
    )
    own = [
        *("--block", "--disable-usage-stats", f"--node-ip-address={address}", "--num-cpus=1"),
        *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"),
        f"--object-store-memory={plan['object_store_mib'] << 20}",
    ]
    group = plan["groups"][rank]  # by Ray's label the run knows which agents sit here
    own += [f"--labels=megarl.io/group={group}"] if group else []
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *where, *own, *resources]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return child.wait()
    finally:  # its own process group: a neighbour's Ray on this node is none of ours
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(child.pid, number)
            except ProcessLookupError:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)
        shutil.rmtree(scratch_of(plan), ignore_errors=True)  # the other nodes follow the head's choice


def scratch_of(plan):
    """Ray's sockets and logs: short, because a socket's path may hold 107 bytes, and this try's own."""
    return f"{plan['scratch']}/r{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT') or 0}"


def two_free_ports(address):
    first = second = free_port(address)
    while second == first:
        second = free_port(address)
    return first, second


def free_port(address):
    """Below the kernel's own range, free a moment ago."""
    kernels_first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    last = min(LAST_PORT, kernels_first - 1) if kernels_first > FIRST_PORT + 1000 else LAST_PORT
    for _ in range(200):
        port = random.randint(FIRST_PORT, last)
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    sys.exit(f"no free port between {FIRST_PORT} and {last}")


def unreachable(host, port, deadline):
    """Why nobody answers there, once the time is up; None: somebody does."""
    while True:
        try:
            socket.create_connection((host, port), timeout=10).close()
            return None
        except OSError as error:
            if time.monotonic() > deadline:
                return error
            time.sleep(0.5)


def wait_for(path, deadline):
    """Its text, once it is there and not empty."""
    while not (text := read(path)):
        if time.monotonic() > deadline:
            print(f"{path.name}: not there in time", flush=True)
            sys.exit(1)
        time.sleep(0.3)
    return text


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
    sys.exit(main(Path(sys.argv[1])))
