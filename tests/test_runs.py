"""A run's folder, its metrics, how a script ends, and ranks. (test_faults.py: whole runs that are killed.)"""

import atexit
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scripts import Forked, finish, rl_config, start, wait_for

import rl
from runtime import config, distributed
from runtime.folder import only_run_in
from runtime.policy import PolicyConfig
from runtime.run import Metrics, RunConfig
from runtime.script import run_script

# ------------------------------------------------------------------------------------------------ two in one folder


def hold(run: Path) -> None:
    with only_run_in(run):
        signal.pause()


def test_a_second_run_in_one_folder_is_refused_until_the_first_has_ended(toy_dir, tmp_path):
    run = tmp_path / "run"
    first = Forked(partial(hold, run))
    wait_for(lambda: (run / ".lock").exists() and (run / ".lock").read_text(), first)
    holder = f"process {first.pid} on {os.uname().nodename}"
    with pytest.raises(config.ConfigError, match=f"run = '{run}': {holder} is using this folder"):
        rl.main(config.load(rl.RLConfig, rl_config(tmp_path / "run.yaml", toy_dir)))
    assert not (run / "config.yaml").exists()
    first.kill()
    first.join()
    with only_run_in(run):
        pass


# ------------------------------------------------------------------------------------------------ metrics


def test_a_steps_line_shows_what_went_wrong_and_only_then(tmp_path, capsys):
    """Past bug: calls timed out, and the console said nothing of it."""
    console = Metrics(SimpleNamespace(run=str(tmp_path), steps=3, report_to=()), "rl", steps_done=0, shown=["loss"])
    console.write(0, {"loss": 0.5, "call_errors/over_limit": 0.5, "call_errors/timeout": 0.0, "failed_rate": 0.0})
    console.write(1, {"loss": 0.5, "call_errors/timeout": 1.0, "failed_rate": 0.125})
    told = ["rl step 1/3 loss 0.5", "rl step 2/3 loss 0.5 failed_rate 0.125 call_errors/timeout 1"]
    assert capsys.readouterr().out.splitlines() == told


def test_a_tracker_gets_the_settings_and_the_metrics_of_each_step_in_the_users_project(tmp_path, monkeypatch):
    begun, logged = {}, []
    board = SimpleNamespace(log=lambda values, step: logged.append((step, values["loss"])))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: begun.update(settings) or board))
    monkeypatch.setenv("WANDB_PROJECT", "videos")
    cfg = RunConfig(run=str(tmp_path), policy=PolicyConfig("start"), data=None, steps=3, report_to=("wandb",))
    Metrics(cfg, "rl", steps_done=0, shown=[]).write(1, {"loss": 0.5})
    assert (begun["project"], begun["name"], begun["config"]["steps"]) == ("videos", str(tmp_path), 3)
    assert logged == [(1, 0.5)]


# ------------------------------------------------------------------------------------------------ ends


def wait_for_a_signal(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(10)


def write_into_a_file(cfg) -> None:
    Path("/dev/null/x").touch()


def leave_a_thread(cfg) -> None:
    """Past bug: Python joins all threads at its exit, so a finished run whose tool hung held its GPUs."""
    atexit.register(print, "closed")  # as wandb does
    ThreadPoolExecutor(1).submit(time.sleep, 1e6)


def lose_an_interrupt(cfg) -> None:
    """Do what torch's writer of states does with Ctrl-C. Past bug: the run ended with the library's traceback."""
    try:
        wait_for_a_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise RuntimeError("unexpected pos 704 vs 598") from None


def clean_up_slowly(cfg) -> None:
    """Past bug: a second SIGTERM, torchrun's after the scheduler's, left the weights in /dev/shm."""
    try:
        wait_for_a_signal(signal.SIGTERM)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        print("cleaned up", flush=True)


INTERRUPTED = "interrupted. The same command resumes from what was saved in runs/x\n"
ENDS = [
    (write_into_a_file, 1, "error: [Errno 20] Not a directory: '/dev/null/x'\n"),
    (leave_a_thread, 0, "closed\n"),
    (lose_an_interrupt, 1, INTERRUPTED),
    (clean_up_slowly, 1, "cleaned up\n" + INTERRUPTED),
]


@pytest.mark.parametrize("work, status, told", ENDS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_script_ends_with_its_last_sentence(work, status, told):
    process = Forked(partial(run_script, work, SimpleNamespace(run="runs/x")))
    assert finish(process, status, seconds=60) == told


# ------------------------------------------------------------------------------------------------ torchrun


@pytest.mark.parametrize("anew", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_mistake_on_all_ranks_is_an_error_line(toy_dir, tmp_path, anew):
    """The ranks are torchrun's (`anew`), which adds its own report of the failure, or forked ranks, which add nothing."""
    cfg = rl_config(tmp_path / "run.yaml", toy_dir, data={"sources": [{"path": "gone.parquet"}]})
    told = finish(start("rl.py", cfg, ranks=2, anew=anew), code=1)
    errors = re.findall("^error: .*", told, re.M)  # docs/troubleshooting.md tells users to read that line
    assert errors and all(error.startswith("error: gone.parquet: no such data file") for error in errors)
    assert not (tmp_path / "run").exists()


def come_alone() -> None:
    torch.distributed.init_process_group("cpu:gloo,cuda:gloo")  # a backend per device, as where there are GPUs
    distributed.gather("here")
    if distributed.rank() > 0:
        signal.pause()
    distributed.TIMEOUT = timedelta(seconds=1)
    distributed.barrier()


@pytest.mark.slow
def test_a_barrier_names_all_ranks_that_did_not_come():
    assert "[Rank 0]: Ranks 1, 2 failed to pass" in finish(Forked(come_alone, ranks=3), code=1)
