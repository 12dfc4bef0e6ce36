"""cleanup.py: files in memory and servers that must not outlive this process, even after kill -9.

    folder = memory_folder()                  # /dev/shm/minparavt-x3k9a_2b, the same for every caller
    server = start_group(command)             # a process that ends with this one, and so do its children

A shell beside this process, the guard, waits until it has ended. Then it kills the servers and removes the folder. If
somebody kills the guard first, the servers live on, and the folder stays until another process calls `memory_folder`:
that removes every folder whose lock nobody holds.
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
# $1 is the folder, and $1/.. is MEMORY. groups/PID stands for a server's process group, groups/PID/NAME for a file of its in MEMORY.
GUARD = """
read -r _                     # waits: the pipe ends when the process that holds it open has ended
mv "$1/groups" "$1/ended"     # from now on no server can note itself, so none begins
for group in "$1/ended"/*; do
    kill -9 "-${group##*/}"
    rm -f "$1/../sgl_shm_mm_${group##*/}"_*
done
for file in "$1/ended"/*/*; do rm -f "$1/../${file##*/}"; done
rm -rf "$1"
"""
START = 'mkdir "$0/$$" && exec "$@"'  # note the group ($$ stays the process id after exec), then begin


@functools.cache
def memory_folder() -> Path:
    """Make this process's folder, which no other user may enter, and remove those of dead processes."""
    for old in MEMORY.glob("minparavt-????????"):  # as mkdtemp names them
        lock = _lock(old)
        if lock is not None:
            shutil.rmtree(old, ignore_errors=True)
            os.close(lock)

    lock = None
    while lock is None:  # before it is locked, another process may remove it as a dead one's
        folder = Path(tempfile.mkdtemp(prefix="minparavt-", dir=MEMORY))
        lock = _lock(folder)
    (folder / "groups").mkdir()

    guard = subprocess.Popen(
        ["sh", "-c", GUARD, "sh", str(folder)], cwd="/", start_new_session=True,  # Ctrl-C is not for it
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        pass_fds=[lock],  # the lock is held as long as this process or the guard lives
    )  # fmt: skip
    atexit.register(guard.communicate)  # closes the pipe and waits
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
    """Have the kernel kill this process once its parent has died."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def start_group(command: list[str], **options) -> subprocess.Popen:
    """Start a command, with the options of Popen, in a process group of its own."""
    command = ["sh", "-c", START, str(memory_folder() / "groups"), *command]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)


def note_shared_memory(process: subprocess.Popen) -> None:
    """Note the files in MEMORY that a server of `start_group` would leave behind when it is killed: SGLang's load figures and
    queues, and the semaphores of Python's multiprocessing. (Features on their way to the model come and go; their names,
    sgl_shm_mm_PID_*, have the server's process id, so they need no note.)"""
    # The names do not say whose files they are. The server's are those that its processes have mapped.
    mapped = set()  # inodes
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            if os.getpgid(int(maps.parent.name)) == process.pid:
                mapped |= set(re.findall(rf" (\d+) +{MEMORY}/", maps.read_text()))
    for file in (*MEMORY.glob("sglang_loads_*"), *MEMORY.glob("sgl_shm_*"), *MEMORY.glob("sem.mp-*")):
        with contextlib.suppress(OSError):  # the file has gone, or the group's note has
            if str(file.stat().st_ino) in mapped:
                (memory_folder() / "groups" / str(process.pid) / file.name).touch()


def kill_group(process: subprocess.Popen) -> None:
    """Kill a process of `start_group`, and its children, which may outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    note = memory_folder() / "groups" / str(process.pid)
    for file in (*note.glob("*"), *MEMORY.glob(f"sgl_shm_mm_{process.pid}_*")):
        (MEMORY / file.name).unlink(missing_ok=True)
    shutil.rmtree(note, ignore_errors=True)
