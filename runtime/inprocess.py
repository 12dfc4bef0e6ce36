"""inprocess.py: an engine in this process: transformers' model, a thread, and batches. For the toy, tests, one GPU.

    engine = InProcess(checkpoint, renderer)                     # see engine.py for the verbs

The requests of all waiting threads become one batch. The prompt that the rollouts of a group share is read once, its
keys are copied to each row, and ended rows leave. A batch starts when everybody whom `expect` announced waits. It is
sorted, and each row draws from its own seed, so a run can be repeated bit for bit unless a call outlasts `call_timeout`.

    columns of a row     padding, shared prompt | padding, the rest of its ids | sampled ids
    positions            M-RoPE, explicit: the padding does not count
    mask                 real tokens before it

On a GPU, prompts and rests are read as one sequence without padding, by the trainer's kernels (packing.py), and a row is
padding, its ids | sampled ids. There SDPA would be slow: with a mask it computes all scores in fp32, or, by cuDNN, plans
each new length of the keys anew.

Deliberately missing: requests that join a running batch, paged keys, tensor parallelism.

Shapes: B rows, L tokens of a step, H hidden, V vocabulary, M visual tokens, D DeepStack levels.
"""

import atexit
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AttentionInterface, DynamicCache, Qwen3VLForConditionalGeneration

from runtime.contract import Renderer, patchify
from runtime.engine import EngineError, Sample
from runtime.packing import (
    FrameLayout,
    KeyLayout,
    Segment,
    frames_flash_attention,
    group_packed_attention,
    join_frames,
    pick_kernel,
    rope_positions,
)
from runtime.video import Frames

CHUNK = 128  # tokens whose probabilities are summed in fp32 before they are drawn from; it divides Qwen's vocabulary


@dataclass
class _Request:
    """One call of `generate`, and the tokens that were sampled for it so far."""

    ids: list[int]
    frames: tuple[Frames, ...]
    max_new_tokens: int
    temperature: float
    seed: int
    stop: frozenset[int]
    shared: int  # leading ids that are read once for all requests that begin with them
    result: Future = field(default_factory=Future)  # of the Sample
    position: int = 0  # of the first sampled token
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self):
        # Prompts are the same if they have the same ids and show the very same frames.
        self.prompt = (tuple(self.ids[: self.shared]), tuple(id(clip.pixels) for clip in self.frames))
        self._random = np.random.Generator(np.random.Philox(self.seed))

    def next_uniform(self) -> float:
        # 24 random bits: in float64, their product with any total stays below the total (see draw).
        return float(self._random.random(dtype=np.float32))

    def take(self, token: int, logprob: float, version: int) -> None:
        self.sampled.append(token)
        self.logprobs.append(logprob)
        stopped = token in self.stop
        self.ended = stopped or len(self.sampled) >= self.max_new_tokens
        if self.ended:
            finish = "stop" if stopped else "length"
            self.result.set_result(Sample(self.sampled, self.logprobs, finish, version))


