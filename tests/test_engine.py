"""Both engines: the in-process engine against plain transformers, and SGLang's client against a small fake server."""

import contextlib
import dataclasses
import gc
import itertools
import json
import os
import signal
import socket
import time
import types
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import requests
import tiny
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from scripts import alive, fake_server, wait_for
from tiny import at_once, check_logprobs, noise, prompts_of, question, request

from episode import NO_PROMPT, Prompt
from rollout import RolloutConfig
from runtime.config import ConfigError
from runtime.engine import EngineConfig, EngineError, EngineLost
from runtime.inprocess import InProcess, Request, _Batch, cut_into_batches, sample_tokens
from runtime.open_engine import for_this_machine, open_engine, require_servers, start_servers
from runtime.policy import matmul_fp32
from runtime.processes import MEMORY
from runtime.servers import MAX_FAILURES, Failure, Server, SGLang, kill
from runtime.video import Clip
from runtime.visual import ContractError

both_families = pytest.mark.parametrize("checkpoint", tiny.CELL, indirect=True)


@pytest.fixture(scope="module")
def engine(checkpoint, renderer):
    with contextlib.closing(InProcess(checkpoint, renderer)) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(renderer):
    return prompts_of(renderer)


def assert_close_frees_who_waits(engine, row: dict) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.generate, **row)
        time.sleep(0.2)
        assert not waiting.done()
        engine.close()
        with pytest.raises((EngineError, EngineLost), match="closed"):
            waiting.result(3)
    with pytest.raises((EngineError, EngineLost), match="closed"):
        engine.generate(**row)


# ---- in this process


@both_families
def test_greedy_text_is_what_transformers_generates(engine, model, renderer, prompts):
    """Compare one ragged batch, with and without images, with `generate` row by row."""
    samples = at_once(engine, [request(prompt, temperature=0.0, max_new_tokens=12) for prompt in prompts])
    banned = [[token] for token in renderer.never_sampled]
    for prompt, sample in zip(prompts, samples):
        asked = tiny.plain_inputs(model, prompt.ids, prompt.clips)
        theirs = model.generate(**asked, max_new_tokens=12, do_sample=False, bad_words_ids=banned)
        assert sample.ids == theirs[0, len(prompt.ids) :].tolist() and len(set(sample.ids)) > 3


@both_families
def test_logprobs_are_those_of_a_plain_forward(engine, model, renderer, prompts):
    rows = [request(prompt, temperature=tau, seed=i) for i, prompt in enumerate(prompts) for tau in (0.0, 0.7, 1.5)]
    for row, sample in zip(rows, at_once(engine, rows)):
        check_logprobs(model, renderer, row, sample, tolerance=1e-4)


@pytest.fixture
def rows(renderer, prompts) -> list[dict]:
    """Requests that hold the same prompt, also with frames after it, and the same words about other pixels. Greedy and random ones,
    which end at different times."""
    rows = []
    for prompt in prompts[::3]:
        tails = [renderer.encode(text) for text in ("<think>\n", "Well, ", "\n\nIt is about a cat", "")]
        rows += [request(prompt, tail, seed=i, temperature=0.7 * i) for i, tail in enumerate(tails)]
        delta = renderer.continuation([[noise(2, seed=9), "seen"]])
        rows.append(request(prompt, [renderer.end_of_turn, *delta.ids], delta.clips))
    ids = prompts[2].ids
    opening = Prompt(ids[:9], [])
    for clip in (noise(3, seed=1), noise(3)):
        rows += [request(opening, ids[9:], [clip], seed=2), request(Prompt(ids, [clip]), seed=2)]
    return [row | {"max_new_tokens": 3 + 2 * i} for i, row in enumerate(rows)]


def test_a_sample_depends_on_its_own_prompt_and_seed_only(engine, model, renderer, rows):
    """Rollouts that share a prompt in one batch equal each rollout alone, and those with prompts that are only equal."""
    equal = at_once(engine, [row | {"prompt": dataclasses.replace(row["prompt"])} for row in rows])
    shared = at_once(engine, rows)
    for row, sample, apart in zip(rows, shared, equal):
        for same in (engine.generate(**row), apart):
            assert same.ids == sample.ids
            assert np.allclose(same.logprobs, sample.logprobs, atol=1e-5)
        check_logprobs(model, renderer, row, sample)
    assert shared[-1].logprobs[:1] != shared[-3].logprobs[:1]
    assert engine.generate(**rows[-1] | {"seed": 99}).ids != shared[-1].ids


