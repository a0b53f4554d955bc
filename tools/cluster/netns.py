"""A cluster on one machine: hosts that are network, mount, process, IPC and host-name namespaces, joined by a bridge.

Each host has its own address, name, loopback, process numbers, shared memory, /tmp, /root, /home and /run, and a real
sshd on its address that accepts root by key. It shares the rest of the file system with this machine. The ``head`` is
the machine of the user: it has the /tmp and /root of this machine, so it sees the files of a test. Every host sees
``shared`` folders.

The process that made the cluster holds pipes to it. When that process ends, the pipes close and the kernel removes
hosts, network and folders. One folder of key files stays on disk, and the next cluster removes it. Several clusters can
exist at once: their hosts have the same addresses in separate networks.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from asyncrl.core.files import try_lock
from asyncrl.rpc.linux import children_of
from tools.cluster import network
from tools.cluster.network import Switch
from tools.live_run import title
from tools.waiting import wait_until

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
PREFIX = f"asyncrl-cluster-{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}-"
"""Prefix of the folders of key files. A test worker removes only the leftovers of its own clusters."""
HEAD = "head"
NETWORK = "10.77.0"
NOWHERE = "02:00:00:00:00:01"
WAIT_S = 30.0
SETGROUPS = Path("/proc/self/setgroups")
"""Denied if a user is root only in a namespace."""
ENTER = (sys.executable, "-I", "-S", str(HERE / "inside.py"), "enter")
INIT = (sys.executable, "-I", "-S", str(HERE / "inside.py"), "init")
UNSHARE = ("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child")
PRIVATE = ("/tmp", "/var/tmp", "/root", "/home", "/run", "/dev/shm")
PRIVATE_OF_HEAD = ("/run", "/dev/shm")
SSH = "/run/cluster-ssh"
SSHD_CONFIG = f"""\
Port 22
HostKey {SSH}/host_key
AuthorizedKeysFile {SSH}/authorized_keys
AuthenticationMethods publickey
PermitRootLogin prohibit-password
UsePAM no
UseDNS no
StrictModes no
PidFile none
MaxStartups 100
PrintMotd no
Subsystem sftp internal-sftp
"""


SSH_CONFIG = """\
Host *
  User root
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  BatchMode yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile none
  StrictHostKeyChecking yes
  ConnectTimeout 5
