"""Two nodes on one machine: network namespaces joined by a cable, each with its own tmpfs on /dev/shm. It needs root.

    PYTHONPATH=. python tests/two_nodes.py       # make test-nodes

SFT on two ranks a node and RL on one: three steps with a state each. The first loss and gradient are those of a single
process; a run whose nodes are killed goes on to the same bits; nodes whose `runs` are not shared are refused."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from conftest import SMALL
from scripts import ONE_THREAD, REPO, metrics, same_metrics, wait_for
from test_rl import write_config as rl_config
from test_sft import write_config as sft_config

import rl
from rewards import give_rewards
from runtime import config
from runtime.script import run_script
from study import toy

NODES = [f"minparavt-{os.getpid()}-{node}" for node in range(2)]
PREPARE = 'mount -t tmpfs tmpfs /dev/shm; test -z "$0" || mount -t tmpfs tmpfs "$0"; exec "$@"'


def train_rl(cfg: Path) -> None:
    """Run rl.py; a policy that has learned nothing earns nothing, so pay for its noise."""

    def give(groups, renderer, cfg, judge):
        give_rewards(groups, renderer, cfg, judge)
        for episode in [episode for group in groups for episode in group.episodes]:
            episode.rewards["R"] = float(sum(episode.main.ids) % 5)

    rl.give_rewards = give
    run_script(rl.main, config.load(rl.RLConfig, cfg))


def may_make_namespaces() -> bool:
    tried = subprocess.run(["unshare", "--mount", "--net", "true"], capture_output=True, text=True)
    if "not permitted" in tried.stderr:
        return False
    tried.check_returncode()
    return True


@contextlib.contextmanager
def cable() -> Iterator[None]:
    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for name in NODES:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", NODES[0], "type", "veth", "peer", "name", "cable", "netns", NODES[1])
        for node, name in enumerate(NODES):
            ip("-n", name, "address", "add", f"10.77.0.{node + 1}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in NODES:
            subprocess.run(["ip", "netns", "delete", name])


def start(command: list[str], log: Path, ranks: int, unshared: Path | None = None) -> list[subprocess.Popen]:
    """Start torchrun on both nodes; the second may have an empty folder of its own where the first has `unshared`."""
    processes = []
    for node, name in enumerate(NODES):
        own = str(unshared) if unshared and node == 1 else ""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc_per_node={ranks}"]
        torchrun += [f"--node_rank={node}", "--master_addr=10.77.0.1", "--master_port=29500", *command]
        inside = ["ip", "netns", "exec", name, "unshare", "--mount", "sh", "-ec", PREPARE, own, *torchrun]
        env = os.environ | ONE_THREAD | {"GLOO_SOCKET_IFNAME": "cable", "PYTHONPATH": f"{REPO}:{REPO}/tests"}
        with open(f"{log}-{node}.log", "ab") as file:
            processes.append(
                subprocess.Popen(inside, cwd=REPO, env=env, stdout=file, stderr=file, start_new_session=True)
            )
    return processes


def end(processes: list[subprocess.Popen]) -> None:
    """Kill both nodes: torchrun's workers are in sessions of their own, but nothing else is in a node's namespace."""
    for process, name in zip(processes, NODES):
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout
        for pid in pids.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        process.wait()


def finish(processes: list[subprocess.Popen], log: Path) -> None:
    try:
        for node, process in enumerate(processes):
            if process.wait(timeout=200):
                sys.exit(f"node {node} failed:\n{Path(f'{log}-{node}.log').read_text()}")
    finally:
        end(processes)


def check_runs(folder: Path, script: str, command: list[str], write, ranks: int, data: Path) -> None:
    """Compare one process, two nodes, and two nodes that are killed after their first state."""
    sizes = {"batch_rows": 8} if script == "sft" else {"batch_tasks": 4, "grpo": {"kl_coef": 0.1}}
    made = {}
    for name in ("one", "whole", "killed"):
        made[name] = write(folder / f"{script}-{name}.yaml", data, steps=3, save_every=1, **sizes)
    one, whole, killed = (folder / f"{script}-{name}" for name in made)

    env = os.environ | ONE_THREAD | {"PYTHONPATH": f"{REPO}:{REPO}/tests"}
    subprocess.run([sys.executable, *command, str(made["one"])], cwd=REPO, env=env, check=True)
    finish(start([*command, str(made["whole"])], whole, ranks), whole)
    first, expected = metrics(whole)[0], metrics(one)[0]
    for name in ("loss", "grad_norm"):
        assert abs(first[name] - expected[name]) < 1e-5 * max(1, abs(expected[name])), (name, first, expected)
    assert expected["grad_norm"] > 1e-3
    # Both nodes have written a part of the model and of the state.
    assert len(list((whole / "model").glob("*.safetensors"))) == 2 * ranks
    writers = {path.name.split("_")[2] for path in (whole / "state" / "step-00000003").glob("__*.distcp")}
    assert {int(rank) // ranks for rank in writers} == {0, 1}, writers

    processes = start([*command, str(made["killed"])], killed, ranks)
    try:
        wait_for((killed / "state" / "step-00000001").exists, processes[0], seconds=200)
    except AssertionError:
        sys.exit(f"node 0 left no first state:\n{Path(f'{killed}-0.log').read_text()}")
    finally:
        end(processes)
    finish(start([*command, str(made["killed"])], killed, ranks), killed)
    assert "resumes after step" in Path(f"{killed}-0.log").read_text()
    assert same_metrics(metrics(whole), metrics(killed)) and same_files(whole, killed)
    print(f"{script}: two nodes of {ranks} are one process, and go on after a kill to the same bits", flush=True)


def same_files(one: Path, other: Path) -> bool:
    files = [path.name for path in (one / "model").glob("*.safetensors")]
    return all((one / "model" / name).read_bytes() == (other / "model" / name).read_bytes() for name in files)


def check_refusal(folder: Path, data: Path) -> None:
    runs = folder / "runs"
    runs.mkdir()
    cfg = sft_config(folder / "refused.yaml", data, run=str(runs / "sft"), steps=3)
    processes = start(["sft.py", str(cfg)], folder / "refused", 1, unshared=runs)
    try:
        assert processes[0].wait(timeout=200) == 1
    finally:
        end(processes)
    told = (folder / "refused-0.log").read_text()
    assert (
        "error: run = " in told and "rank 1 sees another folder; run must be a folder that all nodes share" in told
    ), told
    assert not (runs / "sft" / "state").exists()
    print("a folder that is not shared is refused", flush=True)


def main() -> None:
    if not may_make_namespaces():
        print("skipped: this user may not make namespaces")
        return
    with tempfile.TemporaryDirectory() as name, cable():
        folder, data = Path(name), Path(name) / "toy"
        toy.build_toy(data, seed=0, sizes=SMALL)
        check_refusal(folder, data)
        check_runs(folder, "sft", ["sft.py"], sft_config, 2, data)
        check_runs(folder, "rl", ["tests/two_nodes.py"], rl_config, 1, data)


if __name__ == "__main__":
    if sys.argv[1:]:
        train_rl(Path(sys.argv[1]))
    else:
        main()
