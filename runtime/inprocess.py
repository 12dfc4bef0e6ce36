"""inprocess.py: an engine in this process: a transformers model that samples batches in a thread. For the toy, tests, one GPU.

    engine = InProcess(checkpoint, renderer)                     # see engine.py for the methods

A batch starts when every announced caller waits for its tokens (engine.py):

    prefill   run all prompts as one packed sequence; a prompt that several requests share appears once (packing.py)
    rows      copy the keys and values to one row per request, padded on the left
    decode    sample one token per row and step until all rows have ended; drop rows that have ended

Requests are sorted before they are batched, and each row has its own random seed. On a CPU a run is therefore repeatable
bit for bit, unless a call takes longer than `call_timeout`.

Deliberately missing: requests that join a running batch, paged keys, tensor parallelism, and a CUDA stream of its own. On
one GPU, sampling and training therefore take turns, even with `staleness: 1`.

Letters in shapes, as in policy.py: L tokens of the packed prompts, M visual tokens, H hidden, D DeepStack levels. Also B
rows and V words of the vocabulary. `keys` is the number of keys of the longest row.
"""

import atexit
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AttentionInterface, AutoModelForImageTextToText, Cache, DynamicLayer

from episode import NO_PROMPT, Prompt, Trajectory
from runtime.checkpoints import published_names, refuse_quantized, weight_files
from runtime.engine import Engine, EngineError, Sample
from runtime.packing import Bundle, pack_bundles
from runtime.policy import KeyLayout, Model, encode_frames, matmul_fp32, pick_kernel, prepare_tower, run_text_model
from runtime.render import Renderer
from runtime.video import Clip
from runtime.visual import MERGE, read_json


@dataclass
class Request:
    """One call of `generate`, and the tokens sampled for it so far."""

    prompt: Prompt
    ids: list[int]  # after the prompt
    clips: list[Clip]  # those of `ids`
    max_new_tokens: int
    temperature: float
    seed: int
    stop: frozenset[int]
    random: np.random.Generator = field(init=False)
    result: Future = field(default_factory=Future)  # will hold the Sample
    position: int = 0  # M-RoPE position of the first sampled token
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self):
        self.random = np.random.Generator(np.random.Philox(self.seed))

    def __len__(self) -> int:
        return len(self.prompt.ids) + len(self.ids)

    @property
    def n_shared(self) -> int:
        """The number of ids that are prefilled once for all requests with this prompt. The last id of all is left out: the first
        token is sampled from its logits."""
        return min(len(self.prompt.ids), len(self) - 1)

    def append_sampled(self, token: int, logprob: float, version: int) -> None:
        self.sampled.append(token)
        self.logprobs.append(logprob)
        stopped = token in self.stop
        self.ended = stopped or len(self.sampled) >= self.max_new_tokens
        if self.ended:
            self.result.set_result(Sample(self.sampled, self.logprobs, "stop" if stopped else "length", version))


