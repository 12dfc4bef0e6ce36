"""cleanup.py: what must not outlive this process, however it ends: its files in memory, and the servers that it starts.

    folder = memory_folder()                  # /dev/shm/minparavt-x3k9a_2b, the same for every caller
    server = start_group(command)             # a process that ends with this one, and so do its children

A shell beside us waits for the end of a pipe that we hold open, also by kill -9. Then it kills the servers and removes
the folder. If the shell is killed, too, the servers live on, and the folder stays until the next process that makes one:
it removes all whose locks nobody holds.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path(tempfile.gettempdir())
# A group notes itself as a folder, and as files in it the names of its shared memory. `groups` is renamed before it is
# read: one that comes later does not begin.
END = """read -r _; mv "$1/groups" "$1/ended"
for group in "$1/ended"/*; do kill -9 "-${group##*/}"; rm -f "$1/../sgl_shm_mm_${group##*/}"_*; done
for file in "$1/ended"/*/*; do rm -f "$1/../${file##*/}"; done; rm -rf "$1" """
BEGIN = 'mkdir "$0/$$" && exec "$@"'


@functools.cache
def memory_folder() -> Path:
    """Make this process's folder, which nobody else may enter, and remove those of the dead."""
    for old in MEMORY.glob("minparavt-????????"):  # as mkdtemp names them
        lock = _lock(old)
        if lock is not None:
            shutil.rmtree(old, ignore_errors=True)
            os.close(lock)
    lock = None
    while lock is None:  # until it is locked, another process may take it for a dead one's
        folder = Path(tempfile.mkdtemp(prefix="minparavt-", dir=MEMORY))
        lock = _lock(folder)
    (folder / "groups").mkdir()
    shell = subprocess.Popen(
        ["sh", "-c", END, "sh", str(folder)], cwd="/", start_new_session=True,  # Ctrl-C is not for it
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[lock],  # it keeps it
    )  # fmt: skip
    atexit.register(shell.communicate)  # closes the pipe and waits
    return folder


def _lock(folder: Path) -> int | None:
    """Return a descriptor that holds the folder's lock; None if another process has it, or has removed the folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # not what a link leads to
    except OSError:
        return None
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder.exists():
            return descriptor
    os.close(descriptor)
    return None


def end_with_parent() -> None:
    """Have the kernel kill this process once its parent has died, however it did."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def start_group(command: list[str], **options) -> subprocess.Popen:
    """Start a command, with the options of Popen, in a process group of its own."""
    noted = ["sh", "-c", BEGIN, str(memory_folder() / "groups"), *command]
    return subprocess.Popen(noted, stdin=subprocess.DEVNULL, start_new_session=True, **options)


def note_shared_memory(process: subprocess.Popen) -> None:
    """Note what a server of `start_group` keeps in /dev/shm and SIGKILL leaves there: SGLang's load figures and queues, and the
    semaphores of Python's multiprocessing. Their names do not tell whose they are, but what the group has mapped is its.
    (Features on their way to the model come and go; they have the server's process id in their names, sgl_shm_mm_PID_*.)"""
    inodes = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if os.getpgid(int(maps.parent.name)) == process.pid:
                inodes |= set(re.findall(rf" (\d+) +{MEMORY}/", maps.read_text()))
    for file in (*MEMORY.glob("sglang_loads_*"), *MEMORY.glob("sgl_shm_*"), *MEMORY.glob("sem.mp-*")):
        with contextlib.suppress(OSError):  # it has gone, or the group's note has
            if str(file.stat().st_ino) in inodes:
                (memory_folder() / "groups" / str(process.pid) / file.name).touch()


def kill_group(process: subprocess.Popen) -> None:
    """Kill a process of `start_group`, and its children, which may outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    note = memory_folder() / "groups" / str(process.pid)  # if it came to that
    for file in (*note.glob("*"), *MEMORY.glob(f"sgl_shm_mm_{process.pid}_*")):
        (MEMORY / file.name).unlink(missing_ok=True)
    shutil.rmtree(note, ignore_errors=True)
