"""Runs as they happen on a node: started twice, interrupted, killed, on a full disk, under torchrun."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scripts import REPO, Forked, alive, children, finish, metrics, rl_config, sft_config, start, wait_for

import rl
import rollout
import sft
from episode import Call
from runtime import config, distributed
from runtime.folder import only_run_in
from runtime.policy import PolicyConfig
from runtime.run import Metrics, RunConfig
from runtime.script import run_script
from runtime.weights import run_memory, snapshot_folders


def send(process, which: signal.Signals) -> str:
    """Send a signal to a running process, wait for its end and return its output."""
    os.kill(process.pid, which)
    return process.communicate(timeout=60)[0]


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
        sft.main(config.load(sft.SFTConfig, sft_config(tmp_path / "run.yaml", toy_dir)))
    assert not (run / "config.yaml").exists()
    send(first, signal.SIGKILL)
    with only_run_in(run):
        pass


# ------------------------------------------------------------------------------------------------ metrics


def test_a_steps_line_shows_what_went_wrong_and_only_then(tmp_path, capsys):
    """Past bug: calls timed out, and the console said nothing of it."""
    console = Metrics(SimpleNamespace(run=str(tmp_path), steps=3, report_to=()), "rl", steps_done=0, shown=["loss"])
    console.write(0, {"loss": 0.5, "call_errors/over_limit": 0.5, "failed_rate": 0.0})
    console.write(1, {"loss": 0.5, "call_errors/timeout": 0.0, "failed_rate": 0.125})
    console.write(2, {"loss": 0.5, "call_errors/timeout": 1.0, "call_errors/engine": 0.5})
    told = ["rl step 1/3 loss 0.5", "rl step 2/3 loss 0.5 failed_rate 0.125"]
    told.append("rl step 3/3 loss 0.5 call_errors/timeout 1 call_errors/engine 0.5")
    assert capsys.readouterr().out.splitlines() == told


def test_half_a_line_of_metrics_does_not_keep_a_run_from_going_on(tmp_path):
    written = '{"step": 0, "loss": 2.0}\n{"step": 1, "loss": 1.0}\n{"step": 2, "lo'
    (tmp_path / "metrics.jsonl").write_text(written)
    run = SimpleNamespace(run=str(tmp_path), steps=3, report_to=())
    Metrics(run, "sft", steps_done=1, shown=["loss"]).write(1, {"loss": 0.5})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(0, 2.0), (1, 0.5)]


@pytest.mark.parametrize("variable, project", [(None, "minparavt"), ("videos", "videos")])
def test_wandbs_project_is_the_users_if_wandb_project_is_set(tmp_path, monkeypatch, variable, project):
    begun = {}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: begun.update(settings)))
    monkeypatch.setattr("runtime.run.asdict", vars)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    if variable:
        monkeypatch.setenv("WANDB_PROJECT", variable)
    Metrics(SimpleNamespace(run=str(tmp_path), steps=3, report_to=("wandb",)), "rl", steps_done=0, shown=[])
    assert begun["project"] == project


def test_a_tracker_gets_the_settings_and_the_metrics_of_each_step(tmp_path, monkeypatch):
    begun, logged = {}, []
    board = SimpleNamespace(log=lambda values, step: logged.append((step, values["loss"])))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: begun.update(settings) or board))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    cfg = RunConfig(run=str(tmp_path), policy=PolicyConfig("start"), data=None, steps=3, report_to=("wandb",))
    Metrics(cfg, "rl", steps_done=0, shown=[]).write(1, {"loss": 0.5})
    assert (begun["name"], begun["config"]["steps"]) == (str(tmp_path), 3)
    assert logged == [(1, 0.5)]


# ------------------------------------------------------------------------------------------------ ends


def stumble(cfg: Path) -> None:
    """Run rl.py with a bug after its first update."""
    sys.argv = ["rl.py", str(cfg)]
    rl.keep_episodes = lambda *_: 1 / 0
    rl.main(config.load(rl.RLConfig, cfg))


@pytest.mark.slow
def test_a_bug_of_ours_in_mid_run_shows_its_traceback_and_leaves_nothing_behind(toy_dir, tmp_path):
    cfg = rl_config(tmp_path / "run.yaml", toy_dir, steps=100_000, staleness=1)
    process = Forked(partial(stumble, cfg))
    run = tmp_path / "run"
    wait_for(lambda: run.exists() and run_memory(run).exists() and children(process.pid), process)  # a decoder
    helpers = children(process.pid)
    folder = run_memory(run)
    told = finish(process, code=1)
    assert "Traceback" in told
    assert "ZeroDivisionError" in told
    assert not folder.exists()
    assert not (run / "snapshot").exists()
    wait_for(lambda: not any(map(alive, helpers)))


SLOW_ENDS = [pytest.param(end, marks=pytest.mark.slow) for end in (signal.SIGINT, signal.SIGKILL)]


@pytest.mark.parametrize("end", [signal.SIGTERM, *SLOW_ENDS], ids=str)
def test_a_run_that_ends_in_whatever_way_leaves_no_snapshot_and_no_process(toy_dir, tmp_path, end):
    """Past bug: Ctrl-C, and later a scheduler's SIGTERM, left the weights in /dev/shm, 16 GB of the 8B."""
    cfg = rl_config(tmp_path / "run.yaml", toy_dir, steps=100_000, staleness=1)
    process = start("rl.py", cfg)
    run = tmp_path / "run"
    wait_for(lambda: run.exists() and run_memory(run).exists() and children(process.pid), process)  # a decoder
    helpers = children(process.pid)
    folder = run_memory(run)
    wait_for(lambda: list(folder.glob("weights-*/*.safetensors")), process)
    told = send(process, end)
    killed = end == signal.SIGKILL
    interrupted = f"interrupted. The same command resumes from what was saved in {tmp_path}/run" in told
    assert interrupted is not killed
    assert process.returncode == (-end if killed else 1)
    assert "Traceback" not in told
    assert folder.exists() is (run / "snapshot").exists() is killed
    if killed:  # the run tidies up when it resumes
        with snapshot_folders(run, toy_dir / "model"):
            assert not list(folder.iterdir())
        assert not folder.exists()
    wait_for(lambda: not any(map(alive, helpers)), seconds=20)


