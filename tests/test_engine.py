"""The engines: the one in this process against transformers itself, and SGLang's client against a small fake server."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import requests
import tiny_checkpoint
import torch
from tiny_checkpoint import MemoryVideos, noise
from transformers import Qwen3VLForConditionalGeneration

import data
from data import Task
from rollout import RolloutConfig, SubagentConfig, rollout
from runtime.checks import check_urls
from runtime.config import ConfigError
from runtime.contract import ContractError, patchify
from runtime.engine import EngineError, Sample
from runtime.inprocess import InProcess
from runtime.servers import SGLang

FAKE = Path(__file__).parent / "fake_sglang.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    # Large weights, so that an untrained model has opinions: greedy text varies, and rows can be told apart.
    return tiny_checkpoint.build(tmp_path_factory.mktemp("tiny"), initializer_range=0.1)


@pytest.fixture(scope="module")
def renderer(checkpoint):
    return tiny_checkpoint.renderer(checkpoint)


@pytest.fixture(scope="module")
def engine(checkpoint, renderer):
    engine = InProcess(checkpoint, renderer)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def model(checkpoint):
    return Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(renderer):
    """Prompts of different lengths: no image, one, several, of different sizes."""
    shown = [[], [noise(1)], [noise(3, seed=1)], [noise(2, seed=2, width=96), noise(1, seed=3, height=128)]]
    made = []
    for i, clips in enumerate(shown):
        messages = [{"role": "user", "content": [*clips, "What happens?" + " Say it." * i]}]
        made.append((renderer.render(messages, generate=True).ids, clips))
    return made


def at_once(engine, requests_: list[dict]) -> list[Sample]:
    """All requests from threads of their own, which the engine is told to expect."""
    engine.expect(len(requests_))
    with ThreadPoolExecutor(len(requests_)) as pool:

        def ask(request):
            try:
                return engine.generate(**request)
            finally:
                engine.expect(-1)

        return list(pool.map(ask, requests_))


def request(ids, frames, seed=1, temperature=1.0, max_new_tokens=24, **more) -> dict:
    more = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, **more}
    return {"ids": ids, "frames": frames, **more}


def inputs(model, ids, clips) -> dict:
    ids = torch.tensor([ids])
    pads = (ids == model.config.image_token_id).int()
    vision = dict(zip(("pixel_values", "image_grid_thw"), map(torch.from_numpy, patchify(clips)))) if clips else {}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": pads, **vision}


def plain_logprobs(model, renderer, ids, clips, temperature=1.0) -> torch.Tensor:
    """log softmax of the masked logits at every position of a whole sequence, by one plain forward: [L - 1]."""
    with torch.no_grad():
        logits = model(**inputs(model, ids, clips)).logits[0].float()
    logits[:, renderer.never_sampled] = -torch.inf
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)[:-1]
    return logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


# ---- in this process


def test_greedy_text_is_what_transformers_generates(engine, model, renderer, prompts):
    """In one ragged batch, with and without images, against `generate` row by row."""
    samples = at_once(engine, [request(ids, clips, temperature=0.0) for ids, clips in prompts])
    for (ids, clips), sample in zip(prompts, samples):
        banned = [[token] for token in renderer.never_sampled]
        given = inputs(model, ids, clips)
        theirs = model.generate(**given, max_new_tokens=24, do_sample=False, bad_words_ids=banned)[
            0, len(ids) :
        ].tolist()
        assert sample.ids == theirs and len(set(theirs)) > 3


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
def test_logprobs_are_those_of_a_plain_forward(engine, model, renderer, prompts, temperature):
    samples = at_once(
        engine, [request(ids, clips, temperature=temperature, seed=i) for i, (ids, clips) in enumerate(prompts)]
    )
    for (ids, clips), sample in zip(prompts, samples):
        expected = plain_logprobs(model, renderer, ids + sample.ids, clips, temperature)[len(ids) - 1 :]
        assert torch.allclose(torch.tensor(sample.logprobs), expected, atol=1e-5, rtol=0)


def test_a_shared_prompt_changes_nothing(engine, model, renderer, prompts):
    """Rollouts that part after a common prompt, in one batch: the same as each alone, read in one piece."""
    ids, clips = prompts[3]
    tails = [renderer.encode(text) for text in ("<think>\n", "Well, ", "\n\nIt is about a cat", "")]
    rows = [request(ids + tail, clips, seed=i, shared=len(ids)) for i, tail in enumerate(tails)]
    together = at_once(engine, rows)
    for row, sample in zip(rows, together):
        alone = engine.generate(**row | {"shared": 1})
        assert alone.ids == sample.ids
        assert np.allclose(alone.logprobs, sample.logprobs, atol=1e-5)
        expected = plain_logprobs(model, renderer, row["ids"] + sample.ids, clips)[len(row["ids"]) - 1 :]
        assert torch.allclose(torch.tensor(sample.logprobs), expected, atol=1e-5, rtol=0)


def test_frames_may_also_follow_the_shared_prompt(engine, model, renderer, prompts):
    ids, clips = prompts[1]
    delta = renderer.continuation([[noise(2, seed=9), "seen"]])
    row = request(ids + [renderer.end_of_turn] + delta.ids, [*clips, *delta.frames], shared=len(ids))
    sample = engine.generate(**row)
    expected = plain_logprobs(model, renderer, row["ids"] + sample.ids, row["frames"])[len(row["ids"]) - 1 :]
    assert torch.allclose(torch.tensor(sample.logprobs), expected, atol=1e-5, rtol=0)


def test_the_same_words_about_other_pixels_are_another_prompt(engine, prompts):
    (ids, _), blank = prompts[2], noise(3)
    seen, unseen = at_once(
        engine, [request(ids, [noise(3, seed=1)], shared=9), request(ids, [blank], seed=2, shared=9)]
    )
    alone = engine.generate(**request(ids, [blank], seed=2))
    assert unseen.ids == alone.ids and np.allclose(unseen.logprobs, alone.logprobs, atol=1e-5)
    assert seen.logprobs[:1] != unseen.logprobs[:1]


def test_tokens_depend_on_the_requests_own_seed_only(engine, prompts):
    ids, clips = prompts[2]
    mixed = at_once(engine, [request(i, c, seed=s) for s in (5, 6, 7) for i, c in prompts])
    alone = engine.generate(**request(ids, clips, seed=6))
    assert mixed[4 + 2].ids == alone.ids
    assert len({tuple(mixed[4 * j + 2].ids) for j in range(3)}) == 3


def test_sampling_follows_the_distribution(engine, model, renderer, prompts):
    """Chi-square of 2,000 first tokens against the model's own probabilities."""
    ids, clips = prompts[0]
    rows = [request(ids, clips, seed=s, temperature=0.5, max_new_tokens=1) for s in range(2000)]
    drawn = np.bincount([sample.ids[0] for sample in at_once(engine, rows)], minlength=len(renderer.tokenizer))
    with torch.no_grad():
        logits = model(**inputs(model, ids, clips)).logits[0, -1].double()
    logits[renderer.never_sampled] = -torch.inf
    expected = 2000 * (logits / 0.5).softmax(-1).numpy()
    common = expected >= 5
    cells = np.append(drawn[common], drawn[~common].sum()), np.append(expected[common], expected[~common].sum())
    chi2 = ((cells[0] - cells[1]) ** 2 / cells[1]).sum()
    assert chi2 < len(cells[0]) + 5 * (2 * len(cells[0])) ** 0.5
    assert drawn[renderer.never_sampled].sum() == 0


