"""However a process ends, it leaves no servers and no files in memory, and it removes nothing of other processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import REPO, alive, wait_for

from runtime import cleanup
from runtime.cleanup import kill_group, memory_folder, start_group

OWNER = """
import sys
from runtime.cleanup import memory_folder
print(memory_folder(), flush=True)
sys.stdin.read()
"""


def owner(*launcher: str) -> tuple[subprocess.Popen, Path]:
    """Start a process that has a folder and runs until its stdin is closed."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([*launcher, sys.executable, "-c", OWNER], cwd=REPO, text=True, **pipes)
    return process, Path(process.stdout.readline().strip())


def children(pid: int) -> list[int]:
    told = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(child) for child in told.stdout.split()]


def test_the_folder_is_private_and_goes_with_its_process_or_after_a_kill_with_the_next_one():
    for kill in (False, True):
        process, folder = owner()
        (folder / "frame.bmp").write_bytes(b"pixels")
        assert folder.parent == cleanup.MEMORY and folder.stat().st_mode & 0o777 == 0o700
        if kill:
            process.kill()
        process.communicate()
        assert folder.exists() is kill
    owner()[0].communicate()
    assert not folder.exists()


def test_the_living_keep_their_folders_whatever_their_process_ids():
    """Past bug: a container that shares /dev/shm has its own process ids, and removed the folders of all others."""
    living = memory_folder()
    launcher = ["unshare", "--fork", "--pid", "--mount-proc"]
    if subprocess.run([*launcher, "true"], capture_output=True).returncode:
        pytest.skip("only root may number processes anew")
    process, folder = owner(*launcher)
    assert folder != living and living.is_dir()
    owner()[0].communicate()
    assert folder.is_dir()
    process.communicate()


def test_only_dead_folders_of_ours_go_and_a_planted_link_leads_nowhere(tmp_path, monkeypatch):
    """Past bug: a snapshot's name could be guessed, and a link with that name was followed."""
    monkeypatch.setattr(cleanup, "MEMORY", tmp_path)
    for name in ("minparavt-images-12-a1b2", "precious", "minparavt-dead_one"):  # the first is from an older version
        (tmp_path / name).mkdir()
    (tmp_path / "precious" / "thesis").touch()
    (tmp_path / "minparavt-deadlink").symlink_to(tmp_path / "precious")
    mine = cleanup.memory_folder.__wrapped__()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"minparavt-images-12-a1b2", "precious", "minparavt-deadlink", mine.name}
    assert (tmp_path / "precious" / "thesis").exists()


def test_ranks_end_with_torchrun_even_if_it_is_killed(tmp_path):
    """torchrun gives each rank its own session. Past bug: `study.paradox` killed the process group, and ranks went on."""
    script = tmp_path / "rank.py"
    script.write_text("""
import os, time
from runtime.distributed import init_distributed
init_distributed()
os.write(1, f"{os.getpid()}\\n".encode())  # at once: both ranks share the pipe, and `print` writes its newline apart
time.sleep(120)
""")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    process = subprocess.Popen(
        torchrun, cwd=REPO, env=os.environ | {"PYTHONPATH": str(REPO)}, stdout=subprocess.PIPE, text=True
    )
    ranks = [int(process.stdout.readline()) for _ in range(2)]
    assert all(map(alive, ranks))
    process.kill()
    wait_for(lambda: not any(map(alive, ranks)), seconds=10)


def test_a_server_ends_with_a_process_that_is_killed(tmp_path):
    """Past bug: torchrun kills ranks with SIGKILL, and a server kept running on its GPU."""
    script = f"""
import time
from runtime.servers import SGLang
from types import SimpleNamespace
fake = "echo $$ >> {tmp_path}/pid; exec {sys.executable} tests/fake_sglang.py $0 1 32 2"
engine = SGLang("", SimpleNamespace(never_sampled=[]), gpus=(0,), launch=lambda port: ["sh", "-c", fake, str(port)])
engine.wait_until_ready()
print("ready", flush=True)
time.sleep(300)
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=REPO, stdout=subprocess.PIPE, text=True)
    while process.stdout.readline() != "ready\n":
        assert process.poll() is None
    server = int((tmp_path / "pid").read_text())
    assert alive(server)
    process.kill()
    process.communicate()
    wait_for(lambda: not alive(server), seconds=5)


def test_a_server_that_is_killed_leaves_no_children_and_no_images(tmp_path):
    """Past bug: it left both. The images of other servers stay."""
    theirs = Path(f"/dev/shm/sgl_shm_mm_{os.getpid()}_ab12cd34")
    theirs.touch()
    fake = f"sleep 300 & echo $! > {tmp_path}/child; exec {sys.executable} {REPO}/tests/fake_sglang.py 0 1 32 2 memory"
    server = start_group(["sh", "-c", fake], stdout=subprocess.PIPE, text=True)
    image = Path(server.stdout.readline().strip())
    child = int((tmp_path / "child").read_text())
    assert alive(child) and image.exists()
    kill_group(server)
    server.stdout.close()
    wait_for(lambda: not alive(child), seconds=5)
    assert not image.exists() and theirs.exists()
    theirs.unlink()