@pytest.mark.parametrize("count, vocabulary", [(20_000, 100), (24, 151_936)])
def test_a_draw_inverts_the_distribution(count, vocabulary):
    """Past bug: with fp32 sums, the largest random number drew a token after the last one, which can be banned."""
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(count, vocabulary, generator=draws) * torch.linspace(0.1, 9, count)[:, None]  # flat and peaked
    logits[:, [0, vocabulary // 2, vocabulary - 1]] = -torch.inf
    temperatures = torch.tensor([0.0, 0.7, 1.0, 1.5]).repeat(count)[1 : count + 1]
    uniforms = torch.rand(count, generator=draws).double()  # 24 bits, as in the engine
    uniforms[: count // 2] = 1 - 2**-24
    uniforms[0] = 0.0
    greedy = temperatures == 0
    expected = (logits.double() / torch.where(greedy, 1.0, temperatures)[:, None]).log_softmax(-1)
    tokens, logprobs = sample_tokens(logits, temperatures, uniforms)
    chosen = tokens[:, None]
    assert (expected.gather(1, chosen)[:, 0] - logprobs).abs().max() < 1e-5
    assert (tokens[greedy] == logits.argmax(1)[greedy]).all()
    until = expected.exp().cumsum(1)
    above = uniforms <= until.gather(1, chosen)[:, 0] + 1e-6
    below = uniforms >= until.gather(1, chosen - 1)[:, 0] - 1e-6
    assert (greedy | above & below).all() and logprobs.isfinite().all()


def test_banned_tokens_are_not_sampled_even_if_nothing_else_is_likely(engine, renderer, prompts, monkeypatch):
    def biased(hidden, head):
        return matmul_fp32(hidden, head).index_fill(1, torch.tensor(renderer.never_sampled), 1000.0)

    monkeypatch.setattr("runtime.inprocess.matmul_fp32", biased)
    for temperature in (0.0, 1.0):
        sample = engine.generate(**request(prompts[1], temperature=temperature))
        assert not set(sample.ids) & set(renderer.never_sampled) and np.isfinite(sample.logprobs).all()


def test_a_turn_ends_with_its_stop_token_or_with_its_budget(engine, prompts, monkeypatch):
    long = engine.generate(**request(prompts[1], seed=2))
    assert (long.finish, len(long.ids), len(long.logprobs)) == ("length", 24, 24)
    stop = long.ids[5]
    short = engine.generate(**request(prompts[1], seed=2, stop=(stop,)))
    monkeypatch.setattr(engine.renderer, "ends_of_turn", (1, stop))
    assert engine.generate(**request(prompts[1], seed=2)) == short  # the checkpoint's own end tokens always stop
    assert short.finish == "stop" and short.ids == long.ids[: long.ids.index(stop) + 1]
    assert short.logprobs == pytest.approx(long.logprobs[: len(short.ids)], abs=1e-5)


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(1, 300)), max_size=64), st.sampled_from([400, 8000]))
@example([(100, 10)] + [(70, 60)] * 8, 400)  # a row that can sample much widens all rows, even longer ones
def test_batches_have_bounded_size_and_padding(sizes, max_tokens):
    requests = [Request(NO_PROMPT, [0] * length, [], new, 1.0, 0, frozenset()) for length, new in sizes]
    batches = cut_into_batches(requests, max_tokens)
    assert sorted(map(id, sum(batches, []))) == sorted(map(id, requests))
    for batch in batches:
        longest = max(map(len, batch))
        keys = len(batch) * (longest + max(r.max_new_tokens for r in batch))
        padding = sum(longest - len(r) for r in batch)
        assert len(batch) == 1 or (keys <= max_tokens and padding <= max_tokens / 4)


