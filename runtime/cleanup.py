"""cleanup.py: remove this process's files in memory when it ends, and kill its servers with it.

    folder = memory_folder()                  # /dev/shm/minparavt-x3k9a_2b, the same one at each call
    server = start_group(command)             # a process that is killed when the thread that started it ends
    kill_group(server)                        # with its children and its images in memory

Even kill -9 ends the servers. Its folder stays until another process calls `memory_folder`, which removes every folder
whose lock nobody holds.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path(tempfile.gettempdir())


@functools.cache
def memory_folder() -> Path:
    """Make this process's folder, which no other user can enter. Remove the folders of dead processes."""
    for old in MEMORY.glob("minparavt-????????"):  # the names that mkdtemp gives
        lock = _lock(old)
        if lock is not None:
            shutil.rmtree(old, ignore_errors=True)
            os.close(lock)

    locked = False
    while not locked:  # until it is locked, another process can remove it as a dead process's folder
        folder = Path(tempfile.mkdtemp(prefix="minparavt-", dir=MEMORY))
        locked = _lock(folder) is not None  # as long as this process lives
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
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
    """Make the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def start_group(command: list[str], **options) -> subprocess.Popen:
    """Start a command in its own process group. It is killed when the calling thread ends. Options as of Popen."""
    # This file runs as a program of its own: code between fork and exec (`preexec_fn`) can deadlock beside torch's threads.
    command = [sys.executable, "-IS", os.path.abspath(__file__), *command]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)


def kill_group(process: subprocess.Popen) -> None:
    """Kill a process of `start_group` and its children. Remove the images that SGLang leaves in MEMORY when it is killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for image in MEMORY.glob(f"sgl_shm_mm_{process.pid}_*"):
        image.unlink(missing_ok=True)


if __name__ == "__main__":  # see start_group
    end_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])
