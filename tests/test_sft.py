"""The cold start: its loss equals a plain reference, ranks and kills do not change it, and bad batches are reported."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from scripts import metrics, sft_config

import sft
from dialogues import parse_dialogue
from episode import NO_PROMPT, Trajectory
from runtime import config
from runtime.checkpoints import load_policy
from runtime.dataset import DataError, Dataset, RowError
from runtime.packing import Bundle
from runtime.policy import PolicyOutput
from runtime.video import Videos
from sft import TOKEN_KINDS, SFTConfig, batch_loss, target_kinds
from tools import TOOLS

# ------------------------------------------------------------------------------------------------ the loss


def test_loss_and_gradient_equal_an_unpacked_reference(toy_dir, toy_renderer, tmp_path, videos):
    """Compare the packed step with plain transformers, row by row."""
    cfg = config.load(SFTConfig, sft_config(tmp_path / "c.yaml", toy_dir, batch_rows=12, pack_tokens=900))
    batch = sft.Batches(cfg.data, cfg, videos, toy_renderer).make(0)
    assert len(batch) > 1 and any(len(micro.bundles) > 1 for micro in batch)
    policy = load_policy(cfg.policy, toy_renderer.never_sampled)
    measured = batch_loss(policy, batch)
    weights = {}  # of the rows, by their ids
    for draw in Dataset(cfg.data, parse_dialogue).batch(0, 12):
        row = sft.encode_dialogue(draw.item, videos, toy_renderer, [TOOLS[name].schema for name in cfg.tools])
        weights[tuple(row.ids)] = draw.loss_weight
    assert set(weights.values()) == {1, 10}

    plain = tiny.plain(toy_dir / "model")
    total, weighted, per_kind = 0.0, 0.0, {kind: [] for kind in TOKEN_KINDS}
    for micro in batch:
        for bundle in micro.bundles:
            [row] = bundle.rows
            logprobs = tiny.plain_logprobs(plain, toy_renderer.never_sampled, row.ids, row.clips)
            nll = -logprobs[torch.tensor(row.mask).bool()[1:]]
            kinds = target_kinds(row, toy_renderer)
            w = torch.tensor([weights[tuple(row.ids)] * cfg.kind_weights.get(kind, 1.0) for kind in kinds])
            weighted, total = weighted + (w * nll).sum(), total + float(w.sum())
            for kind, value in zip(kinds, nll.tolist(), strict=True):
                per_kind[kind].append(value)
    loss = weighted / total
    loss.backward()
    assert measured["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for kind, values in per_kind.items():
        assert measured[f"loss_{kind}"] == pytest.approx(np.mean(values), rel=1e-5)
    tiny.assert_close(tiny.gradients(policy.model), tiny.gradients(plain), 1e-4)


def test_a_rank_reads_its_own_share_of_the_rows(toy_dir, toy_renderer, tmp_path, videos, monkeypatch):
    """If every rank read all rows, the gradient would be the same at N times the cost."""
    cfg = config.load(SFTConfig, sft_config(tmp_path / "c.yaml", toy_dir, batch_rows=7))
    shares = []
    for rank in range(3):
        monkeypatch.setattr(sft, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(sft, "world_size", lambda: 3)
        batch = sft.Batches(cfg.data, cfg, videos, toy_renderer).make(0)
        shares.append(sum(len(micro.bundles) for micro in batch))
    assert shares == [3, 2, 2]


def test_the_loss_is_over_the_weights_of_all_ranks(monkeypatch):
    """A second rank has the same micro-batch and two more."""
    passes = []

    def policy(bundles):
        passes.append(bundles)
        n = 2 * len(bundles)
        return PolicyOutput(logprobs[:n], torch.zeros(n), torch.tensor([1.0, 3.0])[:n], torch.zeros(n))

    logprobs = torch.tensor([-1.0, -4.0], requires_grad=True)
    kinds = np.array(["prose", "answer"])
    row = Trajectory(NO_PROMPT, [5, 6], [1, 1], loss_weights=np.array([1, 3], np.float32))
    batch = [sft.MicroBatch([Bundle(NO_PROMPT, [row])], kinds)]
    monkeypatch.setattr(sft, "gather", lambda mine: [mine, 3 if isinstance(mine, int) else mine])
    monkeypatch.setattr(sft, "sum_over_ranks", lambda sums: {name: 2 * value for name, value in sums.items()})
    measured = batch_loss(policy, batch)
    assert [len(bundles) for bundles in passes] == [1, 0, 0]
    # L = (1 * 1 + 3 * 4) / 4. This rank's tokens give half of its gradient.
    assert measured == {"loss": 13 / 4, "tokens": 4, "loss_prose": 1, "loss_answer": 4}
    assert logprobs.grad.tolist() == [-1 / 8, -3 / 8]


# ------------------------------------------------------------------------------------------------ whole runs


def train(path: Path, toy_dir: Path, **changes) -> list[dict]:
    """Run sft.py in this process and return its metrics."""
    sft.main(config.load(SFTConfig, sft_config(path, toy_dir, **changes)))
    return metrics(path.with_suffix(""))


def test_each_held_out_row_is_asked_once_and_every_0_steps_means_after_the_last(toy_dir, tmp_path, monkeypatch):
    """Past bug: a few held-out rows were repeated to fill a batch."""
    few, batches, make = tmp_path / "few.parquet", [], sft.Batches.make
    pq.write_table(pq.read_table(toy_dir / "sft_val.parquet").slice(0, 3), few)
    monkeypatch.setattr(sft.Batches, "make", lambda *which: batches.append(make(*which)) or batches[-1])
    val = {"sources": [{"path": str(few)}], "video_root": str(toy_dir), "seed": 1}
    lines = train(tmp_path / "run.yaml", toy_dir, val=val, steps=2, eval_every=0, save_every=0)
    held_out, *trained = [
        [row.ids for micro in batch for bundle in micro.bundles for row in bundle.rows] for batch in batches
    ]
    assert len(set(map(str, held_out))) == len(held_out) == 3
    assert [*map(len, trained)] == [4, 4]
    assert ["val_loss" in line for line in lines] == [False, True]
    assert [path.name for path in (tmp_path / "run" / "state").iterdir()] == ["step-00000002"]


def test_the_loss_falls_and_everything_is_written_down(toy_dir, tmp_path):
    val = {"sources": [{"path": str(toy_dir / "sft_val.parquet")}]}
    lines = train(tmp_path / "run.yaml", toy_dir, val=val, eval_every=6)
    assert [line["step"] for line in lines] == list(range(12))
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5 and lines[-1]["val_loss"] < lines[5]["val_loss"]
    assert lines[1]["lr"] > lines[-1]["lr"] and all(line["grad_norm"] > 0 for line in lines)
    assert (tmp_path / "run" / "model" / "rollout.json").read_text() == '{"think_prefix": false}'  # for an evaluation


def test_an_ending_run_reports_no_rows(toy_dir, toy_renderer, tmp_path, capsys):
    """Past bug: when a run ended, the rows that its look-ahead was reading were reported as unusable."""
    cfg = config.load(SFTConfig, sft_config(tmp_path / "run.yaml", toy_dir))
    with Videos(1) as videos:
        batches = sft.Batches(cfg.data, cfg, videos, toy_renderer)
    with pytest.raises(RowError, match="closed"):
        batches.make(0)
    assert not batches.dataset.bad and "unusable" not in capsys.readouterr().err


def test_a_step_without_a_usable_row_is_refused_and_held_out_rows_without_one_have_no_loss(toy_dir, tmp_path):
    """Past bugs: a run without one usable row trained nothing and ended with "done". Its val_loss was 0."""
    assert batch_loss(None, []) == {"tokens": 0}
    data = {"sources": [{"path": str(toy_dir / "sft.parquet")}], "max_bad_fraction": 1.0}
    with pytest.raises(DataError, match="step 1: .*pack_tokens = 20"):
        train(tmp_path / "run.yaml", toy_dir, data=data, steps=4, pack_tokens=20)
    assert not (tmp_path / "run" / "model").exists()