@both_families
def test_new_weights_serve_every_later_sample_under_their_version(checkpoint, model, renderer, prompts, tmp_path):
    other = tiny.build(tmp_path / "other", 1, model.config.model_type, initializer_range=0.1)
    engine, fresh = InProcess(checkpoint, renderer), InProcess(other, renderer)
    row = request(prompts[2], temperature=0.0)
    before = engine.generate(**row)
    engine.update_weights(other, 7)
    after = engine.generate(**row)
    assert (before.version, after.version, engine.version) == (0, 7, 7)
    assert after.ids == fresh.generate(**row).ids != before.ids
    engine.close(), fresh.close()


def test_a_closed_engine_lets_nobody_wait(checkpoint, renderer, prompts):
    engine = InProcess(checkpoint, renderer)
    engine.announce(10)  # callers that never come
    assert_close_frees_who_waits(engine, request(prompts[0]))


# ---- in this process, with reference implementations of a GPU's kernels


def test_a_gpus_kernel_samples_what_a_cpus_sdpa_samples(engine, checkpoint, renderer, rows, monkeypatch):
    expected = at_once(engine, rows)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", tiny.torch_varlen)
    monkeypatch.delattr("torch.nn.functional.scaled_dot_product_attention")
    other = InProcess(checkpoint, renderer)
    other.kernel = "varlen"
    samples = at_once(other, rows)
    other.close()
    for sample, wanted in zip(samples, expected, strict=True):
        assert (sample.ids, sample.finish) == (wanted.ids, wanted.finish)
        assert np.allclose(sample.logprobs, wanted.logprobs, atol=1e-5, rtol=0)


def test_each_prompt_is_read_once_without_padding_and_short_clips_up_to_the_frames_of_an_overview(
    checkpoint, renderer, prompts
):
    """An overview has 4 frames. (The tests above compare the samples with those of each request alone.)"""
    engine, read, frames = InProcess(checkpoint, renderer), [], []
    text, tower = engine.model.model.language_model, engine.model.model.visual
    text.register_forward_pre_hook(lambda _, __, given: read.append(given["inputs_embeds"].shape[:2]), with_kwargs=True)
    tower.register_forward_pre_hook(lambda _, __, given: frames.append(given["grid_thw"][:, 0].sum()), with_kwargs=True)
    tails = [renderer.encode(text) for text in ("<think>\n", "Well, ", "\n\nIt is about a cat")]
    rows = [request(prompts[3], tail, max_new_tokens=3) for tail in tails]  # clips of 2 and 1
    for i, count in enumerate((1, 4, 3)):
        clip = noise(count, seed=i, width=64 + 32 * (i % 2))
        rows.append(request(Prompt(question(renderer, [clip], "What?"), [clip]), max_new_tokens=3))
    at_once(engine, rows)
    engine.close()
    prompts_read = [*prompts[3].ids, *sum(tails, []), *sum((row["prompt"].ids for row in rows[3:]), [])]
    assert read == [(1, len(prompts_read)), (6, 1), (6, 1)]
    assert sorted(frames) == [3, 4, 4]


def test_what_is_read_fits_torchs_own_kernel(checkpoint, renderer, prompts, monkeypatch):
    """On the meta device, torch checks signature, shapes, dtypes and devices without computing."""
    engine, chosen = InProcess(checkpoint, renderer, dtype="bfloat16"), []
    engine.model.to("meta")
    engine.kernel = "varlen"

    def choose(batch, hidden, rows):
        chosen.append((hidden.device.type, hidden.dtype, len(hidden)))
        return [30] * len(rows), [-1.0] * len(rows)

    monkeypatch.setattr(_Batch, "_next_tokens", choose)
    samples = at_once(engine, [request(prompts[0], max_new_tokens=length) for length in (1, 3)])
    engine.close()
    assert [sample.ids for sample in samples] == [[30], [30] * 3]
    assert chosen == [("meta", torch.bfloat16, rows) for rows in (2, 1, 1)]


# ---- SGLang's client


def state_of(url: str) -> dict:
    return requests.get(url + "/model_info").json()