class InProcess(Engine):
    """A transformers model with its own copy of the weights."""

    def __init__(
        self, checkpoint: str | Path, renderer: Renderer, device="cpu", dtype="float32", max_batch_tokens=131_072
    ):
        AttentionInterface.register("packed_then_matmul", _packed_then_matmul)
        self.version = 0
        self.renderer = renderer
        self.max_batch_tokens = max_batch_tokens
        if "quantization_config" not in (read_json(Path(checkpoint) / "config.json") or {}):
            refuse_quantized(Path(checkpoint))  # transformers reads scales only if the config says how
        attention = {"text_config": "packed_then_matmul", "vision_config": "sdpa"}
        self.model: Model = AutoModelForImageTextToText.from_pretrained(  # type: ignore[assignment]  # one of MODELS
            checkpoint, dtype=getattr(torch, dtype), attn_implementation=attention, trust_remote_code=False
        )
        prepare_tower(self.model.model.visual)
        self.model.to(device).eval().requires_grad_(False)
        self.kernel = pick_kernel(self.model.device, self.model.dtype)
        self.closed = False
        self._queue: list[Request] = []
        self._announced = 0  # threads that are about to call `generate`; a batch waits for all of them
        self._changed = threading.Condition()  # guards the three above
        self._weights_lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread inside torch must not outlive the interpreter

    def generate(self, prompt, ids, clips, *, max_new_tokens, temperature, seed, stop=()) -> Sample:
        stops = frozenset(self.renderer.ends_of_turn) | frozenset(stop)
        request = Request(prompt, list(ids), list(clips), max_new_tokens, temperature, seed, stops)
        with self._changed:
            if self.closed:
                raise EngineError("the engine is closed")
            self._queue.append(request)
            self._changed.notify_all()
        return request.result.result()

    def announce(self, change: int) -> None:
        with self._changed:
            self._announced += change
            self._changed.notify_all()

    def update_weights(self, path: str | Path, version: int, push: bool = True) -> None:
        stored: dict[str, Tensor] = {}
        for file in weight_files(Path(path)):
            stored |= load_file(file)
        names = published_names(self.model)  # a tied head is listed once
        with self._weights_lock, torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(stored[names[name]])
            self.version = version

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        self._thread.join()
        atexit.unregister(self.close)

    def _serve(self) -> None:
        """Sample batches one after another, in the engine's thread."""
        closed = False
        while not closed:
            with self._changed:
                self._changed.wait_for(lambda: self.closed or (self._queue and len(self._queue) >= self._announced))
                requests = self._queue
                self._queue = []
                closed = self.closed
            for batch in cut_into_batches(requests, self.max_batch_tokens):
                try:
                    if closed:
                        raise EngineError("the engine was closed")
                    with self._weights_lock:
                        _Batch(self, batch).sample()
                except Exception as error:  # the waiting threads raise it, even if it is a bug of ours
                    for request in batch:
                        if not request.result.done():
                            request.result.set_exception(error)


def cut_into_batches(requests: Sequence[Request], max_tokens: int) -> list[list[Request]]:
    """Sort requests and cut them into batches of at most `max_tokens` keys, including padding and tokens still to be sampled.
    Up to a quarter can be padding: a tighter limit needs more batches, and each batch reads the weights once per token."""
    batches: list[list[Request]] = []
    for request in sorted(requests, key=lambda r: (r.n_shared, len(r), r.seed)):
        if batches:
            rows = [*batches[-1], request]
            longest = max(len(r) for r in rows)
            max_new = max(r.max_new_tokens for r in rows)
            padding = sum(longest - len(r) for r in rows)
            if len(rows) * (longest + max_new) <= max_tokens and padding <= max_tokens // 4:
                batches[-1].append(request)
                continue
        batches.append([request])
    return batches