def run_with_a_tool_that_hangs(cfg: Path, *overrides: str) -> None:
    """Run rl.py with a model that calls a tool in every turn. The tool never returns."""
    rollout.parse_calls = lambda text, turn: [Call(turn, "crop_video", {})]
    rollout.run_tool = lambda *_: time.sleep(1e6)
    run_script(rl.main, config.load(rl.RLConfig, cfg, overrides))


def test_a_run_ends_although_a_tool_never_returns(toy_dir, tmp_path):
    """Past bug: Python joins all threads at its exit, so a finished run held its GPUs."""
    cfg = rl_config(tmp_path / "run.yaml", toy_dir, steps=1)
    overrides = ["rollout.call_timeout=0.2", "rollout.max_rounds=1"]
    process = Forked(partial(run_with_a_tool_that_hangs, cfg, *overrides))
    wait_for(lambda: "done: " in Path(process.log).read_text(), process)
    assert process.communicate(timeout=10)[0].endswith("model\n") and process.returncode == 0


@pytest.mark.slow
def test_ctrl_c_ends_a_run_whose_tools_hang(toy_dir, tmp_path):
    """Past bug: Ctrl-C did nothing."""
    cfg = rl_config(tmp_path / "run.yaml", toy_dir, steps=1)
    process = Forked(partial(run_with_a_tool_that_hangs, cfg))
    wait_for(lambda: "sampling the first batch" in Path(process.log).read_text(), process)
    time.sleep(2)  # by now the tools hang
    helpers = children(process.pid)
    os.kill(process.pid, signal.SIGINT)
    assert process.communicate(timeout=10)[0].endswith(f"what was saved in {tmp_path}/run\n")
    assert not any(map(alive, helpers))


@pytest.mark.slow
@pytest.mark.parametrize("script, config_of", [("rl.py", rl_config), ("sft.py", sft_config)])
def test_ctrl_c_ends_a_run_whose_decoder_hangs(toy_dir, tmp_path, script, config_of):
    """Past bug: the run waited for the thread that waits for the decoder."""
    process = start(script, config_of(tmp_path / "run.yaml", toy_dir, steps=100_000))
    wait_for(lambda: children(process.pid) and (tmp_path / "run" / "metrics.jsonl").exists(), process)
    decoders = children(process.pid)
    for decoder in decoders:
        os.kill(decoder, signal.SIGSTOP)
    time.sleep(2)  # by now the run waits for them
    os.kill(process.pid, signal.SIGINT)
    assert "interrupted. The same command resumes" in process.communicate(timeout=10)[0]
    assert not any(map(alive, decoders))


def lose_an_interrupt() -> None:
    """Do what torch's writer of states does with Ctrl-C."""

    def write(cfg: SimpleNamespace) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        except KeyboardInterrupt:
            raise RuntimeError("unexpected pos 704 vs 598") from None

    run_script(write, SimpleNamespace(run="runs/x"))


def clean_up_slowly() -> None:
    def work(cfg: SimpleNamespace) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # torchrun's, after the scheduler's
            time.sleep(0.1)
            print("cleaned up", flush=True)

    run_script(work, SimpleNamespace(run="runs/x"))


def test_a_second_sigterm_does_not_end_the_cleanup():
    """Past bug: under torchrun, it left the weights in /dev/shm."""
    assert finish(Forked(clean_up_slowly), code=1).startswith("cleaned up\ninterrupted. ")