def test_banned_tokens_are_not_sampled_even_if_the_model_wants_nothing_else(checkpoint, renderer, prompts):
    engine = InProcess(checkpoint, renderer)
    head = engine.model.get_output_embeddings()
    plain, bias = head.forward, torch.zeros(head.out_features)
    bias[renderer.never_sampled] = 1000.0
    head.forward = lambda hidden: plain(hidden) + bias
    for temperature in (0.0, 1.0):
        sample = engine.generate(*prompts[1], max_new_tokens=20, temperature=temperature, seed=1)
        assert not set(sample.ids) & set(renderer.never_sampled) and np.isfinite(sample.logprobs).all()
    engine.close()


def test_a_turn_ends_with_its_stop_token_or_with_its_budget(engine, prompts):
    ids, clips = prompts[1]
    long = engine.generate(**request(ids, clips))
    assert (long.finish, len(long.ids), len(long.logprobs)) == ("length", 24, 24)
    stop = long.ids[5]
    short = engine.generate(**request(ids, clips, stop=(stop,)))
    assert short.finish == "stop" and short.ids == long.ids[: long.ids.index(stop) + 1]
    assert short.logprobs == pytest.approx(long.logprobs[: len(short.ids)], abs=1e-5)


def test_rows_that_end_early_leave_the_others_alone(engine, prompts):
    ids, clips = prompts[2]
    rows = [request(ids, clips, seed=i, max_new_tokens=1 + 3 * i) for i in range(12)]
    for row, sample in zip(rows, at_once(engine, rows)):
        assert len(sample.ids) == row["max_new_tokens"] and sample.ids == engine.generate(**row).ids


