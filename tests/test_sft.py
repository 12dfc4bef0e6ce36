"""The cold start: its loss is the plain one, ranks and kills change nothing, and bad batches do not pass silently."""

import json
import os
import random
import re
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from scripts import REPO, finish, metrics, start

import sft
from data import main_messages, overview, parse_task
from rollout import open_engine
from runtime import config
from runtime.contract import Bundle, Renderer, VisualContract, load_tokenizer, patchify
from runtime.dataset import Rows
from runtime.plan import PlanError
from runtime.policy import load
from sft import KINDS, SFTConfig, accumulate, target_kinds

run = partial(start, "sft.py")


def write_config(path: Path, toy_dir: Path, **changes) -> Path:
    tree = {
        "run": str(path.parent / "run"),
        "policy": {"checkpoint": str(toy_dir / "model"), "freeze": []},
        "data": {
            "sources": [
                {"path": str(toy_dir / "perception.parquet"), "loss_weight": 10},
                {"path": str(toy_dir / "sft.parquet")},
            ]
        },
        "visual": {"frame_pixels": 1024},
        "kind_weights": {"answer": 5},
        "optim": {"lr": 1e-3, "warmup": 0.1, "schedule": "cosine"},
        "steps": 20,
        "batch_rows": 4,
        "pack_tokens": 700,
        "save_every": 5,
        "decoders": 1,
    }
    path.write_text(yaml.safe_dump(tree | changes))
    return path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


# ------------------------------------------------------------------------------------------------ the loss


def test_kinds_of_target_tokens_follow_the_text(tokenizer):
    renderer = Renderer(tokenizer, VisualContract(frame_pixels=1024))
    said = '<think>\nLet me look closer.\n</think>\n<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 0, "end_time": 16}}\n</tool_call>'  # fmt: skip
    messages = [
        {"role": "user", "content": "Which?"},
        {"role": "assistant", "content": said},
        {"role": "tool", "content": "A red flash. <answer>no</answer>"},
        {"role": "assistant", "content": "<think>\nI see.\n</think>\n<answer>red</answer>"},
    ]
    rendered = renderer.render(messages)
    kinds = target_kinds(Bundle([], [rendered.ids], [rendered.mask], []), renderer)
    targets = [t for t, m in zip(rendered.ids, rendered.mask, strict=True) if m]
    text = {
        kind: renderer.decode([t for t, k in zip(targets, kinds, strict=True) if KINDS[k] == kind]) for kind in KINDS
    }
    assert (
        text["structure"]
        == "<think></think><tool_call></tool_call><|im_end|><think></think><answer></answer><|im_end|>"
    )
    assert text["arguments"] == '\n{"name": "crop_video", "arguments": {"start_time": 0, "end_time": 16}}\n'
    assert text["answer"] == "red" and text["prose"] == "\nLet me look closer.\n\n\nI see.\n\n"


