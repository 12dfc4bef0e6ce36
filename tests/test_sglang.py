"""A real SGLang server on a CPU: that its tokens, log-probs, images and weights are those of the trainer.

    bash tests/sglang_cpu/install.sh .venv-sglang && python -m pytest -m sglang

SGLANG_VENV names another environment."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from scripts import metrics, rl_config
from short_runs import pay_by_chance
from tiny import CONTRACT_14, as_published, at_once, check_logprobs, prompts_of, request

import rl
from episode import Prompt
from runtime import config
from runtime.checkpoints import export, load_policy
from runtime.engine import EngineConfig, EngineError
from runtime.open_engine import server_command, server_flags, start_servers
from runtime.policy import PolicyConfig
from runtime.servers import SGLang
from runtime.visual import ContractError

HERE = Path(__file__).resolve().parent
VENV = Path(os.environ.get("SGLANG_VENV", HERE.parent / ".venv-sglang"))
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not (VENV / "bin/python").exists(), reason=f"no server in {VENV}: tests/sglang_cpu/install.sh"),
]


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("other"), seed=1, initializer_range=0.1)


def serve(checkpoint, renderer) -> SGLang:
    cfg = EngineConfig(server_gpus=(0,), max_context=4096)

    def launch(port: int) -> list[str]:
        # A CPU takes all flags but those that need a GPU, which are not given there.
        command = server_command(checkpoint, renderer, port, server_flags(cfg))
        flags = command[command.index("--port") + 2 :]
        return ["bash", str(HERE / "sglang_cpu/serve.sh"), str(VENV), str(checkpoint), str(port), *flags]

    client = SGLang(start_servers(cfg, None, launch), renderer)
    client.wait_until_ready()
    return client


@pytest.fixture(scope="module")
def client(checkpoint, renderer):
    client = serve(checkpoint, renderer)
    yield client
    client.close()


@pytest.fixture(scope="module")
def prompts(renderer):
    return prompts_of(renderer)


def check_rows(client, model, renderer, prompts, temperatures=(1.0,)) -> None:
    rows = [request(prompt, seed=i, temperature=tau) for i, prompt in enumerate(prompts) for tau in temperatures]
    for row, sample in zip(rows, at_once(client, rows)):
        check_logprobs(model, renderer, row, sample, tolerance=1e-4)
        assert row["temperature"] or len(set(sample.ids)) > 3


def test_logprobs_are_the_trainers(client, model, renderer, prompts):
    check_rows(client, model, renderer, prompts, temperatures=(0.0, 0.7, 1.0))


def test_a_turn_ends_with_its_stop_token_and_returns_it(client, prompts):
    long = client.generate(**request(prompts[1], temperature=0.0))
    stop = long.ids[5]
    short = client.generate(**request(prompts[1], temperature=0.0, stop=(stop,)))
    assert (short.finish, short.ids) == ("stop", long.ids[: long.ids.index(stop) + 1])
    assert (long.finish, len(long.ids)) == ("length", 24)


def test_drift_and_requests_that_the_server_refuses_are_errors_at_once(client, renderer, prompts):
    short = list(prompts[1].ids)
    short.remove(renderer.image_pad)
    with pytest.raises(ContractError, match="differ from position"):
        client.generate(**request(Prompt(short, prompts[1].clips)))
    with pytest.raises(EngineError, match="refuses"):
        client.generate(**request(prompts[1], max_new_tokens=10**6))


def test_new_weights_serve_the_next_sample_pixels_included(client, model, renderer, prompts, checkpoint, other):
    """The vision tower changes too: features of the old one must not be served from a cache."""
    there = tiny.plain(other)
    client.update_weights(other, 1)
    check_rows(client, there, renderer, prompts)
    assert client.generate(**request(prompts[2])).version == 1
    client.update_weights(checkpoint, 2)
    check_rows(client, model, renderer, prompts)


def test_training_samples_one_step_ahead_on_a_server_of_its_own(toy_dir, toy_renderer, tmp_path, monkeypatch):
    monkeypatch.setattr(rl, "assign_rewards", pay_by_chance)
    monkeypatch.setattr("rl.GAP_LIMIT", 1e-4)
    client = serve(toy_dir / "model", toy_renderer)
    sampling = {"max_rounds": 1, "max_new_tokens": 24, "temperature": 1.0, "urls": client.urls}
    changes = {"optim": {"lr": 2e-5}, "batch_tasks": 8, "staleness": 1, "rollout": sampling}
    try:  # its first batch is checked against GAP_LIMIT
        rl.main(config.load(rl.RLConfig, rl_config(tmp_path / "c.yaml", toy_dir, **changes)))
    finally:
        client.close()
    lines = metrics(tmp_path / "c")
    assert [line["staleness"] for line in lines] == [0, 1, 1, 1, 1, 1]
    assert not any(line["failed_rate"] for line in lines)
    assert lines[0]["logprob_gap"] < 1e-4
    assert all(1e-3 < line["logprob_gap"] < 0.1 for line in lines[1:])  # one small update between the two policies


def test_an_exported_qwen25_vl_serves_what_plain_transformers_says(tmp_path):
    """SGLang skips weights whose names it does not know, so an export or a snapshot under other names would go unnoticed."""
    stock, other = tmp_path / "stock", tmp_path / "other"
    for path, seed in ((stock, 0), (other, 1)):
        tiny.build(path, seed, "qwen2_5_vl", initializer_range=0.1)
    policy = load_policy(PolicyConfig(str(as_published(stock, tmp_path / "published"))))
    contract = replace(
        CONTRACT_14, frame_pixels=4 * 28 * 28
    )  # a server enlarges smaller images; prompts_of shows four tokens
    export(policy, tmp_path / "out", contract)
    renderer = tiny.renderer(tmp_path / "out")
    rows = prompts_of(renderer)
    client = serve(tmp_path / "out", renderer)
    try:
        check_rows(client, tiny.plain(stock), renderer, rows, temperatures=(0.0, 1.0))
        client.update_weights(other, 1)
        check_rows(client, tiny.plain(other), renderer, rows)
    finally:
        client.close()
