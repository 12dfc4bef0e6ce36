"""Tests that need a GPU, in 5 to 15 minutes. On a CPU they run with small sizes, which shows that they run.

make test-gpu                          # one line of JSON per figure, printed and appended to runs/gpu.jsonl

The tests write about 50 GB of random weights and states below /tmp (TMPDIR moves it), at most 28 GB at a time: `make test-gpu`
removes a test's files once it has passed.
"""

import json
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import scripts
import tiny
import torch
import torch.nn.functional as F
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from episode import Prompt, Trajectory
from rl import logprob_gap
from runtime.checkpoints import export, load_policy, load_state, save_state
from runtime.distributed import peak_memory
from runtime.engine import run_all
from runtime.inprocess import InProcess
from runtime.packing import Bundle, Segment
from runtime.plan import PUBLISHED, plan_training
from runtime.policy import PolicyConfig, lay_out_keys, pick_kernel
from runtime.run import OptimConfig, make_optimizer, optimizer_step, utilisation
from runtime.video import Clip
from runtime.visual import VisualContract

GPU = torch.cuda.is_available()
WHERE = torch.device("cuda" if GPU else "cpu")
TWO_B, EIGHT_B = (PUBLISHED[f"Qwen/Qwen3-VL-{size}-Instruct"] for size in ("2B", "8B"))
SEVEN_B = PUBLISHED["Qwen/Qwen2.5-VL-7B-Instruct"]
KEPT = scripts.REPO / "runs" / "gpu.jsonl"


def note(part: str, **figures) -> None:
    """Print a measurement. Keep it if it is from a GPU."""
    line = json.dumps({"part": part, "device": torch.cuda.get_device_name() if GPU else "CPU", **figures})
    print(line, flush=True)
    if GPU:
        KEPT.parent.mkdir(exist_ok=True)
        with KEPT.open("a") as file:
            file.write(line + "\n")


def checkpoint(folder: Path, shapes: dict, layers: int | None = None) -> Path:
    """Write random weights of a published size, with the tests' vocabulary. On a CPU they are tiny."""
    if not GPU:
        return tiny.write(folder)
    text = shapes["text_config"] | {"vocab_size": tiny.VOCABULARY, "max_position_embeddings": 65_536}
    if layers:
        text |= {"num_hidden_layers": layers}
    return tiny.write(folder, shapes["tie_word_embeddings"], text=text, vision=shapes["vision_config"])


# ------------------------------------------------------------------------------------------------ kernels


@pytest.mark.parametrize("kernel", ["flash", "varlen", "sdpa"])
def test_kernels_compute_attention_and_its_gradient_to_within_rounding(kernel):
    """Compare with fp32 maths and a mask over the whole sequence: prompts, rows, grouped heads, a one-token row."""
    if kernel != "sdpa" and not GPU:
        pytest.skip("this kernel needs a GPU")
    if kernel == "flash" and pick_kernel(WHERE, torch.bfloat16) != "flash":
        pytest.skip("FlashAttention 2 is not installed; torch's varlen kernel serves")
    heads, shared, size = 8, 2, 128
    spans = [(0, 300, 0, 0), (300, 301, 0, 300), (301, 500, 0, 300), (500, 560, 500, 500), (560, 640, 500, 560)]
    segments = [Segment(*span) for span in spans]
    length = segments[-1].stop
    seen = torch.zeros(length, length, dtype=torch.bool)
    for s in segments:
        seen[s.start : s.stop, s.prompt_start : s.prompt_stop] = True
        seen[s.start : s.stop, s.start : s.stop] = torch.ones(s.stop - s.start, s.stop - s.start).tril().bool()

    torch.manual_seed(0)
    query, key, value = (torch.randn(1, n, length, size) for n in (heads, shared, shared))
    weight = torch.randn(1, length, heads, size)

    def run(attend, dtype, device):
        inputs = [x.to(device, dtype).requires_grad_() for x in (query, key, value)]
        out = attend(*inputs)
        (out * weight.to(device, dtype)).sum().backward()
        return [x.float().cpu() for x in (out.detach(), *(x.grad for x in inputs))]

    def exact(query, key, value):
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
        return out.transpose(1, 2)

    def ours(query, key, value):
        layout = lay_out_keys(segments, kernel, query.device)
        return layout.attend(query, key, value, size**-0.5)

    pairs = zip(run(ours, torch.bfloat16, WHERE), run(exact, torch.float32, "cpu"))
    errors = [((a - b).norm() / b.norm()).item() for a, b in pairs]
    note("kernel", kernel=kernel, **{name: round(e, 5) for name, e in zip(("out", "dq", "dk", "dv"), errors)})
    assert max(errors) < 0.02


# ------------------------------------------------------------------------------------------------ training

OPTIM = OptimConfig(lr=1e-5)