def test_large_work_is_cut_into_batches_of_bounded_size(checkpoint, renderer, prompts, monkeypatch):
    sizes, plain = [], InProcess._batches
    monkeypatch.setattr(InProcess, "_batches", lambda self, waiting: sizes.append(plain(self, waiting)) or sizes[-1])
    engine = InProcess(checkpoint, renderer, max_batch_tokens=400)
    rows = [request(ids, clips, seed=i) for i in range(5) for ids, clips in prompts]
    assert [s.ids for s in at_once(engine, rows)] == [engine.generate(**row).ids for row in rows]
    assert len(sizes[0]) > 1
    for batch in sizes[0]:
        assert len(batch) * max(len(r.ids) + r.max_new_tokens for r in batch) <= 400 or len(batch) == 1
    engine.close()


def test_new_weights_serve_every_later_sample_under_their_version(checkpoint, renderer, prompts, tmp_path):
    other = tiny_checkpoint.build(tmp_path / "other", seed=1, initializer_range=0.1)
    engine, fresh = InProcess(checkpoint, renderer), InProcess(other, renderer)
    row = request(*prompts[2], temperature=0.0)
    before = engine.generate(**row)
    engine.update_weights(other, 7)
    after = engine.generate(**row)
    assert (before.version, after.version, engine.version) == (0, 7, 7)
    assert after.ids == fresh.generate(**row).ids != before.ids
    with pytest.raises(EngineError, match="no snapshot of this model"):
        engine.update_weights(tmp_path, 8)
    engine.close(), fresh.close()


def test_a_closed_engine_lets_nobody_wait(checkpoint, renderer, prompts):
    engine = InProcess(checkpoint, renderer)
    engine.expect(10)  # who will never come
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.generate, *prompts[0], max_new_tokens=4, temperature=0.0, seed=1)
        time.sleep(0.1)
        assert not waiting.done()
        engine.close()
        with pytest.raises(EngineError, match="closed"):
            waiting.result(5)
    with pytest.raises(EngineError, match="closed"):
        engine.generate(*prompts[0], max_new_tokens=4, temperature=0.0, seed=1)


def test_a_run_can_be_repeated_bit_for_bit(checkpoint, renderer):
    """Real threads, real batches, calls of every kind: ids and log-probs are equal to the last bit."""
    call = '<tool_call>{"name": "crop_video", "arguments": {"start_time": %d, "end_time": %d}}</tool_call>'

    def play() -> list:
        engine = InProcess(checkpoint, renderer)
        sampled = engine.generate

        def generate(ids, frames, *, seed, **more):
            """Every third turn ends in calls, which an untrained model never writes by itself."""
            sample = sampled(ids, frames, seed=seed, **more)
            rng = random.Random(seed)
            if seed % 3 == 0 and more["temperature"]:
                said = renderer.encode("".join(call % (rng.randrange(60), rng.randrange(60)) for _ in range(3)))
                said.append(renderer.end_of_turn)
                return Sample(said, [0.0] * len(said), "stop", sample.version)
            time.sleep(rng.random() / 100)  # disorder among the threads
            return sample

        engine.generate = generate
        tasks = [Task(f"t{i}", "What happens?", ("/v.mp4",), "oe", "") for i in range(6)]
        cfg = RolloutConfig(
            max_new_tokens=12, max_turns=2, concurrency=10, temperature=1.0, subagents=SubagentConfig(max_new_tokens=8)
        )
        common = {"engine": engine, "renderer": renderer, "cfg": cfg, "progress": False}
        groups = rollout(tasks, [2, 4, 3, 2, 4, 3], 3, videos=MemoryVideos(), **common)
        engine.close()
        agents = [a for g in groups for e in g.episodes for a in e.trajectories]
        assert sum(len(e.calls) for g in groups for e in g.episodes) > 5
        return [(a.ids, a.logprobs) for a in agents]

    assert play() == play()


