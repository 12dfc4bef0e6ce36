"""cleanup.py: where a run keeps files in memory, and how its servers end with it.

    folder = run_memory(run)                  # /dev/shm/minparavt-1000-paragrpo_8b-...: the run empties it at its start
    server = start_group(command)             # a process that is killed when the thread that started it ends
    kill_group(server)                        # with its children and its images in memory

Even kill -9 ends the servers. Folders stay then: a run's until it resumes, others until the user deletes them.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path(tempfile.gettempdir())


def run_memory(run: Path) -> Path:
    """Return the path of a run's folder in memory, on this node. It is named after the user and the run's folder: its name, and
    its place on the disk, because containers that share /dev/shm may have other folders at the same path."""
    place = run.stat()
    return MEMORY / f"minparavt-{os.getuid()}-{run.resolve().name}-{place.st_dev:x}-{place.st_ino:x}"


def print_folders_in_memory() -> None:
    """List all folders of this project in memory with their sizes, those of runs that were killed among them."""
    sizes = subprocess.run(["du", "-sh", *MEMORY.glob("minparavt-*")], capture_output=True, text=True).stdout
    print(f"{MEMORY} holds these folders; delete those of runs that have ended:\n{sizes}", end="", flush=True)


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