"""


def why_not() -> str | None:
    """Return the reason why this machine allows no cluster, or None."""
    tools = (*network.TOOLS, "ssh", "ssh-keygen", "sshd")
    packages = "iproute2 util-linux openssh-client openssh-server"
    trial = "mount -t proc proc /proc && mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /dev/shm && "
    found = network.why_not(tools, packages, trial + network.BRIDGE_TRIAL, unshare=UNSHARE)
    if found is None and SETGROUPS.read_text().strip() != "allow":
        return "sshd needs the root of more than one user"
    return found


class Host:
    """One host. It is on when it is made."""

    def __init__(self, cluster: Cluster, name: str, number: int) -> None:
        self.cluster, self.name, self.address = cluster, name, f"{NETWORK}.{number}"
        self.port = f"port{number}"
        """The interface of its cable at the bridge."""
        self.cores: Sequence[int] = ()
        """Cores of this machine that the host may use; empty means all."""
        self._holder: subprocess.Popen[str] | None = None
        self._sshd: subprocess.Popen[Any] | None = None
        self._init = 0
        self._children: list[subprocess.Popen[Any]] = []

    def __repr__(self) -> str:
        return f"Host({self.name}, {self.address})"

    @property
    def is_on(self) -> bool:
        return self._holder is not None and self._holder.poll() is None

    def power_on(self) -> None:
        """Boot with empty private folders, the same address and the same host key."""
        assert not self.is_on
        self._holder = subprocess.Popen(
            [*UNSHARE, *INIT, str(self.cluster.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.write(json.dumps(self.cluster.describe(self)) + "\n")
        self._holder.stdin.flush()
        assert self._holder.stdout.readline() == "ready\n", f"{self.name} does not boot"
        (self._init,) = children_of(self._holder.pid)
        self.cluster.switch.plug(self.port, self._init, f"{self.address}/24")
        log = self.cluster.folder / f"sshd-{self.name}.log"
        with log.open("wb") as out:
            self._sshd = self.popen([_sshd(), "-D", "-e", "-f", f"{SSH}/sshd_config"], stdout=out, stderr=out)
        sshd = self._sshd
        wait_until(lambda: "listening" in log.read_text() or sshd.poll() is not None, f"sshd of {self.name}")
        assert sshd.poll() is None, f"sshd of {self.name}: {log.read_text()}"

    def power_off(self) -> None:
        """Cut the power: no peer gets a FIN."""
        if self._holder is None:
            return
        if self.is_on:
            self.cut_off()
            os.kill(self._init, signal.SIGKILL)
        holder, self._holder = self._holder, None
        holder.kill()
        holder.communicate(timeout=WAIT_S)
        # The kernel removes its network later, and the next boot needs the port.
        with contextlib.suppress(OSError):
            self.cluster.switch.run(f"ip link delete dev {self.port}")
        for child in self._children:
            with contextlib.suppress(BrokenPipeError), child:
                child.wait(WAIT_S)
        self._children.clear()

    def cut_off(self) -> None:
        """Pull the cable. The processes on the host continue."""
        self.cluster.switch.run(f"ip link set dev {self.port} down")

    def reconnect(self) -> None:
        """Plug the cable in."""
        self.cluster.switch.run(f"ip link set dev {self.port} up")

    def drop_to(self, other: Host) -> None:
        """Drop every packet to another host without an error, and none from it."""
        # The hardware address of no host.
        self.run(["ip", "neigh", "replace", other.address, "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent"])

    def deliver_to(self, other: Host) -> None:
        """Stop dropping packets to it."""
        self.run(["ip", "neigh", "del", other.address, "dev", "eth0"])

    def popen(self, argv: Sequence[str], *, cwd: str | Path = "/", **options: Any) -> subprocess.Popen[Any]:
        """Start ``argv`` on the host. The process forwards signals and has the exit code of ``argv``."""
        child = subprocess.Popen(self.entered(argv, cwd), cwd="/", **options)
        self._children.append(child)
        return child

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float = WAIT_S,
        check: bool = True,
        input: str | None = None,
        cwd: str | Path = "/",
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``argv`` on the host to its end. With ``check``, a nonzero exit code raises with the output."""
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if input is None else {"input": input}
        words = self.entered(argv, cwd)
        try:
            done = subprocess.run(words, cwd="/", env=env, timeout=timeout, capture_output=True, text=True, **given)
        except subprocess.TimeoutExpired as error:
            said = f"{error.stdout!r} {error.stderr!r}"
            raise AssertionError(f"{self.name}: {argv} took over {timeout:g} s\n{said}") from None
        said = f"{done.stdout}{done.stderr}"
        assert not check or done.returncode == 0, f"{self.name}: {argv} exited {done.returncode}\n{said}"
        return done

    def entered(self, argv: Sequence[str], cwd: str | Path | None = None) -> list[str]:
        """Return the command that runs ``argv`` on the host, in ``cwd`` there or in the folder of the same name."""
        assert self.is_on, f"{self.name} is off"
        inner = list(argv)
        if cwd is not None and str(cwd) != "/":
            # The folder may be missing here, so the shell on the host changes to it.
            inner = ["sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *argv]
        if self.cores:
            inner = ["taskset", "--cpu-list", ",".join(map(str, self.cores)), *inner]
        return [*ENTER, str(self._init), *inner]

    def kernel(self, name: str) -> Path:
        """Return the path of the host's /proc/NAME, while the host is on."""
        return Path(f"/proc/{self._init}/{name}")

    def path(self, inside: str | Path) -> Path:
        """Return the path on this machine of the host's path ``inside``, while the host is on."""
        return Path(f"/proc/{self._init}/root") / str(inside).lstrip("/")

    def processes(self) -> dict[int, str]:
        """Return the command lines of the host's processes except init and sshd, by process number here."""
        assert self._holder is not None
        own = {self._holder.pid, self._init, *(children_of(self._sshd.pid) if self._sshd else ())}
        there = os.readlink(f"/proc/{self._init}/ns/net")
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                # A zombie has no command line.
                if process.pid not in own and os.readlink(f"/proc/{process.pid}/ns/net") == there:
                    found[process.pid] = title(process)
        return {pid: words for pid, words in found.items() if words}

    def kill_all(self) -> None:
        """Kill every process on the host except sshd (SIGKILL)."""
        until = time.monotonic() + WAIT_S
        while there := self.processes():
            assert time.monotonic() < until, f"{self.name} does not let go of {there}"
            _kill(there)
            time.sleep(0.01)


class Cluster(contextlib.ExitStack):
    """The head and some hosts, all on. Use it as a context, or ``close`` it: AssertionError if something stays.

    ``cores``: by host. ``switch`` is the bridge of all cables.
    """

    def __init__(
        self,
        names: Sequence[str] = ("a", "b", "c"),
        *,
        shared: Sequence[Path] = (),
        cores: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        remove_abandoned()
        self.shared = [str(Path(path).absolute()) for path in shared]
        # The folder holds keys, so only the user may read it.
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.head = Host(self, HEAD, 1)
        self.hosts = {name: Host(self, name, number) for number, name in enumerate(names, 2)}
        self.ssh_config = self.folder / "ssh_config"
        for name, own in (cores or {}).items():
            self[name].cores = own
        try:
            self.callback(self._remove_folder)
            self._make_keys()
            self.switch = Switch(str(self.folder / "nothing"))
            self.callback(self.switch.close)
            for host in self.all_hosts:
                self.callback(host.power_off)
                host.power_on()
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Host:
        return self.head if name == HEAD else self.hosts[name]

    @property
    def all_hosts(self) -> list[Host]:
        return [self.head, *self.hosts.values()]

    def ssh(self, name: str, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command over ssh from the head; ``options`` as for Host.run."""
        return self.head.run(["ssh", "-F", str(self.ssh_config), name, *command], **options)

    @contextlib.contextmanager
    def capture(self) -> Iterator[Path]:
        """Record the traffic of the bridge in a file. Read it after the context (capture.py).

        AssertionError if frames were lost, because the record is then incomplete.
        """
        file = self.folder / f"capture-{len([*self.folder.glob('capture-*')])}"
        script = [sys.executable, "-I", "-S", str(HERE / "capture.py"), "bridge", str(file)]
        with subprocess.Popen(
            self.switch.within(script), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as recorder:
            assert recorder.stdout is not None
            assert recorder.stdout.readline() == "recording\n", "the capture does not start"
            try:
                yield file
            finally:
                lost, _ = recorder.communicate(timeout=WAIT_S)
        assert lost == "0\n", f"frames lost by the capture: {lost or 'it broke off'}"

    def describe(self, host: Host) -> dict[str, Any]:
        """Return the description for the init process of the host."""
        names = "".join(f"{other.address} {other.name}\n" for other in self.all_hosts)
        public = (self.folder / "user_key.pub").read_text()
        is_head = host is self.head
        python = {sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent.parent), str(REPOSITORY)}
        return {
            "name": host.name,
            "private": list(PRIVATE_OF_HEAD if is_head else PRIVATE),
            "exposed": [*sorted(python, key=len), *self.shared],
            "files": {
                "/run/hosts": (f"127.0.0.1 localhost\n{names}", 0o644),
                "/run/sshd/.keep": ("", 0o644),
                f"{SSH}/sshd_config": (f"ListenAddress {host.address}\n{SSHD_CONFIG}", 0o600),
                f"{SSH}/host_key": ((self.folder / f"host_key_{host.name}").read_text(), 0o600),
                f"{SSH}/authorized_keys": (public, 0o600),
            },
            "replaced": {"/etc/hosts": "/run/hosts"},
        }

    def _remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
        left = _marked(self.folder)
        assert not left, f"left behind: {left}"

    def _make_keys(self) -> None:
        known, sections = [], []
        for name in ("user_key", *(f"host_key_{host.name}" for host in self.all_hosts)):
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(self.folder / name)]
            subprocess.run(argv, check=True, timeout=WAIT_S, stdin=subprocess.DEVNULL)
        for host in self.all_hosts:
            public = (self.folder / f"host_key_{host.name}.pub").read_text().strip()
            known.append(f"{host.name},{host.address} {public}")
            sections.append(f"Host {host.name}\n  HostName {host.address}")
        (self.folder / "known_hosts").write_text("\n".join(known) + "\n")
        self.ssh_config.write_text("\n".join([*sections, SSH_CONFIG.format(folder=self.folder)]))


def remove_abandoned() -> list[Path]:
    """Remove the leftovers of clusters whose makers were killed. Return the removed folders."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), try_lock(folder / "lock") as is_free:
            if is_free:
                _kill(_marked(folder))
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _marked(folder: Path) -> dict[int, str]:
    """Return the processes that hold a cluster, by the folder in their command lines."""
    found = {process.pid: title(process) for process in psutil.process_iter() if process.pid != os.getpid()}
    return {pid: words for pid, words in found.items() if any(w.startswith(str(folder)) for w in words.split())}


def _sshd() -> str:
    # sshd starts itself again for each connection, so it needs its full path.
    found = shutil.which("sshd", path=network.PATH)
    assert found is not None
    return found