def test_blank_frames_change_what_the_model_thinks(engine, renderer):
    """Models that went blind after the first turn passed every other test (rllm#549, slime#1847)."""
    clip = noise(2, seed=4)
    blank = type(clip)(np.zeros_like(clip.pixels), clip.times)
    first = renderer.render(data.main_messages(Task("t", "?", ("v",), "oe", ""), [clip], True), generate=True).ids
    later = first + [renderer.end_of_turn] + renderer.continuation(["A cat."]).ids
    for ids in (first, later):
        seen, unseen = (engine.generate(**request(ids, [c], temperature=0.0, max_new_tokens=8)) for c in (clip, blank))
        assert abs(seen.logprobs[0] - unseen.logprobs[0]) > 1e-3


# ---- SGLang's client


def eventually(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.fixture
def serve(checkpoint, renderer):
    """serve(fault, servers=1, **options): a client that has started fake servers, each with this fault."""
    clients = []

    def command(port: int, fault: str) -> list[str]:
        numbers = (port, renderer.image_pad, renderer.contract.cell, renderer.end_of_turn)
        return [sys.executable, str(FAKE), *map(str, numbers), fault]

    def start(fault="", servers=1, **options) -> SGLang:
        faults = iter([fault] if isinstance(fault, str) else fault)
        options = {"patience": 0.05, "start_timeout": 20.0, **options}
        # A restarted server has the last fault of the list.
        last = [fault] if isinstance(fault, str) else [fault[-1]]
        launch = lambda port: command(port, next(faults, last[-1]))  # noqa: E731
        clients.append(SGLang(checkpoint, renderer, gpus=range(servers), launch=launch, **options))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


def test_the_client_returns_exact_ids_and_checks_the_echo(serve, prompts):
    client = serve()
    for ids, clips in prompts:
        sample = client.generate(**request(ids, clips))
        assert sample.finish == "stop" and len(sample.ids) == len(sample.logprobs) == 7
        assert (
            sample.ids
            == client.generate(**request(ids, clips)).ids
            != client.generate(**request(ids, clips, seed=2)).ids
        )


def test_drift_between_server_and_trainer_names_the_first_differing_position(serve, prompts, renderer):
    client, (ids, clips) = serve("drift"), prompts[2]
    first = ids.index(renderer.image_pad) + 3  # of four image tokens, the server has three
    with pytest.raises(ContractError, match=rf"differ from position {first} on"):
        client.generate(**request(ids, clips))


def test_a_server_that_does_not_echo_its_prompt_is_too_old(serve, prompts, monkeypatch):
    client, ask = serve(), SGLang._ask
    monkeypatch.setattr(client, "_ask", lambda *given: ask(client, *given) | {"prompt_token_ids": None})
    with pytest.raises(ContractError, match="since 0.5.13: update it"):
        client.generate(**request(*prompts[1]))


@pytest.mark.parametrize("fault", ["busy", "abort"])
def test_a_refused_or_aborted_request_is_sent_again_and_never_a_result(serve, prompts, fault):
    client = serve(fault)
    rows = [request(*prompts[i % 4], seed=i) for i in range(20)]
    assert [s.ids for s in at_once(client, rows)] == [s.ids for s in at_once(serve(), rows)]


def test_a_dead_server_costs_only_retries(serve, prompts, tmp_path):
    """It dies amid 40 requests; the new one loads the current weights before anything is sent again."""
    client = serve(["die_after=15", ""])
    client.update_weights(tmp_path, 3)
    rows = [request(*prompts[i % 4], seed=i) for i in range(40)]
    samples = at_once(client, rows)
    assert {s.version for s in samples} == {3} and client.restarts == 1
    healthy = serve()
    healthy.update_weights(tmp_path, 3)
    assert [s.ids for s in samples] == [s.ids for s in at_once(healthy, rows)]


def test_a_server_killed_amid_a_rollout_costs_no_episode(serve, renderer):
    client = serve(servers=2)
    tasks = [Task(f"t{i}", "What happens?", ("/v.mp4",), "oe", "") for i in range(30)]
    common = {"engine": client, "renderer": renderer, "videos": MemoryVideos(), "progress": False}
    killed = []

    def kill(episode):
        if not killed:
            killed.append(client._servers[0].process.pid)
            os.kill(killed[0], signal.SIGKILL)

    cfg = RolloutConfig(concurrency=8, max_new_tokens=20)
    groups = rollout(tasks, [4] * 30, 2, cfg=cfg, on_episode=kill, **common)
    assert killed and not any(e.error for g in groups for e in g.episodes)
    eventually(lambda: client.restarts == 1)


def test_requests_are_spread_over_servers(serve, prompts):
    client = serve(servers=2)
    at_once(client, [request(*prompts[0], seed=i) for i in range(32)])
    served = [requests.get(url + "/model_info").json()["served"] for url in client.urls]
    assert sum(served) == 32 and min(served) >= 12


def test_every_sample_carries_the_weights_that_were_pushed_last(serve, prompts, tmp_path):
    client = serve(servers=2)
    assert client.generate(**request(*prompts[0])).version == 0
    for version in (1, 2):
        client.update_weights(tmp_path, version)
        assert {s.version for s in at_once(client, [request(*prompts[0], seed=i) for i in range(8)])} == {version}
    loads = [requests.get(url + "/model_info").json()["loads"] for url in client.urls]
    assert loads == [2, 2]


def test_stale_weights_are_an_error_and_not_a_sample(serve, prompts, tmp_path):
    client = serve("stale", attempts=2)
    client.update_weights(tmp_path, 5)
    with pytest.raises(EngineError, match="sampled by weights 'default', expected 5"):
        client.generate(**request(*prompts[0]))
    with pytest.raises(EngineError, match="update_weights_from_disk refuses .*no such folder"):
        client.update_weights(tmp_path / "nowhere", 6)


def test_a_server_of_somebody_else_is_awaited_and_brought_up_to_date(serve, renderer, checkpoint, prompts, tmp_path):
    """With `urls`, a server that its owner restarts loads our snapshot again."""
    owner = serve()
    client = SGLang(checkpoint, renderer, urls=owner.urls, patience=0.05)
    client.update_weights(tmp_path, 4)
    port = int(owner.urls[0].rpartition(":")[2])
    os.kill(owner._servers[0].process.pid, signal.SIGKILL)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, **request(*prompts[1]))
        time.sleep(0.3)
        numbers = map(str, (port, renderer.image_pad, renderer.contract.cell, renderer.end_of_turn))
        again = subprocess.Popen([sys.executable, str(FAKE), *numbers])
        try:
            assert waiting.result(20).version == 4
        finally:
            again.kill()
            again.wait()