def connect(renderer, urls) -> SGLang:
    """Return a client of servers that run already."""
    return SGLang([Server(url) for url in urls], renderer)


@pytest.fixture
def serve(renderer):
    """serve("fault of the first", "fault of the second", **options) -> a client that has started fake servers."""
    clients = []

    def start(*faults: str, start_timeout=20.0, tensor_parallel=1, launch=None) -> SGLang:
        left = iter(faults or [""])
        gpus = tuple(range(len(faults or [""]) * tensor_parallel))
        cfg = EngineConfig(server_gpus=gpus, tensor_parallel=tensor_parallel)
        servers = start_servers(cfg, None, launch or (lambda port: fake_server(renderer, port, next(left))))
        clients.append(SGLang(servers, renderer))
        clients[-1].start_timeout = start_timeout
        clients[-1].wait_until_ready()
        return clients[-1]

    yield start
    for client in clients:
        client.close()


def show(client: SGLang, renderer, clip: Clip) -> list[Path]:
    """Send a request about a clip. Return the files that the server is given."""
    client.generate(**request(Prompt(question(renderer, [clip], "What?"), [clip]), max_new_tokens=2))
    return [Path(file.removeprefix("file://")) for file in state_of(client.urls[0])["shown"]]


def test_servers_get_the_very_pixels_once_per_clip_as_long_as_it_lives(serve, renderer):
    client, kept = serve(), noise(3, width=512, height=512)
    folder = Path(client._frames.folder)
    with ThreadPoolExecutor(8) as rollouts:  # a group's rollouts start together
        first, *others = rollouts.map(lambda _: show(client, renderer, kept), range(8))
    assert others == [first] * 7
    assert all((np.array(Image.open(file)) == pixels).all() for file, pixels in zip(first, kept.pixels, strict=True))
    for seed in range(5):
        passing = noise(1, seed)
        [file] = show(client, renderer, passing)
        assert (np.array(Image.open(file)) == passing.pixels[0]).all()
        del passing
        assert not file.exists()
    assert {*folder.rglob("*.bmp")} == {*first}
    client.close()
    assert not folder.exists()


def test_frames_lie_in_memory_or_where_there_is_room(renderer, monkeypatch, tmp_path):
    def folder_of_frames(**options) -> Path:
        with contextlib.closing(SGLang([], renderer, **options)) as client:
            return Path(client._frames.folder).parent

    assert folder_of_frames() == MEMORY
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=1e9))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert folder_of_frames() == tmp_path
    (tmp_path / "run").mkdir()
    assert folder_of_frames(frames=tmp_path / "run") == tmp_path / "run"


def test_a_prompt_that_drifts_is_an_error(serve, prompts, renderer):
    client = serve("drift")
    first = prompts[2].ids.index(renderer.image_pad) + 3  # of four image tokens, the server has three
    with pytest.raises(ContractError, match=rf"differ from position {first} on"):
        client.generate(**request(prompts[2]))


META = {"finish_reason": {"type": "stop"}, "weight_version": "3", "output_token_logprobs": [[-1.0, 5, None]]}
ODD = [{"finish_reason": None}, {"weight_version": "2"}, {"output_token_logprobs": [[-1.0, 5]]}]
ODD += [{"output_token_logprobs": [[None, 5, None]]}, {"finish_reason": {"type": "abort"}}]
ODD = [{"meta_info": {}}, {"prompt_token_ids": None}, *({"meta_info": META | change} for change in ODD)]


@pytest.mark.parametrize("fault", ["busy", "abort", pytest.param(f"reply={json.dumps(ODD)}", id="odd")])
def test_a_lost_request_goes_to_another_server_and_is_never_a_result(serve, prompts, tmp_path, fault):
    """It was refused, aborted, or answered by other weights or in another form (past bug: some such replies ended the training with
    a traceback). All samples are those of a healthy server."""
    rows = [request(prompts[i % 4], seed=i) for i in range(40)]
    samples = []
    for client in (serve(fault, ""), serve()):
        client.update_weights(tmp_path, 3)
        samples.append(at_once(client, rows))
    assert samples[0] == samples[1]
    assert {(s.version, s.finish, len(s.ids), len(s.logprobs)) for s in samples[0]} == {(3, "stop", 7, 7)}