def test_loss_and_gradient_equal_an_unpacked_reference(toy_dir, tmp_path, videos):
    """Row by row through plain transformers, with torch's own cross-entropy, against the packed step."""
    from transformers import Qwen3VLForConditionalGeneration

    cfg = config.load(SFTConfig, write_config(tmp_path / "c.yaml", toy_dir, batch_rows=12, pack_tokens=900))
    renderer = Renderer(load_tokenizer(toy_dir / "model"), cfg.visual)
    batch = sft.Batches(cfg, cfg.data, videos, renderer, 0, 1).make(0)
    assert len(batch.micro) > 1 and any(len(micro) > 1 for micro in batch.micro)
    policy = load(cfg.policy, renderer.never_sampled)
    measured = accumulate(policy, batch)

    plain = Qwen3VLForConditionalGeneration.from_pretrained(toy_dir / "model").train()
    total, weighted, per_kind = 0.0, 0.0, {kind: [] for kind in KINDS}
    for micro in batch.micro:
        for bundle in micro:
            ids, mask = torch.tensor(bundle.suffixes), torch.tensor(bundle.masks[0]).bool()
            pixels, grid = map(torch.from_numpy, patchify(bundle.frames))
            logits = plain(
                input_ids=ids,
                mm_token_type_ids=(ids == renderer.image_pad).int(),
                pixel_values=pixels,
                image_grid_thw=grid,
            ).logits[0]
            logits = logits.index_fill(1, torch.tensor(renderer.never_sampled), -1e9)
            nll = F.cross_entropy(logits[:-1][mask[1:]], ids[0, 1:][mask[1:]], reduction="none")
            kinds = target_kinds(bundle, renderer)
            w = torch.tensor([bundle.weight * cfg.kind_weights.get(KINDS[k], 1.0) for k in kinds])
            weighted, total = weighted + (w * nll).sum(), total + float(w.sum())
            for k, value in zip(kinds, nll.tolist(), strict=True):
                per_kind[KINDS[k]].append(value)
    loss = weighted / total
    loss.backward()
    assert measured["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for kind, values in per_kind.items():
        assert measured[f"loss_{kind}"] == pytest.approx(np.mean(values), rel=1e-5)
    theirs = {name: p.grad for name, p in plain.named_parameters()}
    for name, p in policy.model.named_parameters():
        assert (p.grad - theirs[name]).norm() <= 1e-4 * theirs[name].norm() + 1e-8, name


def test_packing_does_not_change_the_loss(toy_dir, tmp_path, videos):
    losses = []
    for limit in (600, 5000):
        cfg = config.load(SFTConfig, write_config(tmp_path / "c.yaml", toy_dir, batch_rows=8, pack_tokens=limit))
        renderer = Renderer(load_tokenizer(toy_dir / "model"), cfg.visual)
        batch = sft.Batches(cfg, cfg.data, videos, renderer, 0, 1).make(1)
        losses.append((len(batch.micro), accumulate(load(cfg.policy, renderer.never_sampled), batch)["loss"]))
    assert losses[0][0] > losses[1][0] == 1 and losses[0][1] == pytest.approx(losses[1][1], rel=1e-5)


# ------------------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def uninterrupted(toy_dir, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    val = {"sources": [{"path": str(toy_dir / "sft_val.parquet")}]}
    finish(run(write_config(folder / "c.yaml", toy_dir, val=val, eval_every=10)))
    return folder / "run"


def test_the_loss_falls_and_everything_is_written_down(uninterrupted):
    lines = metrics(uninterrupted)
    assert [line["step"] for line in lines] == list(range(20))
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5 and lines[-1]["val_loss"] < lines[9]["val_loss"]
    assert lines[0]["lr"] < lines[1]["lr"] < lines[2]["lr"] > lines[-1]["lr"] and all(
        line["grad_norm"] > 0 for line in lines
    )
    assert len(list((uninterrupted / "state").iterdir())) == 2  # keep: 2
    assert config.load(SFTConfig, uninterrupted / "config.yaml").steps == 20


def test_the_exported_policy_is_a_checkpoint_like_any_other(uninterrupted, toy_dir):
    from transformers import Qwen3VLForConditionalGeneration

    VisualContract(frame_pixels=1024).check(uninterrupted / "model")
    plain = Qwen3VLForConditionalGeneration.from_pretrained(uninterrupted / "model")
    before = load_file(toy_dir / "model" / "model.safetensors")
    after = dict(plain.state_dict())
    assert any((after[name] != value).any() for name, value in before.items())
    assert plain.lm_head.weight is plain.model.language_model.embed_tokens.weight
    assert load_tokenizer(uninterrupted / "model").encode("<answer>red") == load_tokenizer(toy_dir / "model").encode("<answer>red")  # fmt: skip


def test_the_exported_policy_answers_as_in_plain_transformers(uninterrupted, videos, toy_dir):
    """Greedy, through the project's own prompts and engine on one side, and transformers' `generate` on the other."""
    from transformers import Qwen3VLForConditionalGeneration

    model = uninterrupted / "model"
    renderer = Renderer(load_tokenizer(model), VisualContract.load(model))
    plain, engine = Qwen3VLForConditionalGeneration.from_pretrained(model).eval(), open_engine(model, renderer)
    for i in range(4):
        task = parse_task(Rows(toy_dir / "test.parquet")[i], f"test:{i}", toy_dir)
        frames = overview(task, 8, videos, renderer.contract)
        prompt = renderer.render(main_messages(task, frames, False), generate=True).ids
        ours = engine.generate(prompt, frames, max_new_tokens=24, temperature=0.0, seed=0)
        pixels, grid = map(torch.from_numpy, patchify(frames))
        ids = torch.tensor([prompt])
        theirs = plain.generate(
            input_ids=ids,
            mm_token_type_ids=(ids == renderer.image_pad).int(),
            pixel_values=pixels,
            image_grid_thw=grid,
            suppress_tokens=renderer.never_sampled,
            max_new_tokens=24,
            do_sample=False,
        )
        assert theirs[0, len(prompt) :].tolist() == ours.ids
    engine.close()


def test_two_processes_have_the_losses_of_one(uninterrupted, toy_dir, tmp_path):
    finish(run(write_config(tmp_path / "c.yaml", toy_dir), ranks=2))
    one, two = metrics(uninterrupted), metrics(tmp_path / "run")
    assert len(two) == 20
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-4) and b["tokens"] == a["tokens"]


