"""visual.py: how a frame becomes model input, the same way in training, sampling and evaluation.

    contract = VisualContract()                    # frames of about 65,536 pixels, 64 tokens if square; stamped images
    contract.frame_size(1280, 720)                 # (352, 192): the size at which such a video's frames are decoded
    contract.refuse_unlike(checkpoint_dir)         # refuses a checkpoint that was trained with another contract
    pixel_values, grid = patchify(clips)           # tensors: float32 [P, 1536], int64 [frames, 3]; P patches

Deliberately missing: the video channel (frame pairs), torchvision, the Hugging Face processor classes.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.config import UserError
from runtime.video import Clip

MERGE = 2  # MERGE x MERGE patches become one token
TEMPORAL_PATCH = 2  # a patch spans two frames; an image is repeated to fill it
LARGEST_IMAGE = 16_777_216  # pixels; Qwen3-VL's published processor shrinks larger images
# The published processors, by their patch size in pixels: Qwen2.5-VL normalises with CLIP's mean and std.
PROCESSORS = {
    14: {
        "processor_class": "Qwen2_5_VLProcessor",
        "image_mean": [0.48145466, 0.4578275, 0.40821073],  # red, green, blue
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    16: {"processor_class": "Qwen3VLProcessor", "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
}


class ContractError(UserError):
    """Two parts of the system would show the model different inputs."""


@dataclass(frozen=True)
class VisualContract:
    """How a video becomes model input. Every checkpoint holds it as visual.json. A run refuses a checkpoint that differs."""

    frame_pixels: int = 65_536
    """Least area of a frame. 65,536 = 64 tokens: the smallest image that Qwen3-VL's processor does not enlarge."""
    max_frame_pixels: int | None = None
    """Largest area of a frame. A frame between `frame_pixels` and this area keeps its size, as in Qwen's processors
    (min_pixels, max_pixels). null: every frame is scaled to `frame_pixels`."""
    crop_frame_pixels: int | None = None
    """Area to which frames of a crop are scaled. null: they are as large as overview frames."""
    patch: int = 16
    """Side of a vision patch in pixels: 16 for Qwen3-VL, 14 for Qwen2.5-VL. PROCESSORS has the mean and std that belong to it."""
    stamp: str = "<{:.1f} seconds>"
    """The text before each frame, with the decoded frame's true time. Other models use `{clock}` (HH:MM:SS) or `{i}`
    (the frame's index in its clip). Empty: no stamps."""
    overview_frames: int = 64
    """K: frames of the overview, unless gating draws another number."""
    crop_fps: float = 1.0
    """Frames per second of a crop, unless the call asks for a number of frames."""
    crop_max_frames: int = 16
    """Most frames of a crop."""

    def __post_init__(self):
        if self.patch not in PROCESSORS:
            raise ValueError(f"patch = {self.patch}: 16 (Qwen3-VL) or 14 (Qwen2.5-VL)")
        if self.max_frame_pixels is not None and self.max_frame_pixels < self.frame_pixels:
            raise ValueError(f"max_frame_pixels = {self.max_frame_pixels}: at least frame_pixels = {self.frame_pixels}")

    @property
    def cell(self) -> int:
        """The side in pixels of the square that becomes one token."""
        return self.patch * MERGE

    def frame_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the (width, height) to decode at. Every later resize (transformers', SGLang's) then changes nothing."""
        if self.max_frame_pixels is None:
            return self._scale_to(self.frame_pixels, width, height)
        return self._keep_between(self.frame_pixels, self.max_frame_pixels, width, height)

    def crop_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the (width, height) at which a crop's frames are decoded."""
        if self.crop_frame_pixels is None:
            return self.frame_size(width, height)
        return self._scale_to(self.crop_frame_pixels, width, height)

    def _keep_between(self, min_area: int, max_area: int, width: int, height: int) -> tuple[int, int]:
        """Return the size in whole tokens whose area lies between two limits, exactly as Qwen's smart_resize does."""
        # Round each side. If the area is then too large, shrink the frame and round down. If it is too small, enlarge the
        # frame and round up.
        columns, rows = round(width / self.cell), round(height / self.cell)
        area = columns * rows * self.cell**2
        if area > max_area:
            factor = math.sqrt(width * height / max_area)
            columns = max(1, math.floor(width / factor / self.cell))
            rows = max(1, math.floor(height / factor / self.cell))
        elif area < min_area:
            factor = math.sqrt(min_area / (width * height))
            columns = math.ceil(width * factor / self.cell)
            rows = math.ceil(height * factor / self.cell)
        return columns * self.cell, rows * self.cell

    def _scale_to(self, area: int, width: int, height: int) -> tuple[int, int]:
        """Return the smallest size in whole tokens that covers the area at this aspect ratio."""
        scale = math.sqrt(area / (width * height))
        # The epsilon keeps an exact fit (256 x 256) from rounding up to one cell more.
        columns = max(1, math.ceil(width * scale / self.cell - 1e-9))
        rows = max(1, math.ceil(height * scale / self.cell - 1e-9))
        return columns * self.cell, rows * self.cell

    def frame_tokens(self, width: int, height: int) -> int:
        return (width // self.cell) * (height // self.cell)

    def processor_size(self) -> dict[str, int]:
        """Return the image processor's limits that leave our frames unchanged (Qwen calls areas "edges")."""
        smallest = self.frame_pixels
        if self.max_frame_pixels or self.crop_frame_pixels:
            smallest = self.cell**2  # a frame that was rounded down, or a crop's, can be below frame_pixels
        largest = max(LARGEST_IMAGE, self.frame_pixels, self.max_frame_pixels or 0)
        return {"shortest_edge": smallest, "longest_edge": largest}

    @classmethod
    def load(cls, checkpoint: str | Path) -> "VisualContract":
        """Read the contract of a checkpoint. A stock checkpoint gets the default one, with its own patch size."""
        path = Path(checkpoint) / "visual.json"
        processor = read_json(Path(checkpoint) / "preprocessor_config.json") or {}
        saved = read_json(path) or {"patch": processor.get("patch_size", cls.patch)}
        saved.pop("merge", None)  # checkpoints of older versions have it; it was always 2
        try:
            return cls(**saved)
        except (TypeError, ValueError) as error:  # a key of another version, an impossible value
            raise ContractError(f"{path}: {error}") from None

    def save(self, checkpoint: str | Path) -> None:
        """Write visual.json, and the same limits into the file that transformers and SGLang read."""
        checkpoint = Path(checkpoint)
        (checkpoint / "visual.json").write_text(json.dumps(dataclasses.asdict(self), indent=1))
        path = checkpoint / "preprocessor_config.json"
        stock: dict[str, object] = {"image_processor_type": "Qwen2VLImageProcessorFast"}
        stock["processor_class"] = PROCESSORS[self.patch]["processor_class"]
        processor = (read_json(path) or stock) | self._processor_constants() | {"size": self.processor_size()}
        path.write_text(json.dumps(processor, indent=1))

    def refuse_unlike(self, checkpoint: str | Path) -> None:
        """Raise ContractError if the checkpoint was made under another contract. A stock checkpoint has no visual.json: then
        only its processor's constants must agree (server_command overrides its size limits)."""
        ours = self._processor_constants()
        saved = read_json(Path(checkpoint) / "preprocessor_config.json") or dict(ours)
        if (Path(checkpoint) / "visual.json").exists():
            ours |= dataclasses.asdict(self) | {"size": self.processor_size()}
            saved |= dataclasses.asdict(self.load(checkpoint))
        wrong = []
        for key, value in ours.items():
            if saved.get(key) != value:
                wrong.append(f"{key}: this run has {value!r}, the checkpoint {saved.get(key)!r}")
        if wrong:
            raise ContractError(
                f"{checkpoint} was made under another visual contract ({'; '.join(wrong)}). "
                "Set the run's `visual` keys to the checkpoint's values, or train a checkpoint under the new ones."
            )

    def _processor_constants(self) -> dict[str, Any]:
        """Return the keys of preprocessor_config.json that cannot differ between training and sampling."""
        constants = {"patch_size": self.patch, "merge_size": MERGE, "temporal_patch_size": TEMPORAL_PATCH}
        return constants | {name: PROCESSORS[self.patch][name] for name in ("image_mean", "image_std")}


def patchify(
    clips: Sequence[Clip], patch: int = 16, merge: int = MERGE, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixel_values float32 [P, 3 * 2 * patch * patch], on the device, and grid int64 [frames, 3] = (1, rows, columns),
    on the host. P: patches of all frames.

    Patches of one token are adjacent (merge x merge blocks, row by row), as Qwen's vision tower expects them."""
    # Cut the frames into patches, channel first.
    cut = [np.zeros((0, 3 * patch * patch), np.uint8)]
    grid = []
    for clip in clips:
        n, height, width, _ = clip.pixels.shape
        rows, columns = height // patch, width // patch
        x = clip.pixels.reshape(n, rows // merge, merge, patch, columns // merge, merge, patch, 3)
        x = x.transpose(0, 1, 4, 2, 5, 7, 3, 6)  # [n, rows/m, columns/m, m, m, 3, patch, patch]
        cut.append(x.reshape(n * rows * columns, 3 * patch * patch))
        grid += [[1, rows, columns]] * n
    # Send bytes, and normalise on the device: a full micro-batch is 48 MiB of bytes or 384 MiB of values.
    x = torch.from_numpy(np.concatenate(cut)).to(device).view(-1, 3, patch * patch)  # [P, 3, patch * patch]
    channels = torch.arange(3, device=device)[:, None]  # [3, 1]
    x = torch.from_numpy(_normalised(patch)).to(device)[channels, x.int()]  # fp32 [P, 3, patch * patch]
    # Repeat each frame to fill the temporal patch.
    x = x.unsqueeze(2).expand(-1, -1, TEMPORAL_PATCH, -1)  # [P, 3, 2, patch * patch]
    x = x.reshape(len(x), 3 * TEMPORAL_PATCH * patch * patch)
    return x, torch.tensor(grid, dtype=torch.int64).view(len(grid), 3)


def _normalised(patch: int) -> np.ndarray:
    """Return the model's inputs float32 [3, 256] for the values 0 ... 255 of each channel, rounded exactly as transformers' PIL
    image processor rounds (rescale in float64, then float32)."""
    values = (np.arange(256) * (1 / 255)).astype(np.float32)
    mean = np.array(PROCESSORS[patch]["image_mean"], np.float32)[:, None]
    std = np.array(PROCESSORS[patch]["image_std"], np.float32)[:, None]
    return (values - mean) / std


def read_json(path: Path) -> dict | None:
    """Read a JSON file. Return None if it does not exist."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except ValueError as error:
        raise ContractError(f"{path}: not readable: {error}; restore it, or copy its folder here again") from None