def test_a_request_that_no_server_answers_asks_each_once_and_lets_go_of_its_frames(serve, renderer):
    """Past bug: its error held them in a reference cycle, so their files stayed until the next garbage collection."""
    client, clip = serve(*[f"reply={json.dumps(ODD[-1:])}"] * 2), noise(1)
    ids = question(renderer, [clip], "What?")
    gc.disable()
    try:
        with pytest.raises(EngineError, match="2 servers.*abort"):
            client.generate(**request(Prompt(ids, [clip])))
        states = [state_of(url) for url in client.urls]
        assert [state["served"] for state in states] == [1, 1]
        file = Path(states[0]["shown"][0].removeprefix("file://"))
        assert file.exists()
        del clip
        assert not file.exists()
    finally:
        gc.enable()


@pytest.mark.parametrize("ranks, prompts_of_a_rank", [(1, 40), (4, 40), (4, 2)])
def test_each_server_gets_its_share_of_the_prompts(renderer, monkeypatch, ranks, prompts_of_a_rank):
    """Within 10 %, although a prompt's requests all go to one server. Past bug: each rank's first prompts went to the first
    servers, so with two prompts a rank, two of four servers had no work."""
    readers = defaultdict(set)  # a prompt's first id -> the servers that were asked about it

    def reply(url: str, seconds: float, payload: dict) -> dict:
        readers[payload["input_ids"][0]].add(url)
        return {"meta_info": META, "prompt_token_ids": payload["input_ids"]}

    monkeypatch.setattr("runtime.servers.request_json", reply)
    for rank in range(ranks):
        monkeypatch.setattr("runtime.servers.local_rank", lambda rank=rank: rank)
        with contextlib.closing(connect(renderer, [f"http://server-{i}" for i in range(4)])) as client:
            first = 100 * rank
            prompts = [Prompt([first + i], []) for i in range(prompts_of_a_rank)]
            at_once(client, [request(prompt, [20] * turn) for prompt in prompts for turn in range(4)])
    counts = Counter(url for urls in readers.values() for url in urls)
    assert {len(urls) for urls in readers.values()} == {1}
    assert list(counts.values()) == pytest.approx([ranks * prompts_of_a_rank / 4] * 4, rel=0.1)


def test_a_prompt_stays_with_its_server_while_that_is_in_use(serve, renderer, tmp_path):
    """Also with new weights, and if one of its requests was lost there and asked elsewhere."""
    client, clip = serve("abort", ""), noise(1)  # the first server aborts every second request
    prompt = Prompt(question(renderer, [clip], "What?"), [clip])
    for turn in range(8):
        if turn == 4:
            client.update_weights(tmp_path, 1)
        client.generate(**request(prompt, [20] * turn))
    assert [state_of(url)["served"] for url in client.urls] == [8, 4]
    end(client.servers[0])
    for _ in range(4):
        client.generate(**request(prompt))
    assert len(client.servers) == 1
    assert state_of(client.urls[1])["served"] == 4 + 4


def test_a_server_on_several_gpus_gets_the_configs_flags_and_a_log_of_its_name(renderer, tmp_path, monkeypatch):
    told = []

    def command(checkpoint, renderer, port, flags):
        told.append(flags[-1])
        return fake_server(renderer, port)

    monkeypatch.setattr("runtime.open_engine.server_command", command)
    cfg = EngineConfig(server_gpus=(4, 5, 6, 7), tensor_parallel=2)
    with contextlib.closing(open_engine("", renderer, cfg, tmp_path)) as client:
        assert told == ["--tp-size=2"] * 2 and len(set(client.urls)) == 2
        for server in client.servers:
            end(server)
        with pytest.raises(EngineLost):
            client.update_weights(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"sglang-gpu4,5.log", "sglang-gpu6,7.log"}


