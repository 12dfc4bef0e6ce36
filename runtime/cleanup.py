"""cleanup.py: remove this process's files in memory and kill its servers when it ends, even after kill -9.

    folder = memory_folder()                  # /dev/shm/minparavt-x3k9a_2b, the same one at each call
    server = start_group(command)             # a process that is killed when this one ends, with its children

A shell, the guard, waits until this process has ended. Then it kills the servers and removes the folder. If the guard is
killed first, the servers keep running. The folder then stays until another process calls `memory_folder`, which removes
every folder whose lock nobody holds.
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
# $1 is the folder, and $1/.. is MEMORY. groups/PID names a server's process group, groups/PID/NAME a file of that server in MEMORY.
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
START = 'mkdir "$0/$$" && exec "$@"'  # note the group ($$ is still the process id after exec), then start


@functools.cache
def memory_folder() -> Path:
    """Make this process's folder, which no other user can enter. Remove the folders of dead processes."""
    for old in MEMORY.glob("minparavt-????????"):  # the names that mkdtemp gives
        lock = _lock(old)
        if lock is not None:
            shutil.rmtree(old, ignore_errors=True)
            os.close(lock)

    lock = None
    while lock is None:  # until it is locked, another process can remove it as a dead process's folder
        folder = Path(tempfile.mkdtemp(prefix="minparavt-", dir=MEMORY))
        lock = _lock(folder)
    (folder / "groups").mkdir()

    guard = subprocess.Popen(
        ["sh", "-c", GUARD, "sh", str(folder)], cwd="/", start_new_session=True,  # it must survive Ctrl-C
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        pass_fds=[lock],  # the lock is held while this process or the guard runs
    )  # fmt: skip
    atexit.register(guard.communicate)  # closes the pipe and waits
    return folder


def _lock(folder: Path) -> int | None:
    """Lock a folder and return the descriptor; None if another process holds the lock or has removed the folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # do not follow links
    except OSError:
        return None
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder.exists():
            return descriptor
    os.close(descriptor)
    return None


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def start_group(command: list[str], **options) -> subprocess.Popen:
    """Start a command in its own process group, which the guard kills when this process ends. Options as of Popen."""
    command = ["sh", "-c", START, str(memory_folder() / "groups"), *command]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)


def note_shared_memory(process: subprocess.Popen) -> None:
    """Note the files in MEMORY that a killed server of `start_group` would leave behind: SGLang's load figures and queues,
    and semaphores of Python's multiprocessing. (Files of image features need no note: their names, sgl_shm_mm_PID_*, hold
    the server's process id.)"""
    # A name does not tell which server owns the file, so look for the files that this server's processes have mapped.
    mapped = set()  # inodes
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if os.getpgid(int(maps.parent.name)) == process.pid:
                mapped |= set(re.findall(rf" (\d+) +{MEMORY}/", maps.read_text()))
    for file in (*MEMORY.glob("sglang_loads_*"), *MEMORY.glob("sgl_shm_*"), *MEMORY.glob("sem.mp-*")):
        with contextlib.suppress(OSError):  # the file or the group's note is gone
            if str(file.stat().st_ino) in mapped:
                (memory_folder() / "groups" / str(process.pid) / file.name).touch()


def kill_group(process: subprocess.Popen) -> None:
    """Kill a process of `start_group` and its children, and remove the files that they leave in MEMORY."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    note = memory_folder() / "groups" / str(process.pid)
    for file in (*note.glob("*"), *MEMORY.glob(f"sgl_shm_mm_{process.pid}_*")):
        (MEMORY / file.name).unlink(missing_ok=True)
    shutil.rmtree(note, ignore_errors=True)
