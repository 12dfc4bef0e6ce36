"""Tiny random models of both families, without a tokenizer (`write`) or with one (`build`); random bundles and requests; and two
oracles: plain transformers for log-probs, and a reference implementation of the GPU's attention kernels."""

import json
import os
import shutil
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig, PreTrainedModel

from episode import NO_PROMPT, Prompt, Trajectory
from runtime.distributed import init_distributed, rank, world_size
from runtime.engine import Sample
from runtime.packing import Bundle
from runtime.prompts import subagent_system_prompt, system_prompt
from runtime.render import CHAT_TEMPLATE, Renderer, load_tokenizer, template_with_tools
from runtime.video import Clip
from runtime.visual import VisualContract, patchify
from study import toy
from tools import TOOLS

# An odd vocabulary: two ranks hold different numbers of its rows.
VOCABULARY, IMAGE_PAD, VIDEO_PAD, VISION_START, VISION_END = 129, 120, 121, 122, 123
NEVER_SAMPLED = (IMAGE_PAD, VIDEO_PAD, VISION_START, VISION_END)
TOKENS = {"<|endoftext|>": 0, "<|im_end|>": 1, "<|image_pad|>": IMAGE_PAD, "<|video_pad|>": VIDEO_PAD}
TOKENS |= {"<|vision_start|>": VISION_START, "<|vision_end|>": VISION_END}

TOOL = "crop_video"  # what scripted agents call
CELL = {"qwen3_vl": 32, "qwen2_5_vl": 28}  # pixels of a visual token's side, by family
# Four tokens per frame: with one, M-RoPE positions are plain positions, and the tests would prove nothing.
CONTRACT = VisualContract(frame_pixels=64 * 64, overview_frames=4, crop_max_frames=4)
# For Qwen2.5-VL. A frame is 2 x 3 tokens, and windows are 2 x 2, so it has two windows.
CONTRACT_14 = VisualContract(patch=14, frame_pixels=2 * 3 * 28 * 28, overview_frames=4, crop_max_frames=4)


class Pieces:
    """A renderer whose tokens are the given strings. Strings that begin with `<|` end a turn."""

    def __init__(self, *pieces: str):
        self.pieces, self.ends_of_turn = pieces, [i for i, piece in enumerate(pieces) if piece.startswith("<|")]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.pieces[i] for i in ids)

    def offsets(self, ids: list[int]) -> list[tuple[int, int]]:
        ends = np.cumsum([len(self.pieces[i]) for i in ids]).tolist()
        return list(zip([0, *ends], ends))