def test_a_server_inherits_nothing_of_torchrun_or_of_the_trainers_allocator(serve, monkeypatch):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS")
    names += ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    for name in names:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    client = serve(servers=2)
    for url, device in zip(client.urls, "47"):
        seen = requests.get(url + "/model_info").json()["environment"]
        assert seen["CUDA_VISIBLE_DEVICES"] == device and not set(names) & set(seen)


def test_a_proxy_of_the_environment_is_not_asked_for_a_server_on_this_machine(serve, prompts, monkeypatch):
    """Every request went to the proxy, and so did the one that SGLang sends itself before it serves."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    client = serve()
    assert client.generate(**request(*prompts[1])).finish == "stop"
    check_urls(client.urls, patience=0.0)
    straight = requests.Session()
    straight.trust_env = False
    environment = straight.get(client.urls[0] + "/model_info").json()["environment"]
    assert environment["no_proxy"] == environment["NO_PROXY"] == "127.0.0.1"


def test_only_a_server_of_models_passes_for_one(tmp_path):
    """Any web server did, such as a proxy's page of errors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    web = subprocess.Popen([sys.executable, "-m", "http.server", str(port)], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: not socket.socket().connect_ex(("127.0.0.1", port)))
        with pytest.raises(ConfigError, match=f"no server answers at {url}"):
            check_urls([url], patience=0.0)
    finally:
        web.kill()
        web.wait()


def test_servers_of_ours_end_with_the_client(serve):
    client = serve(servers=2)
    processes = [server.process.pid for server in client._servers]
    for _ in range(2):
        client.close()
        assert not any(map(alive, processes))


def test_servers_of_ours_end_with_a_process_that_is_killed(tmp_path):
    """torchrun kills ranks with SIGKILL: a server lived on and kept its GPU. Its own children end, too."""
    script = f"""
import sys, time
sys.path.insert(0, {str(FAKE.parents[1])!r})
from runtime.servers import SGLang
fake = "sleep 300 & echo $! $$ > {tmp_path}/pids; exec {sys.executable} {FAKE} $0 1 32 2"
SGLang("", None, gpus=(0,), launch=lambda port: ["sh", "-c", fake, str(port)])
print("up", flush=True)
time.sleep(300)
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "up\n"
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(map(alive, pids))
    finally:
        owner.kill()
        owner.wait()
    eventually(lambda: not any(map(alive, pids)), 5.0)


def test_a_server_that_dies_unasked_is_restarted_with_the_current_weights(serve, tmp_path):
    """It was noticed only when a request of the same rank was lost; the others' waited."""
    client = serve()
    client.update_weights(tmp_path, 3)
    old = client._servers[0].process.pid
    os.kill(old, signal.SIGKILL)
    eventually(lambda: client.restarts == 1 and client._servers[0].healthy)
    assert not alive(old)
    state = requests.get(client.urls[0] + "/model_info").json()
    assert (state["version"], state["loads"], state["served"]) == ("3", 1, 0)