class InProcess:
    """transformers' model with a copy of the weights of its own."""

    def __init__(
        self, checkpoint: str | Path, renderer: Renderer, device="cpu", dtype="float32", max_batch_tokens=131_072
    ):
        AttentionInterface.register("grouped_sdpa", _grouped_sdpa)
        AttentionInterface.register("packed_then_matmul", _packed_then_matmul)
        AttentionInterface.register("frames_flash", frames_flash_attention)
        self.version = 0
        self.renderer, self.max_batch_tokens = renderer, max_batch_tokens
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(
            checkpoint,
            dtype=getattr(torch, dtype),
            attn_implementation={"text_config": "grouped_sdpa", "vision_config": "sdpa"},
        )
        self.model.model.visual.config._attn_implementation = "frames_flash"  # by its name alone, it may not be loaded
        self.model.to(device).eval().requires_grad_(False)
        on_gpu = self.model.device.type == "cuda"
        self.use_kernel(pick_kernel(self.model.device, self.model.dtype) if on_gpu else None)
        self._queue: list[_Request] = []
        self._expected, self.closed = 0, False
        self._changed = threading.Condition()
        self._weights = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread inside torch must not outlive the interpreter

    def use_kernel(self, kernel: str | None) -> None:
        """Choose how prompts are read: packed, by a kernel of packing.py, or (None) in padded rows, by SDPA with a mask."""
        self.kernel = kernel
        self.model.model.language_model.config._attn_implementation = "packed_then_matmul" if kernel else "grouped_sdpa"

    def generate(self, ids, frames, *, max_new_tokens, temperature, seed, stop=(), shared=0) -> Sample:
        shared = min(shared or len(ids), len(ids) - 1)  # the logits of the last one are sampled from
        stops = frozenset(self.renderer.ends_of_turn) | frozenset(stop)
        request = _Request(list(ids), tuple(frames), max_new_tokens, temperature, seed, stops, shared)
        with self._changed:
            if self.closed:
                raise EngineError("the engine is closed")
            self._queue.append(request)
            self._changed.notify_all()
        return request.result.result()

    def expect(self, change: int) -> None:
        with self._changed:
            self._expected += change
            self._changed.notify_all()

    def update_weights(self, path: str | Path, version: int, push: bool = True) -> None:
        state = {}
        for file in sorted(Path(path).glob("*.safetensors")):
            state |= load_file(file)
        with self._weights:
            missing, unknown = self.model.load_state_dict(state, strict=False)
            tied = self.model.all_tied_weights_keys
            if unknown or set(missing) - set(tied):
                raise EngineError(f"{path} is no snapshot of this model: missing {missing[:3]}, unknown {unknown[:3]}")
            self.version = version

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        self._thread.join()
        atexit.unregister(self.close)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.closed or (self._queue and len(self._queue) >= self._expected))
                waiting, self._queue, closed = self._queue, [], self.closed
            waiting.sort(key=lambda r: (r.shared, len(r.ids), r.seed))
            for batch in self._batches(waiting):
                try:
                    if closed:
                        raise EngineError("the engine was closed")
                    with self._weights:
                        _Batch(self, batch).run()
                except Exception as error:  # whatever it is, it belongs to the threads that wait for it
                    for request in batch:
                        if not request.result.done():
                            request.result.set_exception(error)
            if closed:
                return

    def _batches(self, waiting: list[_Request]) -> list[list[_Request]]:
        """Cut into batches within the token budget, of rows of similar length; a group stays together if it fits."""
        batches = []
        for request in waiting:
            if batches:
                rows = [*batches[-1], request]
                # Prompts, rests and answers are padded each to the longest of them.
                width = max(r.shared for r in rows)
                width += max(len(r.ids) - r.shared for r in rows)
                width += max(r.max_new_tokens for r in rows)
                if len(rows) * width <= self.max_batch_tokens and 2 * len(request.ids) <= 3 * len(rows[0].ids):
                    batches[-1].append(request)
                    continue
            batches.append([request])
        return batches


def _grouped_sdpa(module, query, key, value, attention_mask, scaling, **_):
    """transformers' attention interface, [B, heads, L, size] -> [B, L, heads, size]. Given a mask, its own SDPA first
    copies each key and value to all of its query heads, which takes most of a decoding step."""
    out = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


def _packed_then_matmul(module, query, key, value, attention_mask, scaling, key_layout: KeyLayout | None = None, **_):
    """The same on a GPU: a packed sequence by its layout, and after it one token per row, [B, heads, 1, size], by plain
    matrix products. `attention_mask`: which keys of a row are real, [B, 1, 1, L]."""
    if key_layout:
        return group_packed_attention(module, query, key, value, None, scaling, key_layout)
    # The query heads that share a key head stand beside each other: one product for them, and no copy of the keys.
    groups = query.shape[1] // key.shape[1]
    query = query[:, :, 0].unflatten(1, (-1, groups))  # [B, shared heads, groups, size]
    scores = (query @ key.transpose(-1, -2)).float() * scaling  # [B, shared heads, groups, L]
    weights = scores.masked_fill(~attention_mask, -torch.inf).softmax(-1)
    out = weights.to(value.dtype) @ value  # [B, shared heads, groups, size]
    return out.flatten(1, 2)[:, None], None