def train(path: Path, folder: Path) -> None:
    """Train one rank: 2B shapes in bf16 under FSDP2, a group of 8, a long episode, a reference. Save a state, load it."""
    cfg = PolicyConfig(str(path), dtype="bf16", freeze=("vision",))
    policy, reference = load_policy(cfg, tiny.NEVER_SAMPLED), load_policy(cfg, tiny.NEVER_SAMPLED, train=False)
    reference.model.model.visual = policy.vision
    optimizer = make_optimizer(policy, OPTIM)
    frames, side, said, long = (64, 256, 512, 24_000) if GPU else (2, 64, 8, 200)
    shapes = policy.model.config
    parts = [[draw_group(shapes, frames, side, [said] * 8)], [draw_group(shapes, frames, side, [long])]]

    def step(number: int) -> float:
        total = 0.0
        for part in parts:
            output = policy(part)
            with torch.no_grad():
                kept = reference(part, 1.0, output.features).logprobs
            # a pull towards the reference, and a reward
            loss = ((output.logprobs - kept).square() - output.logprobs).mean()
            loss.backward()
            total += loss.item()
        assert np.isfinite(optimizer_step(policy, optimizer, OPTIM, number, 10))
        return total

    first = step(0)
    tokens = sum(len(bundle) for part in parts for bundle in part)
    planned = plan_training(cfg, 1, max(len(part[0]) for part in parts), reference=True)
    note(
        "training", tokens=tokens, loss=first, peak_gib=round(peak_memory(), 2), planned_gib=round(planned.total_gib, 2)
    )

    save_state(folder / "state", policy, optimizer, 1)
    resumed = load_policy(cfg, tiny.NEVER_SAMPLED)
    its_optimizer = make_optimizer(resumed, OPTIM)
    assert load_state(folder / "state", resumed, its_optimizer) == 1
    for ours, theirs in zip(policy.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(ours.detach(), theirs.detach())
    second = step(1)
    policy, optimizer = resumed, its_optimizer
    again = step(1)
    note("resumed", loss=second, again=again)
    assert abs(again - second) < 1e-3 * abs(second)
    export(policy, folder / "model", VisualContract(frame_pixels=side * side))


@pytest.mark.slow
def test_a_2b_trains_in_bf16_resumes_bit_for_bit_and_exports(tmp_path):
    path = checkpoint(tmp_path / "model", TWO_B)
    VisualContract(frame_pixels=256 * 256 if GPU else 64 * 64).save(path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (path / name).write_text("{}")
    tiny.on_ranks(train, 1, path, tmp_path)
    plain = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert plain.dtype == torch.bfloat16


@pytest.mark.slow
def test_an_update_at_8b_widths_has_its_share_of_the_peak(tmp_path):
    """Eight layers with fp32 master weights fit on one GPU. The MFU counts forward, backward and AdamW."""
    cfg = PolicyConfig(str(checkpoint(tmp_path / "model", EIGHT_B, layers=8)), dtype="auto" if GPU else "fp32")
    tiny.on_ranks(update, 1, cfg)


def update(cfg: PolicyConfig) -> None:
    policy = load_policy(cfg, tiny.NEVER_SAMPLED)
    optimizer = make_optimizer(policy, OPTIM)
    bundle = draw_group(policy.model.config, *((64, 256, [512] * 8) if GPU else (2, 64, [8] * 8)))
    for repeat in range(3):
        began = time.perf_counter()
        (-policy([bundle]).logprobs.mean()).backward()
        assert np.isfinite(optimizer_step(policy, optimizer, OPTIM, repeat, 10))
        if GPU:
            torch.cuda.synchronize()  # the time includes AdamW
        seconds = time.perf_counter() - began
    mfu = utilisation(cfg, len(bundle), seconds, 1)
    note("update", tokens=len(bundle), tokens_per_second=round(len(bundle) / seconds), **mfu)


# ------------------------------------------------------------------------------------------------ sampling


def draw_group(c: Qwen3VLConfig, frames: int, side: int, lengths: Sequence[int]) -> Bundle:
    """Draw random tokens: a prompt that shows square frames of `side` pixels, and rollouts of so many tokens."""
    rng = np.random.default_rng(0)
    image = [c.vision_start_token_id, *[c.image_token_id] * (side // 32) ** 2, c.vision_end_token_id]
    ids = []
    for _ in range(frames):
        ids += [*rng.integers(20, 120, 5).tolist(), *image]  # ordinary tokens of every vocabulary
    said = [rng.integers(20, 120, length).tolist() for length in lengths]
    clip = Clip(rng.integers(0, 256, (frames, side, side, 3), dtype=np.uint8), (0.0,) * frames)
    prompt = Prompt(ids, [clip])
    return Bundle(prompt, [Trajectory(prompt, row, [1] * len(row)) for row in said])


def with_tokenizer(folder: Path, model_type: str = "qwen3_vl") -> Path:
    """Write a checkpoint with a tokenizer: eight layers of the 2B's widths and the 8B's or 7B's vision tower (27 blocks with
    heads of 72, or 32 blocks, most with windows). On a CPU it is tiny."""
    qwen3 = model_type == "qwen3_vl"
    text = TWO_B["text_config"]
    sizes = {name: text[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")}
    sizes |= {"num_hidden_layers": 8, "num_key_value_heads": 8, "rope_parameters": text["rope_parameters"]}
    sizes |= {"max_position_embeddings": 65_536}  # SGLang refuses a longer context
    if not GPU:
        contract = tiny.CONTRACT if qwen3 else tiny.CONTRACT_14
        return tiny.build(folder, model_type=model_type, contract=contract)
    contract = VisualContract() if qwen3 else VisualContract(patch=14, frame_pixels=224 * 224)  # 64 tokens a frame
    tower = (EIGHT_B if qwen3 else SEVEN_B)["vision_config"] | {"out_hidden_size": text["hidden_size"]}
    tiny.build(folder, model_type=model_type, contract=contract, vision=tower, **sizes)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))  # SGLang would run fp32 weights in fp16
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl"])
def test_the_engine_in_this_process_agrees_with_the_trainer(tmp_path, model_type):
    path = with_tokenizer(tmp_path / "model", model_type)
    renderer = tiny.renderer(path)
    engine = InProcess(path, renderer, device=WHERE, dtype="bfloat16" if GPU else "float32")
    assert (engine.kernel != "sdpa") == GPU

    # prompts of different lengths, each sampled four times
    count, max_new_tokens = (64, 256) if GPU else (8, 8)
    cell = renderer.contract.cell
    clip = tiny.noise(16, width=5 * cell, height=3 * cell)  # 15 tokens a frame, two windows of Qwen2.5-VL's
    prompts, jobs = [], {}
    for i in range(count):
        if i % 4 == 0:
            messages = [{"role": "user", "content": [clip, "What happens?" + " Say it." * (i // 4)]}]
            rendered = renderer.render(messages, generate=True)
            prompts.append(Prompt(rendered.ids, rendered.clips))
        given = {"max_new_tokens": max_new_tokens, "temperature": 1.0, "seed": i}
        jobs[i] = partial(engine.generate, prompts[-1], [], [], **given)
    began = time.perf_counter()
    samples = run_all(engine, jobs, count)
    seconds = time.perf_counter() - began
    engine.close()

    policy = load_policy(PolicyConfig(str(path), dtype="bf16" if GPU else "fp32"), renderer.never_sampled, train=False)
    rows = []
    for i in range(0, count, count // 4):
        sample = samples[i]
        rows.append(Trajectory(prompts[i // 4], sample.ids, [1] * len(sample.ids), sample.logprobs))
    gap = logprob_gap(policy, rows, 1.0)
    sampled = sum(len(sample.ids) for sample in samples.values())
    note("engine", kernel=engine.kernel, tokens_per_second=round(sampled / seconds), logprob_gap=round(gap, 6))
    assert gap < 0.05


@pytest.mark.slow
def test_an_sglang_server_agrees_with_the_trainer(toy_dir, tmp_path):
    if not GPU or not find_spec("sglang"):
        pytest.skip("needs a GPU and SGLang in this environment; test_sglang.py has a server on a CPU")
    changes = [f"run={tmp_path / 'run'}", f"policy.checkpoint={with_tokenizer(tmp_path / 'model')}", "steps=1"]
    changes += [f"data.sources=[{{path: {toy_dir / 'rl.parquet'}}}]", "data.video_root=''", "batch_tasks=1"]
    changes += ["save_every=1000"]
    config = scripts.REPO / "configs" / "paragrpo_2b_1gpu.yaml"
    told = scripts.finish(scripts.start("rl.py", config, *changes, anew=True))
    assert "trainer and engine agree" in told
    [row] = scripts.metrics(tmp_path / "run")
    note("sglang", logprob_gap=row["logprob_gap"])
    assert row["logprob_gap"] < 0.05


# ------------------------------------------------------------------------------------------------ the scripts


@pytest.mark.slow
def test_sft_and_rl_run_one_after_the_other_with_staleness(toy_dir, tmp_path):
    """Past bug: at the toy's learning rate, 2e-4, the gap measured AdamW's step between two batches. In fp32, four seeds gave
    0.036 to 0.062."""
    steps = 20 if GPU else 2

    def train(script: str, config: str, run: Path, model: Path, rows: str, *more: str) -> None:
        changes = [f"run={run}", f"policy.checkpoint={model}", f"data.sources=[{{path: {toy_dir / rows}}}]", *more]
        changes += ["val=null", f"steps={steps}", "save_every=1000"]
        scripts.finish(scripts.start(script, scripts.REPO / "configs" / config, *changes, anew=GPU))

    cold, run = tmp_path / "sft", tmp_path / "rl"
    train("sft.py", "toy_sft.yaml", cold, toy_dir / "model", "sft.parquet", "batch_rows=4")
    train(
        "rl.py", "toy_paragrpo.yaml", run, cold / "model", "rl.parquet", "staleness=1", "batch_tasks=2", "optim.lr=1e-5"
    )
    rows = scripts.metrics(run)
    assert len(rows) == steps and all(np.isfinite(row["loss"]) and row["logprob_gap"] < 0.05 for row in rows)
    seconds, gap = np.median([row["seconds"] for row in rows]), max(row["logprob_gap"] for row in rows)
    note("scripts", seconds_per_step=round(seconds, 2), logprob_gap=gap)
