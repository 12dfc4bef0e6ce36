"""What makes the engine in this process fast changes nothing of what it samples."""

import numpy as np
import pytest
import torch
from test_engine import at_once, request
from tiny_checkpoint import noise
from transformers.cache_utils import DynamicLayer

from runtime import inprocess
from runtime.inprocess import InProcess, _Request, draw


def test_keys_written_in_place_are_those_that_a_copy_per_token_appends(checkpoint, renderer, monkeypatch):
    """To the bit, also after rows left, and where the room is used up; and only then do they move."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(20, 120, length).tolist() for length in (5, 17, 30, 30, 30, 30, 30, 30)]
    rows = [request(ids[i], [], seed=i, max_new_tokens=10 + 8 * i) for i in range(8)]
    places, update = [], inprocess._Keys.update

    def noted(layer, *new, **more):
        keys, values = update(layer, *new, **more)
        places.append((keys.shape[0], keys.data_ptr()))
        return keys, values

    samples = []
    for layer in (inprocess._Keys, DynamicLayer):
        monkeypatch.setattr(inprocess._Keys, "update", noted)
        monkeypatch.setattr(inprocess, "_Keys", layer)
        engine = InProcess(checkpoint, renderer)
        samples.append(at_once(engine, rows))
        engine.close()
    assert samples[0] == samples[1] and max(len(s.ids) for s in samples[0]) > 40
    of_a_block = [place for i, place in enumerate(places) if i % len(engine.model.model.language_model.layers) == 0]
    moves = sum(one != other for one, other in zip(of_a_block, of_a_block[1:]))
    assert moves <= 1 + 7 + 3 < len(of_a_block) / 3  # after the prompts, as rows leave, as rooms are used up


@pytest.mark.parametrize("vocabulary, temperature", [(7, 1.0), (300, 0.7), (151_936, 1.5)])
def test_evenly_spread_uniforms_draw_each_token_by_its_probability(vocabulary, temperature):
    """Exactly: of n evenly spread numbers, each token's interval holds n p of them, give or take one."""
    logits = 4 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(0))
    logits[[0, 3, -1]] = -torch.inf
    n = 1024 if vocabulary < 1000 else 64
    uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens, _ = draw(logits.expand(n, -1), torch.full((n,), temperature), uniforms)
    expected = n * (logits.double() / temperature).softmax(-1)
    assert ((torch.bincount(tokens, minlength=vocabulary) - expected).abs() <= 1).all()
    assert tokens.tolist() == sorted(tokens.tolist()) and logits[tokens].isfinite().all()


def test_short_prompts_of_any_length_are_one_batch(checkpoint, renderer):
    """Past bug: each batch held prompts of similar length, so 64 texts were decoded as five batches. Padding stays bounded."""
    engine = InProcess(checkpoint, renderer, max_batch_tokens=8000)
    asked = {"frames": (), "max_new_tokens": 32, "temperature": 0.0, "seed": 0, "stop": frozenset(), "shared": 0}
    for longest, batches in ((64, 1), (900, 8)):
        waiting = [_Request([0] * length, **asked) for length in np.linspace(8, longest, 64).astype(int)]
        cut = engine._batches(waiting)
        assert [r for batch in cut for r in batch] == waiting and len(cut) <= batches
        for batch in cut:
            lengths = [len(r.ids) for r in batch]
            assert len(batch) * (max(lengths) + 32) <= 8000
            assert len(batch) * max(lengths) - sum(lengths) <= 2000
    engine.close()


def test_prompts_that_nobody_shares_are_read_in_one_piece_and_short_clips_are_encoded_together(
    checkpoint, renderer, monkeypatch
):
    engine, segments, clips = InProcess(checkpoint, renderer), [], []
    layout, encode = inprocess.packing.KeyLayout, inprocess.packing.encode_frames
    monkeypatch.setattr(inprocess.packing, "KeyLayout", lambda s, *more: segments.extend(s) or layout(s, *more))
    monkeypatch.setattr(
        inprocess.packing, "encode_frames", lambda tower, some, *more: clips.append(some) or encode(tower, some, *more)
    )
    rows = []
    for i, frames in enumerate((1, 2, 1, 4, 3)):  # an overview has 4
        content = [noise(frames, seed=i, width=64 + 32 * (i % 2)), "What?"]
        rows.append(renderer.render([{"role": "user", "content": content}], generate=True).ids)
        rows[-1] = request(rows[-1], [content[0]], temperature=0.0, max_new_tokens=4)
    together = at_once(engine, rows)
    assert [s.prompt_stop for s in segments] == [s.prompt_start for s in segments] and len(segments) == 5
    assert sorted(sum(map(len, some)) for some in clips) == [3, 4, 4]
    for row, sample in zip(rows, together):
        alone = engine.generate(**row)
        assert alone.ids == sample.ids and np.allclose(alone.logprobs, sample.logprobs, atol=1e-5)
    engine.close()