class _Batch:
    """Requests that are sampled together."""

    def __init__(self, engine: InProcess, requests: Sequence[Request]):
        self.engine = engine
        self.model = engine.model
        self.renderer = engine.renderer
        self.bundles, self.requests = bundle_requests(requests)
        self.device = self.model.device
        self.cache = Cache(layer_class_to_replicate=_Keys)

    @torch.inference_mode()
    def sample(self) -> None:
        """Sample one token per row and step until all rows have ended."""
        hidden, is_real_key = self._prefill()
        rows = self.requests
        while not self.engine.closed:
            tokens, logprobs = self._next_tokens(hidden, rows)
            for row, token, logprob in zip(rows, tokens, logprobs):
                if not row.ended:
                    row.append_sampled(token, logprob, self.engine.version)
            alive = [i for i, row in enumerate(rows) if not row.ended]
            if not alive:
                return

            # Dropping rows copies all keys, so drop them only once an eighth of the rows have ended.
            if len(alive) <= 7 * len(rows) // 8:
                kept = torch.tensor(alive, device=self.device)
                self.cache.batch_select_indices(kept)
                is_real_key = is_real_key[kept]
                rows = [rows[i] for i in alive]

            # Run the model on the new tokens.
            ids = torch.tensor([[row.sampled[-1]] for row in rows], device=self.device)  # [B, 1]
            positions = torch.tensor([[row.position + len(row.sampled) - 1] for row in rows], device=self.device)
            is_real_key = F.pad(is_real_key, (0, 1), value=True)
            hidden = self.model.model.language_model(
                inputs_embeds=self.model.get_input_embeddings()(ids),
                position_ids=positions.expand(3, -1, -1),  # time, height, width: equal for text
                attention_mask=is_real_key[:, None, None],
                past_key_values=self.cache,
                use_cache=True,
            ).last_hidden_state[:, -1]
        raise EngineError("the engine was closed")

    def _next_tokens(self, hidden: Tensor, rows: list[Request]) -> tuple[list[int], list[float]]:
        """Sample the next token of each row. Return the tokens and their log-probs."""
        logits = matmul_fp32(hidden, self.model.lm_head.weight.t())  # [B, V]
        logits[:, self.renderer.never_sampled] = -torch.inf
        temperatures = torch.tensor([row.temperature for row in rows], device=self.device)
        # Each has 24 random bits. In float64, its product with any total therefore stays below the total (see `sample_tokens`).
        uniforms = [float(row.random.random(dtype=np.float32)) for row in rows]
        uniforms = torch.tensor(uniforms, dtype=torch.float64, device=self.device)
        tokens, logprobs = sample_tokens(logits, temperatures, uniforms)
        return tokens.tolist(), logprobs.tolist()

    def _prefill(self) -> tuple[Tensor, Tensor]:
        """Prefill all prompts. Return the hidden states [B, H] that predict each row's first token, and the real keys (True)
        among the rows' keys [B, keys]. The others are padding."""
        contract = self.renderer.contract

        # 1. Pack the prompts into one sequence.
        packed = pack_bundles(self.bundles, self.renderer.image_pad, contract.cell)

        # 2. Encode the frames. Short clips share a call of at most `overview_frames` frames, which bounds the memory.
        parts: list[list[Clip]] = []
        for bundle in self.bundles:
            for clip in bundle.clips:
                if not parts or sum(map(len, parts[-1])) + len(clip) > contract.overview_frames:
                    parts.append([])
                parts[-1].append(clip)
        tower, kernel = self.model.model.visual, self.engine.kernel
        features = [encode_frames(tower, part, contract.patch, MERGE, kernel) for part in parts]
        visual = torch.cat(features, dim=1) if features else None  # [1 + D, M, H]

        # 3. Run the text model. It leaves the keys and values of the sequence in the cache.
        cache = {"past_key_values": self.cache, "use_cache": True}
        hidden = run_text_model(self.model, packed, visual, kernel, **cache)  # [L, H]

        # 4. Give each request its own row: the indices of its keys in the sequence, padded on the left.
        segments = [segment for segment in packed.segments if not segment.is_prompt]
        longest = max(len(segment.key_positions()) for segment in segments)
        places = np.zeros((len(segments), longest), np.int64)  # [B, keys]
        real = np.zeros((len(segments), longest), bool)  # [B, keys]
        for i, segment in enumerate(segments):
            keys = segment.key_positions()
            places[i, -len(keys) :] = keys
            real[i, -len(keys) :] = True
            self.requests[i].position = int(packed.positions[:, segment.stop - 1].max()) + 1
        places = torch.from_numpy(places).to(self.device)
        for layer in self.cache.layers:  # [1, heads, L, size] -> [B, heads, keys, size]
            assert isinstance(layer, _Keys)
            layer.keys = layer.keys[0][:, places].transpose(0, 1)
            layer.values = layer.values[0][:, places].transpose(0, 1)
            layer.length = longest
        return hidden[places[:, -1]], torch.from_numpy(real).to(self.device)