def of_family(model_type: str, mrope_section: list[int], head_dim: int) -> tuple[dict, dict]:
    """Return the settings of the text model and of the tower that only this family has."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": mrope_section}
    if model_type == "qwen3_vl":
        # With one level of DeepStack, as in the toy, a wrong order would go unnoticed.
        tower = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        return {"head_dim": head_dim, "rope_parameters": rope | {"mrope_interleaved": True}}, tower
    return {"rope_parameters": rope}, {"window_size": 56, "fullatt_block_indexes": [1]}  # windows of 2 x 2 tokens


def write(path: Path, tied=True, text: dict | None = None, vision: dict | None = None, model_type="qwen3_vl") -> Path:
    """Write a checkpoint of random weights that are large enough to make attention far from uniform."""
    own_text, own_tower = of_family(model_type, [4, 2, 2], head_dim=16)
    sizes = {"vocab_size": VOCABULARY, "intermediate_size": 96, "num_hidden_layers": 3} | own_text
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    sizes |= {"hidden_size": 48 if model_type == "qwen3_vl" else 64}
    tower = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2} | own_tower
    sizes |= {"tie_word_embeddings": tied} | (text or {})
    tower |= {"out_hidden_size": sizes["hidden_size"]} | (vision or {})
    model = random_model(model_type, sizes, tower, TOKENS, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= 4
            else:  # with their default values, a missing norm or bias would go unnoticed
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return path


def random_model(model_type: str, text: dict, vision: dict, ids: dict[str, int], seed: int) -> PreTrainedModel:
    """Build a model of the real class. `ids`: special token -> id."""
    config = AutoConfig.for_model(
        model_type,
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=text["tie_word_embeddings"],
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    model.generation_config = GenerationConfig(eos_token_id=[ids["<|im_end|>"]], pad_token_id=ids["<|endoftext|>"])
    return model


def build(path: Path, seed=0, model_type="qwen3_vl", contract=None, vision: dict | None = None, **sizes) -> Path:
    """Write a checkpoint with a tokenizer and a chat template. `contract`: None is the family's."""
    prompts = [system_prompt(with_tools=True), subagent_system_prompt()]
    tokenizer = toy.build_tokenizer([*prompts, CHAT_TEMPLATE, json.dumps(TOOLS[TOOL].schema)], 512)
    contract = contract or (CONTRACT if model_type == "qwen3_vl" else CONTRACT_14)
    own_text, own_tower = of_family(model_type, [6, 5, 5], head_dim=32)
    text = {"vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192} | own_text
    tower = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": contract.patch}
    tower |= own_tower
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in toy.ADDED}
    text |= {"tie_word_embeddings": True, "bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]}
    text |= sizes
    tower |= {"out_hidden_size": text["hidden_size"]} | (vision or {})
    toy.write_checkpoint(path, random_model(model_type, text, tower, ids, seed), tokenizer, contract)
    if model_type == "qwen2_5_vl":
        file = path / "video_preprocessor_config.json"
        file.write_text(file.read_text().replace("Qwen3VLVideoProcessor", "Qwen2VLVideoProcessor"))
    return path


def renderer(path: Path) -> Renderer:
    return Renderer(load_tokenizer(path), VisualContract.load(path))


def as_published(path, folder):
    """Write a checkpoint as Qwen publishes it: a flat config.json, and a chat template without tools."""
    shutil.copytree(path, folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"]}
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    for name in ("model_type", "architectures"):
        text.pop(name, None)
    (folder / "config.json").write_text(json.dumps(text | config))
    (folder / "chat_template.jinja").write_text(STOCK_TEMPLATE)
    return folder


# It has the same form as Qwen2.5-VL's: a system turn of its own if there is none, images, and no tools.
STOCK_TEMPLATE = """
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif -%}
<|im_start|>{{ message.role }}\n{% if message.content is string %}{{ message.content }}<|im_end|>\n{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif -%}
{%- endfor %}<|im_end|>\n{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}
""".replace("\\n", "{{ '\\n' }}").strip()


def plain(path: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)


def noise(count: int, seed: int = 0, width: int = 64, height: int = 64) -> Clip:
    pixels = np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    return Clip(pixels, tuple(map(float, range(count))))


def piece(rng: np.random.Generator, length: int, images: int, cell: int = 32) -> Prompt:
    """Make `length` text tokens with images of different sizes between them."""
    ids, clips = rng.integers(2, IMAGE_PAD, length).tolist(), []
    for at in sorted(rng.integers(0, length + 1, images).tolist(), reverse=True):
        rows, columns = rng.integers(2, 4, 2).tolist()  # at least two tokens a side: with one, M-RoPE is degenerate
        pixels = rng.integers(0, 256, (1, cell * rows, cell * columns, 3), dtype=np.uint8)
        clips.insert(0, Clip(pixels, (0.0,)))
        ids[at:at] = [VISION_START, *[IMAGE_PAD] * (rows * columns), VISION_END]
    return Prompt(ids, clips)


def bundle(
    rng: np.random.Generator, prompt: tuple[int, int], rows: list[tuple[int, int]], cell: int = 32
) -> tuple[Bundle, list[Prompt]]:
    """Make a bundle from the numbers (text tokens, images) of its prompt and rows. Also return each row with its prompt."""
    start, ends = piece(rng, *prompt, cell), [piece(rng, *sizes, cell) for sizes in rows]
    masks = []
    for end in ends:
        mask = [int(token < IMAGE_PAD and rng.random() < 0.7) for token in end.ids]
        if mask and not start.ids:
            mask[0] = 0
        masks.append(mask)
    continued = [Trajectory(start, end.ids, mask, call_clips=end.clips) for end, mask in zip(ends, masks)]
    return Bundle(start, continued), [Prompt(row.all_ids, row.clips) for row in continued]


def text_bundle(prompt: list[int], *rows: list[int]) -> Bundle:
    """Make a bundle without images whose rows are all targets."""
    shared = Prompt(prompt, [])
    return Bundle(shared, [Trajectory(shared, row, [1] * len(row)) for row in rows])


def alone(ids: list[int], mask: list[int], clips: Sequence[Clip] = ()) -> Bundle:
    """Make a bundle of one row that continues an empty prompt."""
    row = Trajectory(NO_PROMPT, ids, mask, call_clips=list(clips))
    return Bundle(NO_PROMPT, [row])


def random_bundles(seed: int, images: bool = True, cell: int = 32) -> tuple[list[Bundle], list[list[Prompt]]]:
    rng = np.random.default_rng(seed)

    def some(limit):
        return int(rng.integers(0, limit + 1)) if images else 0

    made = []
    for _ in range(rng.integers(1, 4)):
        rows = [(int(rng.integers(0, 14)), some(1)) for _ in range(rng.integers(1, 5))]
        made.append(bundle(rng, (int(rng.integers(0, 20)), some(3)), rows, cell))
    return [b for b, _ in made], [rows for _, rows in made]


def plain_inputs(model, ids: list[int], clips: list[Clip]) -> dict[str, torch.Tensor]:
    """Return plain transformers' inputs for one row."""
    row = torch.tensor([ids])
    given = {"input_ids": row, "attention_mask": torch.ones_like(row)}
    given["mm_token_type_ids"] = (row == model.config.image_token_id).int()
    if clips:
        tower = model.config.vision_config
        given["pixel_values"], given["image_grid_thw"] = patchify(clips, tower.patch_size, tower.spatial_merge_size)
    return given


def plain_distributions(model, never_sampled, ids: list[int], clips: list[Clip], temperature=1.0) -> torch.Tensor:
    """Return the log-probs after each token of a row over the vocabulary without the banned ids, from one plain forward: [L, V]."""
    logits = model(**plain_inputs(model, ids, clips)).logits[0].float()
    return (logits.index_fill(1, torch.tensor(never_sampled), -1e9) / (temperature or 1.0)).log_softmax(-1)


def plain_logprobs(model, never_sampled, ids: list[int], clips: list[Clip], temperature: float = 1.0) -> torch.Tensor:
    """Return log pi of every token of a row except the first: [L - 1]."""
    logprobs = plain_distributions(model, never_sampled, ids, clips, temperature)[:-1]
    return logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Compare gradients by the norm of each difference."""
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert (found[name] - wanted).norm() <= tolerance * wanted.norm() + 1e-8, name


def plain_scores(model, bundles, rows_of, temperature: float = 1.0):
    """Return what `policy(bundles)` must return, from each row alone."""
    logprobs, entropies = [torch.zeros(0)], [torch.zeros(0)]
    for b, rows in zip(bundles, rows_of):
        for target, row in zip(b.rows, rows):
            at = [len(b.prompt.ids) + j for j, m in enumerate(target.mask) if m]
            if at:
                log = plain_distributions(model, NEVER_SAMPLED, row.ids, row.clips, temperature)[[j - 1 for j in at]]
                logprobs.append(log[range(len(at)), [row.ids[j] for j in at]])
                entropies.append(-(log.exp() * log).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def varlen_reference(q, k, v, query_ends, key_ends, longest_query, longest_key, causal):
    """Compute variable-length attention as the kernels define it: per segment, causal from the bottom right."""
    out = torch.zeros_like(q)
    groups = q.shape[1] // k.shape[1]
    for i in range(len(query_ends) - 1):
        rows, columns = slice(*query_ends[i : i + 2].tolist()), slice(*key_ends[i : i + 2].tolist())
        n, m = rows.stop - rows.start, columns.stop - columns.start
        assert n <= longest_query and m <= longest_key
        keys, values = (x[columns].repeat_interleave(groups, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * q.shape[-1] ** -0.5
        if causal:
            hidden = torch.arange(m)[None] > torch.arange(n)[:, None] + m - n
            scores = scores.masked_fill(hidden, -torch.inf)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out


def flash_attn_2(q, *args, causal, softmax_scale):
    assert softmax_scale == q.shape[-1] ** -0.5
    return varlen_reference(q, *args, causal)


def torch_varlen(q, *args, window_size, scale, enable_gqa):
    assert window_size in ((-1, 0), (-1, -1)) and scale == q.shape[-1] ** -0.5 and enable_gqa
    return varlen_reference(q, *args, window_size == (-1, 0))


def question(renderer, clips: list, text: str) -> list[int]:
    return renderer.render([{"role": "user", "content": [*clips, text]}], generate=True).ids


def prompts_of(renderer) -> list[Prompt]:
    """Text only; one and several images of different sizes; a second turn with frames of a tool, whose first was spelled oddly."""
    made, cell = [], renderer.contract.cell

    def show(count: int, columns: int = 2, rows: int = 2, seed: int = 0) -> Clip:
        return noise(count, seed, columns * cell, rows * cell)

    shown = [[], [show(1)], [show(3, seed=1)], [show(2, columns=5, rows=3, seed=2), show(1, rows=4, seed=3)]]
    for i, clips in enumerate(shown):
        made.append(Prompt(question(renderer, clips, "What happens?" + " Say it." * i), clips))
    opened = made[2]
    spelled = [token for letter in "a cat" for token in renderer.encode(letter)]
    delta = renderer.continuation([[show(2, seed=7), "seen"], "nothing"])
    ids = opened.ids + spelled + [renderer.end_of_turn] + delta.ids
    made.append(Prompt(ids, [*opened.clips, *delta.clips]))
    return made


def at_once(engine, requests_: list[dict]) -> list[Sample]:
    """Send each request from its own thread, and announce the threads to the engine."""
    engine.announce(len(requests_))
    with ThreadPoolExecutor(len(requests_)) as pool:

        def ask(request):
            try:
                return engine.generate(**request)
            finally:
                engine.announce(-1)

        return list(pool.map(ask, requests_))


def request(prompt: Prompt, ids=(), clips=(), seed=1, temperature=1.0, max_new_tokens=24, **more) -> dict:
    """Return a request for a continuation of the prompt and these ids, which show these clips."""
    more = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, **more}
    return {"prompt": prompt, "ids": list(ids), "clips": list(clips), **more}


def check_logprobs(model, renderer, row: dict, sample: Sample, tolerance: float = 1e-5) -> None:
    """Compare a sample's log-probs with one plain forward over the whole sequence."""
    prompt = row["prompt"]
    read, clips = prompt.ids + row["ids"], prompt.clips + row["clips"]
    with torch.no_grad():
        expected = plain_logprobs(model, renderer.never_sampled, read + sample.ids, clips, row["temperature"])
    expected = expected[len(read) - 1 :]
    assert torch.allclose(torch.tensor(sample.logprobs), expected, atol=tolerance, rtol=0)


def template_ids(renderer, messages, schemas) -> list[int]:
    """Return the ids that a user of plain transformers gets for the conversation."""
    plain = []
    for message in messages:
        content = message["content"]
        parts = []
        for part in [content] if isinstance(content, str) else content:
            if isinstance(part, str):
                parts.append({"type": "text", "text": part})
            else:
                for time in part.times:
                    parts += [{"type": "text", "text": f"<{time:.1f} seconds>"}, {"type": "image"}]
        plain.append({"role": message["role"], "content": parts})
    options = {"chat_template": template_with_tools(renderer.tokenizer.chat_template), "add_generation_prompt": True}
    return renderer.tokenizer.apply_chat_template(plain, tools=schemas, return_dict=False, **options)


def on_ranks(work, world: int, *args) -> None:
    """Run `work(*args)` on `world` gloo ranks, each in its own process. If one raises, the caller fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(_rank, (world, port, work, args), world, start_method="forkserver")


def _rank(number: int, world: int, port: int, work, args) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    init_distributed()
    assert (rank(), world_size()) == (number, world)
    work(*args)
    torch.distributed.destroy_process_group()
