"""toy.py: build the toy on a CPU in under a minute: a tiny Qwen3-VL, real mp4s, and parquets in the published schemas.

    python -m study.toy build DIR [--seed 0]

    DIR/model/            an untrained Qwen3VLForConditionalGeneration in Hugging Face format (1.3 M parameters)
    DIR/videos/*.mp4      H.264, 32x32, 2 frames per second: noise, and one colored flash
    DIR/perception.parquet, calls.parquet, direct.parquet     SFT schema (`messages`), one skill each: report as a sub-agent;
                                                              call and read reports; answer without tools
    DIR/sft.parquet, sft_val.parquet                          SFT schema: agents with tools
    DIR/rl.parquet, val.parquet, test.parquet                 RL schema (`prompt`, `videos`, `extra_info`)

The task: a video of 32, 48 or 64 s shows one flash, and the question asks for its color (chance 1/8). A short flash
(2.5 s) falls between the frames of a small overview, but every crop of up to 32 s around it shows it. Where to look:

    the question names the half   -> one window, half the video
    it does not                   -> both halves at once (a video of 32 s fits into one window)
    a long flash                  -> any overview shows it

The *loose prior* is put there on purpose: a share P_LOOSE of turns breaks the format (unclosed think, no think, a
call in the wrong tags, an answer without tags), as pretrained models do when sampled.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from runtime.engine import map_in_threads
from runtime.prompts import SUBAGENT_REQUEST, subagent_system_prompt, system_prompt
from runtime.render import CHAT_TEMPLATE, TEMPLATE_TAGS
from runtime.script import progress_bar
from runtime.video import uniform_indices, window_indices
from runtime.visual import VisualContract
from tools import TOOLS

COLORS = {
    "red": (255, 25, 25),
    "green": (25, 230, 25),
    "blue": (25, 50, 255),
    "yellow": (255, 255, 25),
    "purple": (180, 25, 205),
    "orange": (255, 140, 12),
    "white": (255, 255, 255),
    "black": (0, 0, 0),
}
NAMES = list(COLORS)
SIDE = 32  # pixels of a frame's side
SQUARE = 24  # pixels of the flash's side
FPS = 2
DURATIONS = (32, 48, 64)  # seconds
SHORT = 2.5  # seconds of a short flash
CONTRACT = VisualContract(frame_pixels=SIDE * SIDE)  # one visual token per frame
OVERVIEWS = (4, 8, 16, 32, 64)
LONG_SHARE = 0.15  # share of long flashes
P_LOOSE = 0.6  # share of SFT turns that break the format
P_TOOL = 0.75  # share of SFT rows that call tools
NOTHING = "No flash."
# Videos per split (rl, val, test: one task per video), and rows per SFT table.
SIZES = {"train": 1600, "rl": 600, "val": 64, "test": 256}
SIZES |= {"perception": 6000, "calls": 2000, "direct": 2000, "sft": 8000, "sft_val": 200}

# ------------------------------------------------------------------------------------------------ videos and tasks


@dataclass(frozen=True)
class Flash:
    """One synthetic video and its flash."""

    name: str
    seed: int
    duration: int  # seconds
    color: str
    start: float  # seconds
    length: float

    def visible(self, times: Sequence[float]) -> bool:
        return any(self.start <= t < self.start + self.length for t in times)

    @property
    def report(self) -> str:
        """The report on a clip that shows it. Thoughts repeat it, so that the model learns to read reports."""
        return f"A {self.color} flash."

    @property
    def half(self) -> str:
        """The half that contains the whole flash, or ""."""
        middle = self.duration / 2
        if self.start + self.length <= middle:
            return "first"
        return "second" if self.start >= middle else ""


def draw_flash(rng: random.Random, name: str) -> Flash:
    duration = rng.choice(DURATIONS)
    # A long flash outlasts the gap between two of 4 overview frames.
    length = duration / 3 + 1 if rng.random() < LONG_SHARE else SHORT
    start = rng.randrange(round((duration - length) * FPS) + 1) / FPS
    return Flash(name, rng.randrange(1 << 30), duration, rng.choice(NAMES), start, length)


def draw_splits(seed: int, sizes: dict[str, int] = SIZES) -> dict[str, list[Flash]]:
    """Draw all videos of a toy, by split."""
    rng = random.Random(seed)
    splits = {}
    for split in ("train", "rl", "val", "test"):
        splits[split] = [draw_flash(rng, f"{split}{i:05d}.mp4") for i in range(sizes[split])]
    return splits


def write_video(path: Path, flash: Flash) -> None:
    """Draw grey noise, and a colored square while the flash lasts."""
    rng = np.random.default_rng(flash.seed)
    count = flash.duration * FPS
    grey = rng.integers(90, 165)
    pixels = grey + 15 * rng.standard_normal((count, SIDE, SIDE, 3))  # [N, H, W, 3]
    x, y = rng.integers(1, SIDE - SQUARE, 2)
    lit = [i for i in range(count) if flash.visible([i / FPS])]
    pixels[lit, y : y + SQUARE, x : x + SQUARE] += np.array(COLORS[flash.color]) - grey

    with av.open(str(path), "w") as container:
        # `ultrafast` is repeatable to the bit. With lookahead, x264 is not at this size.
        options = {"preset": "ultrafast", "crf": "18", "threads": "1"}
        stream = container.add_stream("libx264", rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        for image in np.clip(pixels, 0, 255).astype(np.uint8):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, "rgb24")))
        container.mux(stream.encode())


def question(cue: str) -> str:
    return f"Which color flashes in the {cue} half?" if cue else "Which color flashes?"


def windows(flash: Flash, cue: str) -> list[tuple[int, int]]:
    """Return the windows to crop: together they must show the flash."""
    middle, end = flash.duration // 2, flash.duration
    if cue:
        return [(0, middle) if cue == "first" else (middle, end)]
    return [(0, end)] if end <= 32 else [(0, middle), (middle, end)]


def report_on(flash: Flash, times: Sequence[float]) -> str:
    """Return a sub-agent's right report on frames at these times."""
    return flash.report if flash.visible(times) else NOTHING


