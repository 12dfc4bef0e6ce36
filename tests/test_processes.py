"""However a process ends, it leaves no servers and no files in memory, and it removes nothing of other processes."""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from scripts import REPO, Forked, alive, finish, wait_for

from runtime import weights
from runtime.processes import MEMORY, kill_group, start_group
from runtime.weights import run_memory, snapshot_folders


def keep_weights(run: Path, user: int) -> None:
    """Keep a file in a run's folder in memory, as this user, until the file RUN/end appears."""
    os.setuid(user)
    with snapshot_folders(run, run) as (folder, _):
        assert not list(folder.iterdir())  # what a killed run left is gone
        (folder / "weights").touch()
        print(folder, flush=True)
        wait_for((run / "end").exists)
        assert (folder / "weights").exists()


def test_two_runs_of_two_users_at_once_keep_out_of_each_others_folders():
    """Past bug: a process removed the folders of others. The runs have the same name."""
    users = (os.getuid(), 65534 if os.getuid() == 0 else os.getuid())
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        runs = [Path(name, home, "run") for home in ("alice", "bob")]
        for run, user in zip(runs, users):
            run.mkdir(parents=True)
            os.chown(run, user, -1)
        alice, bob = (Forked(partial(keep_weights, *pair)) for pair in zip(runs, users))
        hers, his = (first_line(process) for process in (alice, bob))
        for folder, user in ((hers, users[0]), (his, users[1])):
            assert folder.parent == MEMORY
            assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (user, 0o700)

        # One ends, and one is killed. What the latter leaves goes with its next start.
        (runs[0] / "end").touch()
        finish(alice)
        assert not hers.exists()
        assert [file.name for file in his.iterdir()] == ["weights"]
        bob.kill()
        bob.join()
        bob = Forked(partial(keep_weights, runs[1], users[1]))
        assert first_line(bob) == his
        (runs[1] / "end").touch()
        finish(bob)
        assert not his.exists()


def first_line(process: Forked) -> Path:
    wait_for(lambda: "\n" in Path(process.log).read_text(), process)
    return Path(Path(process.log).read_text().strip())


def test_a_link_that_is_planted_under_a_runs_name_leads_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "MEMORY", tmp_path)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").touch()
    run_memory(tmp_path).symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError), snapshot_folders(tmp_path, tmp_path):
        pass
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
from runtime.engine import EngineConfig
from runtime.servers import SGLang
from types import SimpleNamespace
fake = "echo $$ >> {tmp_path}/pid; exec {sys.executable} tests/fake_sglang.py $0 1 32 2"
launch = lambda port: ["sh", "-c", fake, str(port)]
engine = SGLang("", SimpleNamespace(never_sampled=[]), EngineConfig(server_gpus=(0,)), launch=launch)
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