def bundle_requests(requests: Sequence[Request]) -> tuple[list[Bundle], list[Request]]:
    """Return one bundle per shared prompt, with a row without targets per request, and the requests in the order of the rows."""
    sharing: dict[tuple[Prompt, int], list[Request]] = {}
    for request in requests:
        sharing.setdefault((request.prompt, request.n_shared), []).append(request)

    bundles = []
    for (prompt, n_shared), members in sharing.items():
        shared = Prompt(prompt.ids[:n_shared], prompt.clips)
        if len(members) == 1:  # it has nobody to share with: it is one row of an empty prompt
            shared = NO_PROMPT
        bundle = Bundle(shared, [])
        for request in members:
            ids = (prompt.ids + request.ids)[len(shared.ids) :]
            clips = [*prompt.clips, *request.clips][len(shared.clips) :]
            bundle.rows.append(Trajectory(shared, ids, [0] * len(ids), call_clips=clips))
        bundles.append(bundle)
    return bundles, [request for members in sharing.values() for request in members]


def sample_tokens(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row [B] from softmax(logits / temperature), or take the argmax where the temperature is 0. Return
    tokens and log-probs. A token depends only on its row's logits, temperature and uniform number in [0, 1)."""
    tau = torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    scaled = logits / tau  # [B, V]
    top = scaled.amax(-1, keepdim=True)
    # Take the token at which the cumulative distribution (here not normalised) passes the row's uniform number.
    ends = (scaled - top).exp_().cumsum(-1, dtype=torch.float64)  # [B, V]
    total = ends[:, -1:]
    tokens = torch.searchsorted(ends, uniforms[:, None] * total, right=True)  # [B, 1]
    if not temperatures.all():
        tokens = torch.where(temperatures[:, None] > 0, tokens, scaled.argmax(-1, keepdim=True))
    logprobs = scaled.gather(-1, tokens).double() - top - total.log()
    return tokens[:, 0], logprobs[:, 0].float()


# ------------------------------------------------------------------------------------------------ keys and attention


class _Keys(DynamicLayer):
    """One block's keys and values: first of the packed prompts, then of one row per request. `keys` and `values` have spare
    room after `length`, so a new token is written in place. They are copied only when that room is used up."""

    keys: Tensor
    values: Tensor
    length: int  # keys per row; set when the rows are made

    def update(self, key_states, value_states, *_, **__):
        if not self.is_initialized:
            return super().update(key_states, value_states)
        if self.length == self.keys.shape[2]:
            room = (0, 0, 0, self.length // 8 + 16)
            self.keys = F.pad(self.keys, room)
            self.values = F.pad(self.values, room)
        self.keys[:, :, self.length] = key_states[:, :, 0]
        self.values[:, :, self.length] = value_states[:, :, 0]
        self.length += 1
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


def _packed_then_matmul(module, query, key, value, attention_mask, scaling, key_layout: KeyLayout | None = None, **_):
    """Implement transformers' attention interface: queries [B, heads, tokens, size] -> [B, tokens, heads, size].

    The prefill has a `key_layout`. Decoding has one token per row and uses plain matrix products: on a GPU, SDPA with a mask
    would compute all scores in fp32, or through cuDNN make a new plan for each number of keys. `attention_mask`
    [B, 1, 1, keys] marks the real keys."""
    if key_layout:
        return key_layout.attend(query, key, value, scaling), None
    # Query heads that share a key head are adjacent, so one product serves them without a copy of the keys.
    groups = query.shape[1] // key.shape[1]
    query = query[:, :, 0].unflatten(1, (-1, groups))  # [B, key heads, groups, size]
    if key.is_cuda:  # keep bf16 products in fp32 until the softmax, as the trainer's kernel does
        flat = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), out_dtype=torch.float32)
        scores = flat.unflatten(0, query.shape[:2])
    else:
        scores = (query @ key.transpose(-1, -2)).float()
    scores = scores * scaling  # [B, key heads, groups, keys]
    weights = scores.masked_fill(~attention_mask, -torch.inf).softmax(-1)
    out = weights.to(value.dtype) @ value  # [B, key heads, groups, size]
    return out.flatten(1, 2)[:, None], None
