"""processes.py: start processes that end with this one, even after kill -9, and kill them with all that they started.

    server = start_group(command)             # a process that is killed when the thread that started it ends
    kill_group(server)                        # with its children

This file imports only the standard library: it also runs as a program of its own, without the installed packages.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

# The folder for files in memory: SGLang's images, snapshots of weights, frames of requests.
MEMORY = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path(tempfile.gettempdir())


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
    """Kill a process of `start_group` and its children, except those that have made a group of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":  # see start_group
    end_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])