def test_a_run_killed_at_random_moments_ends_with_the_same_bits(uninterrupted, toy_dir, tmp_path):
    """SIGKILL, also during a save; each start goes on from the newest complete state."""
    cfg, rng, kills = write_config(tmp_path / "c.yaml", toy_dir, save_every=2), random.Random(0), 0
    state = tmp_path / "run" / "state"
    while kills < 4:
        process = run(cfg, start_new_session=True)
        newest = len(list(state.glob("step-*"))) and max(state.glob("step-*"))
        deadline = time.time() + 120
        while process.poll() is None and time.time() < deadline:  # wait for progress, then a random moment more
            names = list(state.glob("step-*"))
            if names and max(names) != newest:
                break
            time.sleep(0.005)
        time.sleep(rng.random() * 0.3)
        if process.poll() is not None:
            break  # done before it could be killed
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    finish(run(cfg))
    assert kills >= 2
    expected, got = weights(uninterrupted), weights(tmp_path / "run")
    assert expected.keys() == got.keys() and all(torch.equal(expected[name], got[name]) for name in expected)
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(20))
    strip = ("seconds", "wait_seconds", "tokens_per_second", "peak_memory_gib", "val_loss")
    for a, b in zip(metrics(uninterrupted), metrics(tmp_path / "run"), strict=True):
        keys = [key for key in b if not key.startswith(strip)]
        assert {key: a[key] for key in keys} == {key: b[key] for key in keys}


def test_steps_that_are_not_finite_are_skipped_dumped_and_end_the_run(toy_dir, tmp_path):
    cfg = write_config(tmp_path / "c.yaml", toy_dir, optim={"lr": 1e30, "warmup": 0.0}, max_bad_steps=2, steps=10)
    told = finish(run(cfg), code=1)
    assert "gradient not finite in 3 steps, more than max_bad_steps = 2" in told
    dumped = sorted((tmp_path / "run").glob("bad_step_*_rank0.json"))
    assert len(dumped) == 3
    batch = json.loads(dumped[0].read_text())
    assert len(batch["rows"]) == len(batch["tokens"]) == 4 and all(".parquet:" in row for row in batch["rows"])
    assert metrics(tmp_path / "run")[-1]["bad_steps"] == 3


def test_unusable_rows_cost_themselves_only(toy_dir, tmp_path):
    """A corrupt video, and rows over the packing length: named, counted, and the run goes on."""
    shutil.copytree(toy_dir, tmp_path / "toy")
    victim = next((tmp_path / "toy" / "videos").glob("train*.mp4"))
    victim.write_bytes(b"\0" * 2000)
    cfg = write_config(tmp_path / "c.yaml", tmp_path / "toy", steps=6, batch_rows=24, pack_tokens=380)
    data = yaml.safe_load(cfg.read_text())
    data["data"]["max_bad_fraction"] = 0.5
    cfg.write_text(yaml.safe_dump(data))
    told = finish(run(cfg))
    assert victim.name in told and "more than pack_tokens = 380" in told
    assert metrics(tmp_path / "run")[-1]["bad_rows"] >= 2
    assert victim.name in (tmp_path / "run" / "bad_videos.jsonl").read_text()