def test_a_server_that_never_comes_up_is_an_error_that_says_so(serve):
    with pytest.raises(EngineError, match="no answer for 1 s"):
        serve("slow_start=30", start_timeout=1.0)


def test_a_server_that_cannot_start_is_given_up_with_the_end_of_its_log(serve):
    """It was started again and again until start_timeout."""
    with pytest.raises(EngineError, match="died twice") as error:
        serve("crash=30", start_timeout=1000.0)
    assert [line for line in str(error.value).splitlines() if "line" in line] == [f"line {i}" for i in range(10, 30)]
    first = serve(["", "crash=30"])
    os.kill(first._servers[0].process.pid, signal.SIGKILL)
    eventually(lambda: first._servers[0].failed)
    assert first.restarts == 2
    for use in (lambda: first.generate([1], [], max_new_tokens=9, temperature=1.0, seed=1), lambda: first.update_weights("", 1)):  # fmt: skip
        with pytest.raises(EngineError, match="died twice"):
            use()


def test_one_deadline_covers_all_attempts_of_a_request(serve, prompts, tmp_path):
    for fault in ("stale", "slow=60"):
        client = serve(fault, attempts=10**6, timeout=1.0)
        client.update_weights(tmp_path, 5)
        started = time.monotonic()
        with pytest.raises(EngineError, match="not served within 1 s, last: .*(weights 'default'|timed out)"):
            client.generate(**request(*prompts[0]))
        assert 0.9 < time.monotonic() - started < 5


def test_a_closed_client_lets_nobody_wait(serve, renderer, prompts):
    """Neither for an answer, its own server's or another's, nor for a server that is away."""
    owner = serve("slow=60")
    client, idle = (SGLang("", renderer, urls=owner.urls) for _ in range(2))
    idle._servers[0].url = "http://127.0.0.1:9"  # where nobody listens
    for engine in (idle, client, owner):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(engine.generate, **request(*prompts[0]))
            time.sleep(0.5)
            assert not waiting.done()
            engine.close()
            with pytest.raises(EngineError, match="closed"):
                waiting.result(3)
        with pytest.raises(EngineError, match="closed"):
            engine.generate(**request(*prompts[0]))
        if engine is not owner:
            assert requests.get(owner.urls[0] + "/model_info").ok


def test_a_snapshot_that_is_just_being_replaced_is_loaded_at_the_second_attempt(serve, tmp_path):
    client = serve("swap")
    client.update_weights(tmp_path, 1)
    assert requests.get(client.urls[0] + "/model_info").json()["loads"] == 2


def test_a_clip_is_encoded_once_for_requests_at_once_and_later(serve, prompts, monkeypatch):
    """The rollouts of a group begin together: each found nothing and encoded the same overview."""
    client, encoded = serve(), []
    from PIL import Image

    plain = Image.fromarray
    monkeypatch.setattr(Image, "fromarray", lambda pixels: encoded.append(1) or time.sleep(0.02) or plain(pixels))
    for _ in range(2):
        at_once(client, [request(*prompts[2], seed=seed) for seed in range(8)])
        assert len(encoded) == 3


def test_weights_of_another_run_are_replaced_even_if_they_bear_the_same_number(serve, prompts, renderer, tmp_path):
    """A new run on a server of an old one began with the old run's weights."""
    first = serve()
    first.update_weights(tmp_path, 3)
    second = SGLang("", renderer, urls=first.urls)
    for loads, client in ((1, first), (2, second), (2, second)):
        client.update_weights(tmp_path, 3)
        assert requests.get(first.urls[0] + "/model_info").json()["loads"] == loads
    other_rank = SGLang("", renderer, urls=first.urls)
    other_rank.update_weights(tmp_path, 3, push=False)
    other_rank.generate(**request(*prompts[0]))
    assert requests.get(first.urls[0] + "/model_info").json()["loads"] == 2
