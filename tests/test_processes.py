"""However a process ends, it leaves no servers and no files in memory, and it removes nothing of other processes."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from scripts import Forked, alive, wait_for

from runtime import weights
from runtime.distributed import init_distributed
from runtime.processes import MEMORY, start_group
from runtime.weights import run_memory, snapshot_folders


def test_runs_of_one_name_keep_out_of_each_others_folders_and_clear_their_own(tmp_path):
    """Past bug: a process removed the folders of others."""
    alice, bob = tmp_path / "alice" / "run", tmp_path / "bob" / "run"
    for run in (alice, bob):
        run.mkdir(parents=True)
        (run / "model.safetensors").touch()
    run_memory(bob).mkdir()
    (run_memory(bob) / "weights").touch()  # it was killed
    with snapshot_folders(alice, alice) as (hers, _):
        (hers / "weights").touch()
        with snapshot_folders(bob, bob) as (his, _):
            assert his.parent == hers.parent == MEMORY and his != hers and f"-{os.getuid()}-" in his.name
            assert his.stat().st_mode & 0o777 == 0o700
            assert not list(his.iterdir())
        assert not his.exists() and (hers / "weights").exists()
    assert not hers.exists()


def test_a_link_that_is_planted_under_a_runs_name_leads_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "MEMORY", tmp_path)
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").touch()
    run_memory(tmp_path).symlink_to(tmp_path / "precious")
    with snapshot_folders(tmp_path, tmp_path) as folders:
        assert set(folders) == {tmp_path / "snapshot"}
    assert (tmp_path / "precious" / "thesis").exists()


def wait_as_a_rank_with_a_server() -> None:
    """Write the ids of both processes."""
    os.setsid()  # as torchrun starts its ranks
    init_distributed()
    os.write(1, f"{os.getpid()}\n".encode())  # at once: all write into one file
    start_group(["sh", "-c", "echo $$; exec sleep 60"])
    signal.pause()


def test_ranks_and_servers_end_with_the_process_that_started_them_even_if_it_is_killed():
    """Past bugs: `study.paradox` killed torchrun's process group, and the ranks went on. torchrun kills ranks with SIGKILL, and a
    server kept running on its GPU."""
    torchrun = Forked(wait_as_a_rank_with_a_server, ranks=2)
    log = Path(torchrun.log)
    wait_for(lambda: log.read_text().count("\n") == 4, torchrun)
    started = [int(line) for line in log.read_text().split()]
    assert all(map(alive, started))
    torchrun.kill()
    wait_for(lambda: not any(map(alive, started)), seconds=10)


def test_a_server_that_is_killed_leaves_no_children_and_no_images():
    """Past bug: it left both. The images of other servers stay."""
    servers = pytest.importorskip("runtime.servers")
    theirs = MEMORY / f"sgl_shm_mm_{os.getpid()}_ab12cd34"
    theirs.touch()
    script = f"touch {MEMORY}/sgl_shm_mm_$$_ab12cd34; sleep 300 & echo $!; wait"
    server = start_group(["sh", "-c", script], stdout=subprocess.PIPE, text=True)
    child = int(server.stdout.readline())
    image = MEMORY / f"sgl_shm_mm_{server.pid}_ab12cd34"
    assert alive(child) and image.exists()
    servers.kill(servers.Server("", process=server))
    server.stdout.close()
    wait_for(lambda: not alive(child), seconds=5)
    assert not image.exists() and theirs.exists()
    theirs.unlink()