def test_ctrl_c_is_one_although_a_library_makes_another_error_of_it():
    """Past bug: the run ended with that error's traceback."""
    told = finish(Forked(lose_an_interrupt), code=1)
    assert told == "interrupted. The same command resumes from what was saved in runs/x\n"


@pytest.mark.slow
@pytest.mark.parametrize("script, config_of", [("rl.py", rl_config), ("sft.py", sft_config)])
def test_ctrl_c_ends_a_run_at_any_moment(toy_dir, tmp_path, script, config_of):
    """Try ten random moments of training and saving. One Ctrl-C in a hundred gets lost, because Python drops exceptions in
    destructors, so press it again."""
    rng = random.Random(0)
    for i in range(10):
        cfg = config_of(tmp_path / f"run{i}.yaml", toy_dir, steps=100_000, save_every=1)
        process = start(script, cfg)
        wait_for(lambda: (tmp_path / f"run{i}" / "metrics.jsonl").exists(), process)  # noqa: B023
        time.sleep(3 * rng.random())
        for _ in range(2):
            os.kill(process.pid, signal.SIGINT)
            process.join(10)
            if process.poll() is not None:
                break
        assert process.poll() is not None
        assert "interrupted. The same command resumes" in finish(process, code=1)


# ------------------------------------------------------------------------------------------------ a full disk


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_fills_up_costs_no_state(toy_dir, tmp_path, small_disk, ranks):
    run = small_disk / "run"
    cfg = sft_config(tmp_path / "run.yaml", toy_dir, run=str(run), steps=100_000, save_every=1)
    process = start("sft.py", cfg, ranks=ranks)
    wait_for(lambda: list((run / "state").glob("step-????????")), process)
    with open(small_disk / "film.mkv", "wb") as film, pytest.raises(OSError):
        while True:
            film.write(bytes(1 << 16))
            film.flush()
    finish(process, code=1)
    (small_disk / "film.mkv").unlink()
    done = max(int(path.name[5:]) for path in (run / "state").glob("step-????????"))
    told = finish(start("sft.py", cfg, f"steps={done + 1}", ranks=ranks))
    assert f"resumes after step {done} of {done + 1}" in told and (run / "model").is_dir()


# ------------------------------------------------------------------------------------------------ torchrun


@pytest.mark.parametrize("anew", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_mistake_on_all_ranks_is_an_error_line(toy_dir, tmp_path, anew):
    """The ranks are torchrun's (`anew`), which adds its own report of the failure, or forked ranks, which add nothing."""
    cfg = rl_config(tmp_path / "run.yaml", toy_dir, data={"sources": [{"path": "gone.parquet"}]})
    told = finish(start("rl.py", cfg, ranks=2, anew=anew), code=1)
    errors = re.findall("^error: .*", told, re.M)  # docs/troubleshooting.md tells users to read that line
    assert errors and all(error.startswith("error: gone.parquet: no such data file") for error in errors)
    assert not (tmp_path / "run").exists()


BESIDE_A_SERVER = """
import sys
import rl
from runtime import config, open_engine
from runtime.script import run_script
from scripts import fake_server

rl.GAP_LIMIT = 100  # the stand-in's log-probs are not a model's
rl.require_servers = lambda *_: None
open_engine.server_command = lambda checkpoint, renderer, port, extra: fake_server(renderer, port)
run_script(rl.main, config.load(rl.RLConfig, sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["rank 0", "rank 1", "the only server"])
def test_torchrun_restarts_a_run_of_which_a_process_is_killed(toy_dir, tmp_path, monkeypatch, dies):
    """Past bug: all attempts shared a store, so most restarts failed with "connection refused"."""
    monkeypatch.setenv("PYTHONPATH", f"{REPO}:{REPO}/tests")
    (tmp_path / "beside.py").write_text(BESIDE_A_SERVER)
    cfg = rl_config(
        tmp_path / "run.yaml", toy_dir, steps=6, save_every=1, rollout={"server_gpus": [7], "max_rounds": 1}
    )
    process = start(str(tmp_path / "beside.py"), cfg, ranks=2, anew=True, restarts=1)
    wait_for((tmp_path / "run" / "state" / "step-00000001").exists, process)
    first, second = sorted(
        children(process.pid), key=lambda pid: "\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_text()
    )
    helpers = children(first) + children(second)  # the server, and decoders
    [server] = [pid for pid in helpers if "fake_sglang" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill({"rank 0": first, "rank 1": second, "the only server": server}[dies], signal.SIGKILL)
    told = finish(process)
    assert re.search(r"/run: resumes after step \d of 6\n", told)
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(6))
    assert not any(map(alive, [first, second, *helpers]))
    assert not run_memory(tmp_path / "run").exists()


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