def report_is_right(flash: Flash, window: tuple[float, float], report: str) -> bool:
    return report == report_on(flash, crop_times(flash, *window))


# ------------------------------------------------------------------------------------------------ rows


def draw_cue(rng: random.Random, flash: Flash) -> str:
    """Return the half that the question names, or ""."""
    return flash.half if rng.random() < 0.5 else ""


def overview_times(flash: Flash, k: int) -> list[float]:
    return [i / FPS for i in uniform_indices(flash.duration * FPS, k)]


def crop_times(flash: Flash, start: float, end: float) -> list[float]:
    times = np.arange(flash.duration * FPS) / FPS
    chosen = window_indices(times, start, end, CONTRACT.crop_fps, CONTRACT.crop_max_frames)
    return times[chosen].tolist()


def call(start: float, end: float) -> str:
    body = json.dumps({"name": "crop_video", "arguments": {"start_time": start, "end_time": end}})
    return f"<tool_call>\n{body}\n</tool_call>"


def sft_row(
    rng: random.Random, flash: Flash, p_tool: float = P_TOOL, p_loose: float = P_LOOSE, agent: str = "main", k: int = 0
) -> dict:
    """Return a trajectory with tools, or a direct answer. Each turn breaks the format with probability p_loose."""
    # Few frames: mostly calls, since only reports help there. Many frames: mostly direct answers, which are right there.
    with_tools = rng.random() < p_tool
    weights = (4, 3, 2, 1, 1) if with_tools else (1, 1, 2, 3, 3)
    k = k or rng.choices(OVERVIEWS, weights)[0]
    cue = draw_cue(rng, flash)
    video = {"type": "video_url", "video_url": {"url": f"videos/{flash.name}", "nframes": k}}
    messages = [{"role": "user", "content": [video, {"type": "text", "text": question(cue)}]}]
    if with_tools:
        messages += turns_with_tools(rng, flash, cue, p_loose)
    else:
        seen = flash.visible(overview_times(flash, k))
        thought = f"I see it.\n{flash.report}" if seen else "I see no flash."
        messages.append(answer(rng, flash, thought, p_loose))
    return {"messages": json.dumps(messages), "agent": agent}


