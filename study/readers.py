"""readers.py: which frames do video readers return? -> results/readers.md

    python -m study.readers --write      # fetches the other readers with pip into runs/readers; about 10 minutes

Each frame of a file shows its own number as black and white blocks, so the frame that a reader returned is told by its
pixels alone. Every reader gets the same indices: 64, evenly spread over the frames that the file shows, as for an
overview. A frame with another number, or with none that can be read, is wrong. torchcodec needs FFmpeg's libraries on
the machine (`apt-get install ffmpeg`).

Deliberately missing: speed (study/bench.py); damaged or turned files, sound (tests/test_video.py).
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path

import numpy as np

from evals.tables import markdown
from runtime.config import git_commit
from runtime.video import Videos, uniform_indices

REPO = Path(__file__).resolve().parent.parent
FOLDER = REPO / "runs" / "readers"  # the files, and one folder per package
WIDTH, HEIGHT, BLOCK = 128, 64, 16  # pixels
ASKED = 64  # frames of each file
TIMEOUT = 600  # seconds for one reader and one file
INTRODUCTION = f"""# Video readers

{ASKED} frames of each file, evenly spread, asked for by index. Each frame shows its own number, so which one a reader returned is
read off the picture. The release of the paper reads with decord. decord and its successor decord2 return other frames than
they were asked for, without an error, and a model would learn them under the stamps of other moments. Therefore we read
with PyAV, by presentation time. What decord2 returns of a long file differs from run to run. Keyframes are 48 frames apart,
in the two long files 250 (x264's default)."""

# ------------------------------------------------------------------------------------------------ the files


@dataclass(frozen=True)
class Kind:
    """A kind of file: 25 frames per second, B-frames where the codec has them."""

    name: str
    suffix: str
    codec: str = "libx264"
    options: dict = field(default_factory=dict)  # of the encoder
    muxer: dict = field(default_factory=dict)  # options of the container
    frames: int = 500
    gop: int = 48  # frames from keyframe to keyframe
    hidden: int = 0  # frames that are cut off, as `ffmpeg -ss ... -c copy` does
    uneven: bool = False  # the time from frame to frame varies


X264 = {"preset": "veryfast", "bf": "3", "b_strategy": "0", "sc_threshold": "0"}  # three B-frames, whatever the picture
X265 = {"preset": "veryfast", "x265-params": "bframes=3:b-adapt=0:open-gop=1:log-level=none"}
KINDS = [
    Kind("H.264 mp4", "mp4", options=X264),
    Kind("H.264 mp4, 15,000 frames (10 minutes)", "mp4", options=X264, frames=15_000, gop=250),
    Kind("H.264 mp4, 36,000 frames (24 minutes)", "mp4", options=X264, frames=36_000, gop=250),
    Kind("H.264 mp4, cut without encoding", "mp4", options=X264, hidden=88),
    Kind("H.264 mp4, variable frame rate", "mp4", options=X264, uneven=True),
    Kind("H.264 mp4, in fragments", "mp4", options=X264, muxer={"movflags": "frag_keyframe+empty_moov"}),
    Kind("H.264 mp4, open GOPs", "mp4", options=X264 | {"x264-params": "open-gop=1"}),
    Kind("H.264 mp4, intra refresh", "mp4", options=X264 | {"x264-params": "intra-refresh=1"}),
    Kind("HEVC mp4, open GOPs", "mp4", "libx265", X265),
    Kind("HEVC mp4, open GOPs, cut without encoding", "mp4", "libx265", X265, hidden=88),
    Kind("AV1 mp4", "mp4", "libsvtav1", {"preset": "8", "crf": "20"}),
    Kind("VP9 webm", "webm", "libvpx-vp9", {"cpu-used": "8", "lag-in-frames": "25"}),
    Kind("H.264 mkv", "mkv", options=X264),
    Kind("H.264 flv", "flv", options=X264),
    Kind("H.264 MPEG-TS", "ts", options=X264),
    Kind("MPEG-2 MPEG-PS", "mpg", "mpeg2video", {"bf": "2"}),
    Kind("MPEG-4 avi", "avi", "mpeg4", {"bf": "2"}),
    Kind("H.264 avi", "avi", options=X264),
]


def picture(number: int) -> np.ndarray:
    """Draw 16 bits as blocks in two rows, and their opposites in two rows below."""
    bits = (number >> np.arange(16) & 1).reshape(2, 8)
    blocks = np.concatenate([bits, 1 - bits])  # [4, 8]
    return (255 * blocks).astype(np.uint8).repeat(BLOCK, 0).repeat(BLOCK, 1)  # [HEIGHT, WIDTH]


def number_of(pixels: np.ndarray) -> int | None:
    """Read the number off a picture [HEIGHT, WIDTH, colors]; None where a block is not the opposite of its partner."""
    blocks = pixels.reshape(4, BLOCK, 8, BLOCK, -1).mean((1, 3, 4)) > 127  # [4, 8]
    if (blocks[:2] == blocks[2:]).any():
        return None
    return int((blocks[:2].reshape(-1) << np.arange(16)).sum())


def write_file(path: Path, kind: Kind) -> None:
    """Write the file, and see that plain decoding from the start shows each frame, and its number."""
    import av

    # A cut without encoding begins at the keyframe before it; stamps below 0 hide what lies between.
    first = kind.hidden - kind.hidden % kind.gop
    unfinished = path.with_suffix(".tmp." + kind.suffix)
    with av.open(str(unfinished), "w", options=kind.muxer) as out:
        stream = out.add_stream(kind.codec, rate=25, options=kind.options | {"threads": "1"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.codec_context.gop_size = kind.gop
        stamp = 0
        for i in range(first, kind.frames + 1):
            image = None  # after the last frame: hand out what you hold back
            if i < kind.frames:
                image = av.VideoFrame.from_ndarray(picture(i), "gray")
                image.pts, image.time_base = stamp, Fraction(1, 25)
                stamp += 1 + i * i % 5 if kind.uneven else 1
            for packet in stream.encode(image):
                packet.pts, packet.dts = packet.pts - (kind.hidden - first), packet.dts - (kind.hidden - first)
                out.mux(packet)
    with av.open(str(unfinished)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        shown = [number_of(image.to_ndarray(format="gray")) for image in container.decode(video=0)]
    assert shown == list(range(kind.hidden, kind.frames)), f"{path}: the encoder left other numbers than were drawn"
    unfinished.rename(path)


# ------------------------------------------------------------------------------------------------ the readers


def ours(path: str, indices: list[int]) -> np.ndarray:
    with Videos(workers=1, timeout=TIMEOUT) as videos:
        return videos.frames(path, indices, (WIDTH, HEIGHT)).pixels


def decord(path: str, indices: list[int]) -> np.ndarray:
    """Ask decord, or decord2, whose module is called decord, too."""
    import decord

    return decord.VideoReader(path).get_batch(indices).asnumpy()


def torchcodec(path: str, indices: list[int]) -> np.ndarray:
    from torchcodec.decoders import VideoDecoder

    return VideoDecoder(path, dimension_order="NHWC").get_frames_at(indices).data.numpy()


# What pip calls them -> how they are asked.
READERS = {"ours": ours, "decord==0.6.0": decord, "decord2==3.4.0": decord, "torchcodec==0.13.0": torchcodec}


def ask(reader: str, path: Path, indices: Sequence[int]) -> list[int | None] | str:
    """Return the number of each frame that the reader returned, or why it returned none. It runs in a process of its
    own, where it may crash, and its package lies in a folder of its own: no other run needs it."""
    package = FOLDER / reader
    if reader != "ours" and not package.exists():
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "-t", package, reader], check=True)
    command = [sys.executable, "-m", "study.readers", "--ask", reader, str(path), json.dumps(list(indices))]
    environment = os.environ | {"PYTHONPATH": str(package)}
    try:
        child = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=environment, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return f"no answer in {TIMEOUT} s"
    if child.returncode:
        return (child.stderr.strip() or f"exit code {child.returncode}").splitlines()[-1]
    return json.loads(child.stdout.splitlines()[-1])


def count(numbers: list[int | None], wanted: Sequence[int]) -> str:
    wrong = sum(number != right for number, right in zip(numbers, wanted, strict=True))
    return f"{len(wanted) - wrong} right, **{wrong} wrong**" if wrong else f"{len(wanted)} right"


# ------------------------------------------------------------------------------------------------ the command


def compare(kinds: Sequence[Kind], readers: Sequence[str]) -> str:
    """Return the table: a row per kind of file, a column per reader; below it, why a reader refused a file."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows, refusals = [], []
    for kind in kinds:
        path = FOLDER / f"{kind.name}.{kind.suffix}"
        if not path.exists():
            write_file(path, kind)
        indices = uniform_indices(kind.frames - kind.hidden, ASKED)
        rows.append([kind.name])
        for reader in readers:
            answer = ask(reader, path, indices)
            if isinstance(answer, list):
                rows[-1].append(count(answer, [kind.hidden + i for i in indices]))
            elif kind == KINDS[0]:
                sys.exit(f"error: {reader} cannot read even a plain mp4, so it lacks something here: {answer}")
            else:
                rows[-1].append("refused")
                refusals.append(f"- {kind.name}, {reader}: {answer.replace(str(path), 'FILE')[:200]}")
        print(*rows[-1], sep=" | ", flush=True)
    return "\n".join([markdown("", ["file", *readers], rows), "", "Why a file was refused:", "", *refusals])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write results/readers.md")
    parser.add_argument("--ask", nargs=3, help=argparse.SUPPRESS)  # the process of one reader: its name, file, indices
    args = parser.parse_args()
    if args.ask:
        reader, path, indices = args.ask
        print(json.dumps([number_of(pixels) for pixels in READERS[reader](path, json.loads(indices))]))
        return
    libraries = subprocess.run(["ffmpeg", "-version"], capture_output=True, text=True, check=True).stdout.split()[2]
    versions = f"av {version('av')}, torch {version('torch')}, FFmpeg {libraries} under torchcodec"
    table = compare(KINDS, list(READERS))
    if args.write:
        made = f"`python -m study.readers --write` at commit {git_commit()}; {versions}."
        (REPO / "results" / "readers.md").write_text(f"{INTRODUCTION}{table}\n\n{made}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