def test_a_step_or_a_held_out_set_without_a_usable_row_is_told_from_one_with_loss_0(toy_dir, tmp_path):
    """The first crashed in the norm of no gradients, the second reported a val_loss of 0."""
    data = {"sources": [{"path": str(toy_dir / "sft.parquet")}], "max_bad_fraction": 1.0}
    cfg = write_config(tmp_path / "c.yaml", toy_dir, data=data, steps=4, batch_rows=1, pack_tokens=135)
    finish(run(cfg))
    lines = metrics(tmp_path / "run")
    assert [line["tokens"] > 0 for line in lines] == ["loss" in line for line in lines] and len(lines) == 4
    assert not all("loss" in line for line in lines)
    cfg = write_config(tmp_path / "c.yaml", toy_dir, val=data, pack_tokens=20, run=str(tmp_path / "other"))
    assert "val: none of its first 4 rows can be used" in finish(run(cfg), code=1)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"tools": ["crop_vido"]}, "tools = ['crop_vido']: not among tools.TOOLS"),
        ({"kind_weights": {"answers": 1}}, "kind_weights = ['answers']: no kinds of token"),
        ({"steps": 0}, "must be at least 1"),
        ({"visual": {"frame_pixels": 4096}}, "frame_pixels: this run has 4096, the checkpoint 1024"),
        ({"data": {"sources": [{"path": "nowhere.parquet"}]}}, "nowhere.parquet: no such data file"),
        ({"policy": {"checkpoint": "./no/model"}}, "neither a folder nor a model on the hub"),
    ],
)
def test_what_cannot_run_says_so(toy_dir, tmp_path, change, says):
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        sft.main(config.load(SFTConfig, write_config(tmp_path / "c.yaml", toy_dir, **change)))
    assert says in str(error.value)


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*sft*.yaml")), ids=lambda path: path.stem)
def test_every_config_loads(path):
    assert config.load(SFTConfig, path).run.startswith("runs/")


def test_a_dry_run_plans_the_8b_model_for_the_node_and_names_what_is_missing(capsys):
    cfg = config.load(SFTConfig, REPO / "configs" / "sft_8b.yaml")
    with pytest.raises(FileNotFoundError, match="paravt_sft_charades_12k4.parquet: no such data file"):
        sft.dry_run(cfg)
    told = capsys.readouterr().out
    assert "training, each of 8 GPUs" in told and "GiB of 80" in told
    with pytest.raises(PlanError, match="do not fit into 24 GiB. What helps most: "):
        sft.dry_run(config.load(SFTConfig, REPO / "configs" / "sft_8b.yaml", ["gpu_gib=24"]))


def test_a_dry_run_of_the_toy_counts_its_rows_and_weighs_its_states(toy_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("runtime.plan.shutil.disk_usage", lambda _: SimpleNamespace(free=2**20))
    assert sft.dry_run(config.load(SFTConfig, write_config(tmp_path / "c.yaml", toy_dir))) == 0
    told = capsys.readouterr().out
    assert "data: 420 rows, 420 per epoch" in told
    assert re.search(r"disk: 3 training states take 0\.0 GiB, 0\.0 are free in .*: lower `keep`, or set `run`", told)


def test_a_mistake_ends_the_script_with_one_line_and_not_with_a_traceback(toy_dir, tmp_path):
    told = finish(run(write_config(tmp_path / "c.yaml", toy_dir, visual={"frame_pixels": 4096})), code=1)
    assert told.startswith("error: ") and "Traceback" not in told
    told = finish(run(write_config(tmp_path / "c.yaml", toy_dir), "optim.lrr=1"), code=1)
    assert "optim.lrr = 1: unknown key; did you mean optim.lr?" in told and "Traceback" not in told
