"""Two nodes on one machine: network namespaces joined by a cable, each with its own tmpfs on /dev/shm. It needs root.

    PYTHONPATH=. python tests/two_nodes.py       # make test-nodes

SFT and RL, started as docs/node.md says. The first loss and gradient are those of a single process. A run of which a rank is
killed is restarted by torchrun, and goes on to the same bits."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from conftest import SMALL
from scripts import ONE_THREAD, REPO, children, figures, metrics, rl_config, sft_config, wait_for

from study import toy

NODES = [f"minparavt-{os.getpid()}-{node}" for node in range(2)]
ENV = os.environ | ONE_THREAD | {"GLOO_SOCKET_IFNAME": "cable", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def start(script: str, cfg: Path) -> list[subprocess.Popen]:
    """Start torchrun on both nodes, with two ranks each."""
    processes = []
    for node, name in enumerate(NODES):
        shm = 'mount -t tmpfs tmpfs /dev/shm; exec "$@"'
        inside = ["ip", "netns", "exec", name, "unshare", "--mount", "sh", "-ec", shm, "sh"]
        torchrun = "-m torch.distributed.run --nnodes=2 --nproc_per_node=2 --max-restarts=1 --rdzv_backend=c10d "
        torchrun += f"--rdzv_endpoint=10.77.0.1:29500 --local_addr=10.77.0.{node + 1} --rdzv_conf=is_host={1 - node}"
        command = [*inside, sys.executable, *torchrun.split(), script, str(cfg)]
        with open(f"{cfg}-{node}.log", "ab") as log:
            processes.append(subprocess.Popen(command, cwd=REPO, env=ENV, stdout=log, stderr=log))
    return processes


def finish(processes: list[subprocess.Popen], cfg: Path) -> str:
    """Wait for both nodes, and return what they have printed."""
    status = [process.wait(timeout=300) for process in processes]
    told = "".join(Path(f"{cfg}-{node}.log").read_text() for node in range(2))
    if any(status):
        sys.exit(told)
    return told


def check_runs(folder: Path, script: str, write, **sizes) -> None:
    """Compare one process, two nodes, and two nodes of which a rank is killed after the first state."""
    more = {"steps": 3, "save_every": 1, **sizes}
    cfgs = [write(folder / f"{script}-{name}.yaml", folder / "toy", **more) for name in ("one", "whole", "killed")]
    one, whole, killed = (cfg.with_suffix("") for cfg in cfgs)
    subprocess.run([sys.executable, script, str(cfgs[0])], cwd=REPO, env=ENV, check=True)
    finish(start(script, cfgs[1]), cfgs[1])

    processes = start(script, cfgs[2])
    wait_for((killed / "state" / "step-00000001").exists, processes[0], seconds=200)
    os.kill(children(processes[1].pid)[0], signal.SIGKILL)
    assert "resumes after step" in finish(processes, cfgs[2])

    expected, first = metrics(one)[0], metrics(whole)[0]
    for name in ("loss", "grad_norm"):
        assert abs(first[name] - expected[name]) < 1e-5 * max(1, abs(expected[name])), (name, first, expected)
    assert figures(metrics(whole)) == figures(metrics(killed))
    files = list((whole / "model").glob("*.safetensors"))
    assert len(files) == 4
    assert all(file.read_bytes() == (killed / "model" / file.name).read_bytes() for file in files)
    print(f"{script}: two nodes are one process, and go on after a kill to the same bits", flush=True)


def main() -> None:
    if subprocess.run(["unshare", "--mount", "--net", "true"]).returncode:
        print("skipped: this user may not make namespaces")
        return
    with contextlib.ExitStack() as after, tempfile.TemporaryDirectory() as name:
        for node in NODES:
            ip("netns", "add", node)
            after.callback(ip, "netns", "delete", node)
        ip("link", "add", "cable", "netns", NODES[0], "type", "veth", "peer", "name", "cable", "netns", NODES[1])
        for node, address in zip(NODES, ("10.77.0.1/24", "10.77.0.2/24")):
            ip("-n", node, "address", "add", address, "dev", "cable")
            ip("-n", node, "link", "set", "cable", "up")
            ip("-n", node, "link", "set", "lo", "up")
        toy.build_toy(Path(name, "toy"), seed=0, sizes=SMALL)
        check_runs(Path(name), "sft.py", sft_config, batch_rows=8)
        check_runs(Path(name), "rl.py", rl_config, batch_tasks=4, grpo={"kl_coef": 0.1})


if __name__ == "__main__":
    main()