class _Batch:
    """Requests that are sampled together. Row layout: [padding, prompt | padding, rest of the ids | sampled ids]."""

    def __init__(self, engine: InProcess, requests: list[_Request]):
        self.engine, self.requests = engine, requests
        self.model, self.renderer = engine.model, engine.renderer
        self.device = self.model.device
        self.cache = DynamicCache(config=self.model.config.text_config)

    def run(self) -> None:
        with torch.inference_mode():
            # Each prompt, once for all requests that share it, and what follows it in each request.
            prompts, rests = {}, []
            for request in self.requests:
                if request.prompt not in prompts:
                    prompts[request.prompt] = _piece(request.ids[: request.shared], request.frames, 0, self.renderer)
                prompt = prompts[request.prompt]
                clips = request.frames[len(prompt.clips) :]
                rests.append(_piece(request.ids[request.shared :], clips, prompt.end, self.renderer))
                request.position = rests[-1].end
            number = {prompt: i for i, prompt in enumerate(prompts)}
            prompt_of = [number[request.prompt] for request in self.requests]

            read = self._read_packed if self.engine.kernel else self._read_padded
            self._sample(read(list(prompts.values()), rests, prompt_of))

    def _read_padded(self, prompts: list["_Piece"], rests: list["_Piece"], prompt_of: list[int]):
        """Read the prompts, copy the keys of each to the rows that share it, and read the rests. Return the hidden state of
        each row's last token [B, H]."""
        self.real = torch.zeros(len(prompts), 0, dtype=torch.bool, device=self.device)  # [B, L] no padding
        self._read(prompts)
        self._keep(prompt_of)
        return self._read(rests)

    def _read_packed(self, prompts: list["_Piece"], rests: list["_Piece"], prompt_of: list[int]):
        """Do the same without padding: read all pieces as one sequence, and take the keys of each row out of it."""
        # Lay the pieces out. A rest sees its prompt and itself, and both make a row.
        pieces = [*prompts, *rests]
        stops = np.cumsum([len(piece.ids) for piece in pieces]).tolist()
        spans = [(stop - len(piece.ids), stop) for piece, stop in zip(pieces, stops)]
        segments = [Segment(start, stop, start, start) for start, stop in spans[: len(prompts)]]
        rows = []
        for i, (start, stop) in zip(prompt_of, spans[len(prompts) :]):
            segments.append(Segment(start, stop, *spans[i]))
            rows.append(np.concatenate([np.arange(*spans[i]), np.arange(start, stop)]))

        # Read them.
        ids = torch.tensor([[token for piece in pieces for token in piece.ids]], device=self.device)  # [1, N]
        positions = np.concatenate([piece.positions for piece in pieces], axis=1)[:, None]  # [3, 1, N]
        embeds, visual = self._embed(ids, ids == self.renderer.image_pad, pieces)
        hidden = self.model.model.language_model(
            inputs_embeds=embeds,
            position_ids=torch.from_numpy(positions).to(self.device),
            past_key_values=self.cache,
            use_cache=True,
            key_layout=KeyLayout(segments, self.engine.kernel, self.device),
            **visual,
        ).last_hidden_state[0]  # [N, H]

        # Take each row's keys and values out of the sequence: [1, heads, N, size] -> [B, heads, L, size].
        longest = max(len(row) for row in rows)  # L; shorter rows are padded on the left
        places = np.zeros((len(rows), longest), np.int64)
        real = np.zeros((len(rows), longest), bool)
        for i, row in enumerate(rows):
            places[i, -len(row) :] = row
            real[i, -len(row) :] = True
        places, self.real = torch.from_numpy(places).to(self.device), torch.from_numpy(real).to(self.device)
        for layer in self.cache.layers:
            layer.keys = layer.keys[0][:, places].transpose(0, 1)
            layer.values = layer.values[0][:, places].transpose(0, 1)
        return hidden[places[:, -1]]

    def _read(self, pieces: list["_Piece"]):
        """Run one piece per row through the model and return the hidden state of each row's last token [B, H]."""
        longest = max(len(piece.ids) for piece in pieces)  # L; shorter pieces are padded on the left
        ids = np.full((len(pieces), longest), self.model.config.text_config.eos_token_id or 0)
        positions = np.zeros((3, len(pieces), longest), np.int64)
        real = np.zeros((len(pieces), longest), bool)
        for row, piece in enumerate(pieces):
            ids[row, -len(piece.ids) :] = piece.ids
            positions[:, row, -len(piece.ids) :] = piece.positions
            real[row, -len(piece.ids) :] = True
        ids, positions, real = (torch.from_numpy(x).to(self.device) for x in (ids, positions, real))
        embeds, visual = self._embed(ids, (ids == self.renderer.image_pad) & real, pieces)
        return self._forward(embeds, positions, real, **visual)

    def _embed(self, ids, pads, pieces: list["_Piece"]):
        """Return the embeddings [B, L, H] of ids and of the frames at their pads, and what the text model wants beside."""
        embeds = self.model.get_input_embeddings()(ids)
        clips = [clip for piece in pieces for clip in piece.clips]
        if not clips:
            return embeds, {}
        features = self._see(clips)  # [1 + D, M, H]
        embeds = embeds.masked_scatter(pads[..., None], features[0].to(embeds.dtype))
        return embeds, {"visual_pos_masks": pads, "deepstack_visual_embeds": list(features[1:])}

    def _forward(self, embeds, positions, real, **visual):
        self.real = torch.cat([self.real, real], dim=1)
        length = real.shape[1]
        mask = self.real[:, None, None, :].repeat(1, 1, length, 1)  # [B, 1, L, past + L]
        # Padding is not seen, but sees itself: a softmax over nothing would be nan.
        itself = torch.eye(length, dtype=torch.bool, device=self.device)
        mask[..., -length:] = mask[..., -length:].tril() | itself
        return self.model.model.language_model(
            inputs_embeds=embeds,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            **visual,
        ).last_hidden_state[:, -1]

    def _see(self, clips: list[Frames]):
        """Run the vision tower: [1 + D, M, H], embeddings and DeepStack levels. Clip by clip, which bounds the memory."""
        contract = self.renderer.contract
        seen = []
        for clip in clips:
            patches, grid = patchify([clip], contract.patch, contract.merge)
            options = {}
            if self.engine.kernel in ("flash", "varlen"):
                options = {"frame_layout": FrameLayout(self.engine.kernel, int(grid[0, 1:].prod()))}
            patches, grid = (
                torch.from_numpy(patches).to(self.device),
                torch.from_numpy(join_frames(grid)).to(self.device),
            )
            out = self.model.model.visual(patches.to(self.model.dtype), grid_thw=grid, **options)
            seen.append(torch.stack([out.pooler_output, *out.deepstack_features]))
        return torch.cat(seen, dim=1)

    def _keep(self, rows: list[int]) -> None:
        """Make these the rows of the batch: copies for the rollouts of a group, or those that have not ended."""
        index = torch.tensor(rows, device=self.device)
        self.cache.batch_select_indices(index)
        self.real = self.real[index]

    def _sample(self, hidden) -> None:
        """Sample one token per row at a time, until all rows have ended."""
        rows = self.requests
        while not self.engine.closed:
            tokens, logprobs = self._choose(hidden, rows)
            for row, token, logprob in zip(rows, tokens, logprobs):
                if not row.ended:
                    row.take(token, logprob, self.engine.version)
            alive = [i for i, row in enumerate(rows) if not row.ended]
            if not alive:
                return
            # Dropping rows copies all keys, so it waits until an eighth of them have ended.
            if len(alive) <= 7 * len(rows) // 8:
                self._keep(alive)
                rows = [rows[i] for i in alive]
            # Read the new tokens.
            ids = torch.tensor([[row.sampled[-1]] for row in rows], device=self.device)
            at = torch.tensor([[row.position + len(row.sampled) - 1] for row in rows], device=self.device)
            real = torch.ones(len(rows), 1, dtype=torch.bool, device=self.device)
            hidden = self._forward(self.model.get_input_embeddings()(ids), at.expand(3, -1, -1), real)
        raise EngineError("the engine was closed")

    def _choose(self, hidden, rows: list[_Request]) -> tuple[list[int], list[float]]:
        """Draw the next token of each row, and return the tokens and their log-probs."""
        logits = self.model.lm_head(hidden).float()  # [B, V]
        logits[:, self.renderer.never_sampled] = -torch.inf
        temperatures = torch.tensor([row.temperature for row in rows], device=self.device)
        uniforms = torch.tensor([row.next_uniform() for row in rows], dtype=torch.float64, device=self.device)
        # On a CPU a few rows at a time, whose 150,000 logits then stay in its cache.
        at_once = 4 if logits.device.type == "cpu" else len(rows)
        tokens, logprobs = [], []
        for part in zip(logits.split(at_once), temperatures.split(at_once), uniforms.split(at_once)):
            drawn, scores = draw(*part)
            tokens += drawn.tolist()
            logprobs += scores.tolist()
        return tokens, logprobs