def turns_with_tools(rng: random.Random, flash: Flash, cue: str, p_loose: float) -> list[dict]:
    """Return a turn with calls, the reports, and the answer."""
    # Loose: the think is not closed, there is no think, or the calls have wrong tags.
    thought = "Let me look closer."
    crops = windows(flash, cue)
    calls = "\n".join(call(*window) for window in crops)
    unclosed = f"<think>\n{thought}\n{calls}"
    bare = f"{thought}\n{calls}"
    tidy = f"<think>\n{thought}\n</think>\n{calls}"
    unread = tidy.replace("tool_call>", "tool_code>")
    first = assistant_turn(rng, tidy, [unclosed, bare, unread], p_loose)
    if first["content"] == unread:  # the row ends here: a rollout would only return an error
        return [first]

    reports = [report_on(flash, crop_times(flash, *window)) for window in crops]
    text = "\n".join(f"<tool_response>\n{report}\n</tool_response>" for report in reports)
    thought = f"A clip shows it.\n{flash.report}"
    return [first, {"role": "user", "content": text}, answer(rng, flash, thought, p_loose)]


def answer(rng: random.Random, flash: Flash, thought: str, p_loose: float) -> dict:
    """Return the turn that answers."""
    plain = f"The answer is {flash.color}."
    loose = [plain, f"<think>\n{thought}\n{plain}", f"<think>\n{thought}\n</think>\n{plain}"]
    tidy = f"<think>\n{thought}\n</think>\n<answer>{flash.color}</answer>"
    return assistant_turn(rng, tidy, loose, p_loose)


def assistant_turn(rng: random.Random, tidy: str, loose: Sequence[str], p_loose: float) -> dict:
    """Return the tidy text as a turn or, with probability p_loose, one of the loose texts."""
    text = rng.choice(loose) if rng.random() < p_loose else tidy
    return {"role": "assistant", "content": text}


def perception_row(rng: random.Random, flash: Flash) -> dict:
    """Return a sub-agent's example: one window and one sentence. Half of the windows show the flash."""
    width = rng.choice((2, 4, 8, 16, 24, 32, 32))
    latest = flash.duration - width
    with_flash = rng.random() < 0.5
    for _ in range(20):
        start = rng.randrange(latest + 1)
        if with_flash:
            start = max(0, min(latest, int(flash.start) - rng.randrange(max(1, width - 2))))
        if flash.visible(crop_times(flash, start, start + width)) == with_flash:
            break
    video = {"url": f"videos/{flash.name}", "video_start": start, "video_end": start + width}
    messages = [{"role": "user", "content": [{"type": "video_url", "video_url": video}]}]
    messages.append({"role": "assistant", "content": report_on(flash, crop_times(flash, start, start + width))})
    return {"messages": json.dumps(messages), "agent": "sub"}


def rl_row(rng: random.Random, flash: Flash) -> dict:
    """Return an open question in the RL schema."""
    cue = draw_cue(rng, flash)
    info = {"id": f"{Path(flash.name).stem}-oe{cue and '-' + cue}", "answer": flash.color, "question_type": "oe"}
    prompt = [{"role": "user", "content": f"<video>\n{question(cue)}"}]
    videos = [{"video": f"videos/{flash.name}"}]
    return {"prompt": prompt, "videos": videos, "extra_info": json.dumps(info)}


# ------------------------------------------------------------------------------------------------ the checkpoint

ADDED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
ADDED += ["<|video_pad|>"]  # special tokens; TEMPLATE_TAGS are also single tokens, but ordinary text


