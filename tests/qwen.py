"""The vocabularies and chat templates of Qwen3-VL and Qwen2.5-VL: what `make test-qwen` stands on.

`qwen.tiktoken` holds the 151,643 byte strings of the vocabulary in the order in which they were merged, and equals
Qwen3's tokenizer.json; the added tokens are those of the published tokenizer_config.json."""

import base64
import functools
import json
import zipfile

from scripts import REPO
from tokenizers import AddedToken
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from runtime.visual import VisualContract

PACKAGES = REPO / ".qwen"
FIRST_ADDED = 151_643
_SPECIAL = """
    <|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
    <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>
"""
_ORDINARY = """
    <tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>
    <tool_response> </tool_response> <think> </think>
"""
SPECIAL, ORDINARY = _SPECIAL.split(), _ORDINARY.split()
QWEN3, QWEN25 = "Qwen3-VL-Instruct", "qwen2.5-vl-instruct"  # as the package names them
ADDED_LATER = 4  # of ORDINARY, the last four: Qwen2.5-VL's vocabulary has no single tokens for them
CONTRACT = VisualContract(frame_pixels=64 * 64, overview_frames=4, crop_max_frames=4)


def _read(package: str, name: str) -> bytes:
    [wheel] = PACKAGES.glob(f"{package}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name)


@functools.cache
def ranks() -> dict[bytes, int]:
    """Return {bytes of a token: its id, which is also the rank of its merge}."""
    lines = (line.split() for line in _read("dashscope", "dashscope/resources/qwen.tiktoken").splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def chat_template(model: str) -> str:
    families = json.loads(_read("xinference", "xinference/model/llm/llm_family.json"))
    [family] = [family for family in families if family["model_name"] == model]
    return family["chat_template"]


def merge_bytes(text: bytes, below: int) -> list[bytes]:
    """Merge the neighbours that make the token of the lowest rank, again and again, while that rank is `below`."""
    parts = [text[i : i + 1] for i in range(len(text))]
    while len(parts) > 1:
        merged = [ranks().get(a + b, below) for a, b in zip(parts, parts[1:])]
        rank = min(merged)
        if rank >= below:
            break
        i = merged.index(rank)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def build_tokenizer(model: str = QWEN3) -> Qwen2Tokenizer:
    spelled = bytes_to_unicode()
    vocabulary, merges = {}, []
    for token, rank in ranks().items():
        vocabulary["".join(spelled[byte] for byte in token)] = rank
        if len(token) > 1:
            # A token was made from the two parts into which the merges before its own leave it.
            left, right = ("".join(spelled[byte] for byte in part) for part in merge_bytes(token, rank))
            merges.append((left, right))
    tokenizer = Qwen2Tokenizer(vocabulary, merges, chat_template=chat_template(model), model_max_length=262_144)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    ordinary = ORDINARY if model == QWEN3 else ORDINARY[:-ADDED_LATER]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ordinary])
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer
