"""A real Slurm on this one machine: a controller and nodes with an address, a hostname, a /tmp and a /dev/shm each.

Every node is a network namespace on a bridge without an uplink, with process, mount and host-name namespaces of its
own; process 1 of it starts slurmd. Debian's Slurm 22.05, munge with a key of its own, no cgroups, no systemd. Needs
root.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

WANTED = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter")
CONTROLLER = "ctl"
SUBNET = "10.93.7"

SLURM_CONF = """\
ClusterName=megarl
SlurmctldHost={controller}({subnet}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={state}/munge/sock,cred_expire=5
StateSaveLocation={state}/save
SlurmdSpoolDir={state}/spool-%n
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/slurmd-%n.pid
SlurmctldLogFile={state}/log/slurmctld.log
SlurmdLogFile={state}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MessageTimeout=10
MinJobAge=3600
PropagateResourceLimits=NONE
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
{nodes}
PartitionName=low Nodes=n[0-{last}] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=120 State=UP
PartitionName=high Nodes=n[0-{last}] PriorityTier=10 PreemptMode=OFF State=UP
"""

# process 1 of a node: reaps what is orphaned, so that the daemon's death and the node's are two events
INIT = """\
hostname "$1"
ip link set lo up
if [ "$1" != {controller} ]; then
  mkdir -p "{state}/tmp-$1"; chmod 1777 "{state}/tmp-$1"
  {keeps}
  mount --rbind "{state}/tmp-$1" /tmp
  mount -t tmpfs -o size=1g,mode=1777 tmpfs /dev/shm
fi
shift
"$@" </dev/null &
while :; do sleep 3600 & wait $!; done
"""


def why_not() -> str | None:
    """Why no Slurm can be emulated here; None: it can."""
    if os.geteuid() != 0:
        return "emulated Slurm nodes need root"
    absent = [name for name in WANTED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    return f"not installed: {', '.join(absent)} (bash launch/slurm_ci.sh installs them)" if absent else None


class Slurm:
    """The cluster, from ``start`` to ``stop``; ``shared`` is a folder that every node sees."""

    def __init__(self, nodes: int, keep: Sequence[Path] = ()) -> None:
        self.names = [f"n{i}" for i in range(nodes)]
        self.state = Path(tempfile.mkdtemp(prefix="megarl-slurm-", dir="/run"))
        self.tag = self.state.name.rsplit("-", 1)[-1].replace("_", "")
        self.shared = self.state / "shared"
        self._keep = [path for path in keep if path.is_relative_to("/tmp")]
        self._init: dict[str, int] = {}  # name -> process 1 of it, as seen from here
        self._holders: list[subprocess.Popen] = []
        self._munged: subprocess.Popen | None = None

    def __enter__(self) -> "Slurm":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Up and idle, or RuntimeError with the end of the logs."""
        self.state.chmod(0o755)
        for folder in ("munge", "save", "log", "shared", *(f"spool-{name}" for name in self.names)):
            (self.state / folder).mkdir()
        self._write_files()
        self._start_munge()
        self._start_network()
        daemon = ["-D", "-f", f"{self.state}/slurm.conf"]
        self._boot(CONTROLLER, ["/usr/sbin/slurmctld", *daemon])
        for name in self.names:
            self.boot(name)
        self.until_idle()

    def stop(self) -> None:
        """Everything ends and goes; safe to call twice."""
        for pid in self._init.values():
            _kill(pid)
        for holder in self._holders:
            holder.kill()
            holder.wait()
        if self._munged is not None:
            self._munged.kill()
            self._munged.wait()
        for name in (CONTROLLER, *self.names):
            subprocess.run(["ip", "netns", "delete", self._space(name)], capture_output=True, check=False)
            shutil.rmtree(f"/etc/netns/{self._space(name)}", ignore_errors=True)
        shutil.rmtree(self.state, ignore_errors=True)

    def on(self, node: str, *command: str, cwd: Path | None = None, check: bool = True, timeout: float = 60) -> str:
        """Output of a command on a node, or on the controller (``ctl``), which is the login node too."""
        enter = ["nsenter", "-t", str(self._init[node]), "-m", "-u", "-n", "-p", f"-w{cwd or self.shared}", "--"]
        done = subprocess.run(
            [*enter, *command],
            env=os.environ | {"SLURM_CONF": f"{self.state}/slurm.conf"},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            raise RuntimeError(f"{node}: {' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def idle(self) -> list[str]:
        return sorted(set(self.on(CONTROLLER, "sinfo", "-hN", "-t", "idle", "-o", "%N", check=False).split()))

    def until_idle(self, seconds: float = 60) -> None:
        """RuntimeError with the end of the logs where a node does not get there."""
        deadline = time.monotonic() + seconds
        while self.idle() != sorted(self.names):
            if time.monotonic() > deadline:
                logs = [line for f in (self.state / "log").iterdir() for line in f.read_text().splitlines()[-5:]]
                raise RuntimeError("\n".join([f"only {self.idle()} of {self.names} are idle", *logs]))
            time.sleep(0.2)

    def state_of(self, job: str) -> str:
        """RUNNING, COMPLETED, FAILED, ... of a job; "" where Slurm did not answer."""
        out = self.on(CONTROLLER, "scontrol", "show", "job", job, check=False)
        return next((word.removeprefix("JobState=") for word in out.split() if word.startswith("JobState=")), "")

    def nodes_of(self, job: str) -> list[str]:
        """Those that a job, or a component of one, has now."""
        nodes = self.on(CONTROLLER, "squeue", "-h", "-j", job, "-o", "%N").split()[0]
        return self.on(CONTROLLER, "scontrol", "show", "hostnames", nodes).split()

    def crash(self, node: str) -> None:
        """The whole node dies at once."""
        _kill(self._init.pop(node))

    def cut(self, node: str) -> None:
        """The node lives on, and nobody can reach it."""
        self._ip("-n", self._space(node), "link", "set", "eth0", "down")

    def heal(self, node: str) -> None:
        """Undo ``cut``."""
        self._ip("-n", self._space(node), "link", "set", "eth0", "up")

    def boot(self, node: str) -> None:
        self._boot(node, ["/usr/sbin/slurmd", "-D", "-N", node, "-f", f"{self.state}/slurm.conf"])

    def _space(self, name: str) -> str:
        return f"megarl-{self.tag}-{name}"

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def _write_files(self) -> None:
        lines = [
            f"NodeName={name} NodeHostname={name} NodeAddr={SUBNET}.{10 + i} CPUs=8 Boards=1 SocketsPerBoard=1 "
            "CoresPerSocket=8 ThreadsPerCore=1 RealMemory=2000 State=UNKNOWN"
            for i, name in enumerate(self.names)
        ]
        (self.state / "slurm.conf").write_text(
            SLURM_CONF.format(
                controller=CONTROLLER, subnet=SUBNET, state=self.state, nodes="\n".join(lines), last=len(lines) - 1
            )
        )
        # slurmd loads a cgroup plugin whatever tracks its processes; this one loads without a mounted tree
        (self.state / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        keeps = "\n  ".join(
            f'mkdir -p "{self.state}/tmp-$1/{path.relative_to("/tmp")}"; '
            f'mount --bind "{path}" "{self.state}/tmp-$1/{path.relative_to("/tmp")}"'
            for path in self._keep
        )
        (self.state / "init.sh").write_text(INIT.format(controller=CONTROLLER, state=self.state, keeps=keeps))
        hosts = [f"{SUBNET}.1 {CONTROLLER}", *(f"{SUBNET}.{10 + i} {name}" for i, name in enumerate(self.names))]
        for name in (CONTROLLER, *self.names):
            folder = Path("/etc/netns") / self._space(name)
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts]) + "\n")

    def _start_munge(self) -> None:
        folder = self.state / "munge"
        folder.chmod(0o711)
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        options = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        command = ["/usr/sbin/munged", "--force", "--foreground", *(f"--{k}={folder}/{v}" for k, v in options.items())]
        self._munged = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _until(lambda: (folder / "sock").is_socket(), "munge's socket")

    def _start_network(self) -> None:
        hub = self._space(CONTROLLER)
        for name in (CONTROLLER, *self.names):
            self._ip("netns", "add", self._space(name))
        self._ip("-n", hub, "link", "add", "br0", "type", "bridge")
        self._ip("-n", hub, "addr", "add", f"{SUBNET}.1/24", "dev", "br0")
        self._ip("-n", hub, "link", "set", "br0", "up")
        for i, name in enumerate(self.names):
            space = self._space(name)
            self._ip("-n", hub, "link", "add", f"v{i}", "type", "veth", "peer", "name", "eth0", "netns", space)
            self._ip("-n", hub, "link", "set", f"v{i}", "master", "br0", "up")
            self._ip("-n", space, "addr", "add", f"{SUBNET}.{10 + i}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "eth0", "up")

    def _boot(self, name: str, daemon: Sequence[str]) -> None:
        inside = ["unshare", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        with (self.state / "log" / f"init-{name}.out").open("wb") as log:
            holder = subprocess.Popen(
                ["ip", "netns", "exec", self._space(name), *inside, "bash", f"{self.state}/init.sh", name, *daemon],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._holders.append(holder)
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
        _until(lambda: children.read_text().split(), f"process 1 of {name}")
        self._init[name] = int(children.read_text().split()[0])


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _until(true, what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not there after {seconds:g} s")
        time.sleep(0.05)