@pytest.mark.parametrize(
    "sglang, gpus, given, found",
    [
        (True, 3, {}, ((0, 1, 2), 96)),
        (True, 3, {"concurrency": 8}, ((0, 1, 2), 8)),
        (True, 3, {"tensor_parallel": 2}, None),
        (True, 3, {"server_gpus": (1,)}, ((1,), 32)),
        (True, 3, {"server_gpus": ()}, ((), 32)),  # in this process
        (True, 0, {}, ((), 32)),
        (False, 3, {}, ((), 32)),
    ],
)
def test_null_takes_the_gpus_of_the_machine(monkeypatch, sglang, gpus, given, found):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: sglang or None)
    with contextlib.nullcontext() if found else pytest.raises(ConfigError, match="tensor_parallel"):
        cfg = for_this_machine(RolloutConfig(**{"server_gpus": None, "concurrency": None} | given))
        assert (cfg.server_gpus, cfg.at_once) == found


@pytest.mark.parametrize(
    "held, gpus, flags, refused",
    [
        ([[1], [70]], (0, 1), (), True),
        ([[1], [70]], (0,), (), False),
        ([[1], [70]], (1,), ("--mem-fraction-static=0.1",), False),  # it shares the GPU with a training rank
        ([[70, 69, 1]], (0,), (), False),  # a server that was killed frees its memory: torchrun's next attempt waits
    ],
)
def test_a_server_has_no_room_beside_another_process(monkeypatch, held, gpus, flags, refused):
    """`held`: for each GPU, the GiB in use at one look after another."""
    looks = [itertools.chain(found, itertools.repeat(found[-1])) for found in held]
    clock = types.SimpleNamespace(monotonic=itertools.count().__next__, sleep=lambda seconds: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("torch.cuda.device_memory_used", lambda gpu: next(looks[gpu]) << 30)
    monkeypatch.setattr("runtime.open_engine.time", clock)
    with pytest.raises(ConfigError, match="70 GiB of GPU 1") if refused else contextlib.nullcontext():
        require_servers(RolloutConfig(server_gpus=gpus, server_args=flags), ranks=2 if flags else 0)


def test_a_server_inherits_nothing_and_is_asked_past_any_proxy(serve, prompts, monkeypatch, capsys):
    """Past bug: every request went to the proxy, even the one that SGLang sends to itself at its start."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS")
    names += ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    for name in names:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,4,7")
    client = serve("", "", tensor_parallel=2)
    assert client.generate(**request(prompts[1])).finish == "stop"
    capsys.readouterr()
    require_servers(RolloutConfig(urls=tuple(client.urls)))  # it needs no GPU
    told = [f"  note    {url} says that it serves the/checkpoint" for url in client.urls]
    assert capsys.readouterr().out.splitlines() == told  # a server of another run serves that run's weights
    straight = requests.Session()
    straight.trust_env = False
    for url, devices in zip(client.urls, ("2,3", "4,7"), strict=True):
        seen = straight.get(url + "/model_info").json()["environment"]
        assert seen["no_proxy"] == seen["NO_PROXY"] == "127.0.0.1"
        assert seen["CUDA_VISIBLE_DEVICES"] == devices and not set(names) & set(seen)
        # Cached image embeddings survive a weight update: if the vision tower trains, they would be stale.
        assert seen["SGLANG_VLM_CACHE_SIZE_MB"] == "0"


def test_if_a_server_does_not_start_the_others_end_and_the_end_of_its_log_is_told(serve, renderer):
    """Past bug: it was started again until start_timeout."""
    with pytest.raises(EngineError, match="the server on GPU 0 failed: .* Connection refused"):
        serve("slow_start=30", start_timeout=0.5)
    ports = []
    launch = lambda port: ports.append(port) or fake_server(renderer, port, "crash=30" if ports[1:] else "")  # noqa: E731
    with pytest.raises(EngineError, match="the server on GPU 1 failed: exit code 3; ") as error:
        serve("", "", start_timeout=1000.0, launch=launch)
    assert [line for line in str(error.value).splitlines() if "line" in line] == [f"line {i}" for i in range(10, 30)]
    wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", ports[0])), seconds=5)


def end(server: Server) -> None:
    server.process.kill()
    server.process.wait()


def test_a_server_is_left_out_after_three_failures_in_a_row_and_requests_in_flight_count_once(serve, renderer, prompts):
    client = serve("abort", "")  # it aborts every second request
    bad, good = client.servers
    sent = time.monotonic()
    for _ in range(64):
        client._count_failure(bad, Failure("connection reset"), sent)
    assert bad.failures == 1
    for failures in (2, 0, 1, 0):
        client.generate(**request(prompts[0]))  # `bad` is asked first
        assert bad.failures == failures
    with contextlib.closing(connect(renderer, client.urls)) as visitor:  # it cannot see whether a process has ended
        end(bad)
        for _ in range(MAX_FAILURES):
            assert len(visitor.servers) == 2
            assert visitor.generate(**request(prompts[0])).finish == "stop"
        assert [server.url for server in visitor.servers] == [good.url]


def test_a_server_that_exits_is_left_out_at_once(serve, prompts, caplog):
    """Past bug: all requests in flight counted as one failure, so a step failed as if servers were left."""
    client = serve("", "")
    end(client.servers[0])
    assert client.generate(**request(prompts[0])).finish == "stop"
    assert [server.gpus for server in client.servers] == ["1"]
    [line] = caplog.messages
    assert line.startswith("servers left: 1, because the server on GPU 0 failed: exit code -9; ")
    end(client.servers[0])
    with pytest.raises(EngineLost):
        client.generate(**request(prompts[0]))


def test_a_server_that_hangs_is_left_out_at_once_and_its_owner_kills_it(serve, renderer, prompts, caplog):
    owner = serve("", "")
    visitor = connect(renderer, owner.urls)
    process = owner.servers[0].process
    os.kill(process.pid, signal.SIGSTOP)
    for client, killed in ((visitor, False), (owner, True)):
        client.request_timeout = 0.5
        assert client.generate(**request(prompts[0])).finish == "stop"
        assert [server.url for server in client.servers] == owner.urls[1:]
        assert alive(process.pid) is not killed
    assert f"the server at {owner.urls[0]} failed: " in caplog.messages[0]
    assert all("read timeout=0.5" in line for line in caplog.messages)
    visitor.close()


@pytest.mark.parametrize("fault, told", [("swap", "no such folder"), ("", "exit code -9")])
def test_a_server_that_does_not_take_the_weights_is_left_out(serve, prompts, tmp_path, caplog, fault, told):
    client = serve(fault, "")
    if not fault:
        end(client.servers[0])
    client.update_weights(tmp_path, 1)
    assert [server.gpus for server in client.servers] == ["1"] and told in caplog.text
    assert client.generate(**request(prompts[0])).version == 1


def test_a_closed_client_lets_nobody_wait_and_ends_its_servers(serve, prompts):
    client = serve("slow=60")
    [server] = client.servers
    assert_close_frees_who_waits(client, request(prompts[0]))
    assert not alive(server.process.pid)


def test_a_server_is_ready_for_weights_once_it_has_warmed_up(renderer, prompts, tmp_path):
    """Past bug: it sampled a token while it warmed up, and the first push of weights killed it."""
    [server] = start_servers(
        EngineConfig(server_gpus=(0,)), None, lambda port: fake_server(renderer, port, "warms_up=1")
    )
    wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", urlsplit(server.url).port)) == 0)
    with contextlib.closing(open_engine("", renderer, EngineConfig(urls=(server.url,)))) as client:
        client.update_weights(tmp_path, 1)
        assert client.generate(**request(prompts[0])).version == 1
    kill(server)


def test_weights_of_another_run_are_replaced_even_under_the_same_number(serve, prompts, renderer, tmp_path):
    """Past bug: a new run on an old run's server began with the old run's weights."""
    first = serve()
    second, other_rank = connect(renderer, first.urls), connect(renderer, first.urls)
    for loads, client in ((1, first), (2, second)):
        client.update_weights(tmp_path, 3)
        assert state_of(first.urls[0])["loads"] == loads
    other_rank.update_weights(tmp_path, 3, push=False)
    assert other_rank.generate(**request(prompts[0])).version == 3
    assert state_of(first.urls[0])["loads"] == 2
    second.close(), other_rank.close()