def draw(logits, temperatures, uniforms):
    """Draw one token per row [B] from softmax(logits / temperature), greedily where the temperature is 0, and return it
    with its log-prob. A row's token depends on nothing but its logits, temperature and uniform, a number in [0, 1).

    The token is where the cumulative distribution passes the row's uniform. It is found in two steps, the chunk and the
    place in the chunk, so that sums in float64 are short."""
    tau = torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    scaled = F.pad(logits / tau, (0, -logits.shape[1] % CHUNK), value=-torch.inf)
    top = scaled.amax(-1, keepdim=True)
    weights = (scaled - top).exp_().unflatten(-1, (-1, CHUNK))  # [B, chunks, CHUNK], the largest is 1
    ends = weights.sum(-1).double().cumsum(-1)  # [B, chunks]
    total = ends[:, -1:]
    # The chunk in which the point lies.
    point = uniforms[:, None] * total
    chunk = (ends <= point).sum(-1, keepdim=True)  # [B, 1]
    start = F.pad(ends, (1, 0)).gather(-1, chunk)
    # The place in it. Its own sum may differ from the chunk's in the last bits, and the point must stay below it.
    inside = weights.gather(1, chunk[..., None].expand(-1, -1, CHUNK))[:, 0].double().cumsum(-1)  # [B, CHUNK]
    below = torch.nextafter(inside[:, -1:], torch.zeros_like(start))
    place = (inside <= torch.minimum(point - start, below)).sum(-1, keepdim=True)
    tokens = chunk * CHUNK + place
    if not temperatures.all():
        tokens = torch.where(temperatures[:, None] > 0, tokens, scaled.argmax(-1, keepdim=True))
    logprobs = scaled.gather(-1, tokens).double() - top - total.log()
    return tokens[:, 0], logprobs[:, 0].float()


@dataclass
class _Piece:
    """Consecutive ids of one row, with all of the clips that stand among them."""

    ids: list[int]
    clips: tuple[Frames, ...]
    positions: np.ndarray  # [3, len(ids)]
    end: int  # position after the last id


def _piece(ids: list[int], clips: tuple[Frames, ...], position: int, renderer: Renderer) -> _Piece:
    """Place ids from `position` on, and take as many of the clips as they have pads for."""
    cell = renderer.contract.cell
    pads = ids.count(renderer.image_pad)  # that belong to no clip yet
    shown = 0  # clips
    sizes = []  # of each image, (rows, columns) of visual tokens
    while pads > 0 and shown < len(clips):
        n, height, width, _ = clips[shown].pixels.shape
        rows, columns = height // cell, width // cell
        sizes += [(rows, columns)] * n
        pads -= n * rows * columns
        shown += 1
    positions, end, _ = rope_positions(np.array(ids, np.int64), sizes, renderer.image_pad, position)
    return _Piece(ids, clips[:shown], positions, end)