def build_tokenizer(texts: list[str], vocabulary: int = 2048):
    """Train a byte-level BPE whose words are whole phrases: boilerplate costs few tokens, while numbers, colors and the
    pieces of `<answer>` stay separate tokens."""
    color = rf"\b(?:{'|'.join(NAMES)})\b"
    words = [r"<\d+(?=\.\d+ seconds>)", r"\.\d+ seconds>", r"\d+", r"</?(?=answer>)", r"answer(?=>)", color, r"\n+"]
    words.append(rf"(?:(?!{color}|</?answer>|answer>)[^\d\n])(?:(?!{color})[^\d\n<>])*")
    split = pre_tokenizers.Split(Regex("|".join(words)), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=ADDED + list(TEMPLATE_TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(ADDED)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TEMPLATE_TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def untrained_model(tokenizer, seed: int) -> Qwen3VLForConditionalGeneration:
    """Build a tiny model with random weights."""
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in ADDED}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "rope_parameters": rope,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        "out_hidden_size": text["hidden_size"],
    }
    config = Qwen3VLConfig(
        text_config=text | {"tie_word_embeddings": True},
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(eos_token_id=[ids["<|im_end|>"]], pad_token_id=ids["<|endoftext|>"])
    return model


def write_checkpoint(path: Path, model: PreTrainedModel, tokenizer, contract: VisualContract) -> None:
    """Write a model, with all other files that transformers and SGLang need."""
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    contract.save(path)
    images = json.loads((path / "preprocessor_config.json").read_text())
    frames = {"video_processor_type": "Qwen3VLVideoProcessor"} | images
    del frames["image_processor_type"]
    (path / "video_preprocessor_config.json").write_text(json.dumps(frames, indent=1))


# ------------------------------------------------------------------------------------------------ build


def build_toy(root: Path, seed: int = 0, sizes: dict[str, int] = SIZES) -> None:
    """Write the toy to `root`: the same bytes for the same arguments. `sizes` overrides entries of SIZES."""
    sizes = SIZES | sizes
    (root / "videos").mkdir(parents=True, exist_ok=True)
    splits = draw_splits(seed, sizes)
    flashes = [flash for split in splits.values() for flash in split]
    written = map_in_threads(lambda flash: write_video(root / "videos" / flash.name, flash), flashes, at_once=2)
    list(progress_bar(written, total=len(flashes), desc="videos", unit="file"))

    rng = random.Random(f"rows {seed}")
    train = splits["train"]
    held_out = rng.choices(splits["val"], k=sizes["sft_val"])
    tables = {
        "perception": [perception_row(rng, rng.choice(train)) for _ in range(sizes["perception"])],
        "calls": [sft_row(rng, rng.choice(train), p_tool=1.0, p_loose=0.0, k=4) for _ in range(sizes["calls"])],
        "direct": [sft_row(rng, rng.choice(train), p_tool=0.0, agent="direct") for _ in range(sizes["direct"])],
        "sft": [sft_row(rng, rng.choice(train)) for _ in range(sizes["sft"])],
        "sft_val": [sft_row(rng, flash, p_loose=0.0) for flash in held_out],
    }
    for split in ("rl", "val", "test"):
        tables[split] = [rl_row(rng, flash) for flash in splits[split]]
    for name, rows in tables.items():
        pq.write_table(pa.Table.from_pylist(rows), root / f"{name}.parquet")

    tokenizer = build_tokenizer(tokenizer_texts(tables["sft"][:2000] + tables["perception"][:200]))
    write_checkpoint(root / "model", untrained_model(tokenizer, seed), tokenizer, CONTRACT)


def tokenizer_texts(rows: list[dict]) -> list[str]:
    """Return what the tokenizer is trained on: the prompts' boilerplate, every stamp, and the text of rows."""
    boilerplate = [system_prompt(with_tools=True), system_prompt(with_tools=False)]
    boilerplate += [subagent_system_prompt(), SUBAGENT_REQUEST, CHAT_TEMPLATE]
    boilerplate.append(json.dumps(TOOLS["crop_video"].schema))
    stamps = [CONTRACT.stamp.format(i / FPS) for i in range(DURATIONS[-1] * FPS)]
    texts = boilerplate * 8 + stamps * 4
    for row in rows:
        for message in json.loads(row["messages"]):
            content = message["content"]
            if isinstance(content, str):
                texts.append(content)
            else:
                texts += [part["text"] for part in content if part["type"] == "text"]
    return texts


def main() -> int:
    parser = argparse.ArgumentParser("python -m study.toy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("command", choices=["build"])
    parser.add_argument("dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    build_toy(args.dir, args.seed)
    print(f"toy written to {args.dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
