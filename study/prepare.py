"""prepare.py: what is done to data before training. The trainers never import it.

python -m study.prepare check PATH|CONFIG [--model DIR]
    every row parsed, every image read and video opened, calls read as a rollout reads them, ids that rows share, token
    lengths under the model's tokenizer; of a config, its `data` and its `val`; exit status 1 if any row is unusable
python -m study.prepare materialize --root MEDIA --parquet-dir IN --output-dir OUT
    sentinel paths (`longvt_source/...`, `museg/...`, `selfqa/...`) -> file://MEDIA/...; lists what is missing
"""

import argparse
import collections
import functools
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data import Task, encode_dialogue, parse_task
from runtime import config
from runtime.checks import find_checkpoint
from runtime.dataset import DataConfig, RowError, Rows, decode_json, row_errors
from runtime.dialogue import Dialogue, Media, parse_dialogue
from runtime.render import Renderer, load_tokenizer
from runtime.video import Frames, Videos
from runtime.visual import VisualContract
from tools import TOOLS, parse_calls

MEDIA_KEYS = ("video", "video_url", "image", "image_url", "url")

# ------------------------------------------------------------------------------------------------ check


class Undecoded(Videos):
    """Frames of the right number, size and times, which nobody decoded: all that token counts depend on."""

    def frames(self, path: str, indices: Sequence[int], size: tuple[int, int]) -> Frames:
        times = self.info(path).times[list(indices)].tolist()
        return Frames(np.broadcast_to(np.uint8(0), (len(times), size[1], size[0], 3)), tuple(times))


@dataclass
class Looked:
    """What there is to say about a row."""

    id: str = ""
    kind: str = ""
    calls: list[str] = field(default_factory=list)  # "ok", or why a rollout could not run it
    tokens: int = 0  # 0: nobody counted
    flaw: str = ""  # why it cannot be used


def check(target: str, model: str) -> int:
    """Print the truth about a data file, or about all files of a run's config."""
    # The settings of the run; of a lone file, the defaults and the model's contract.
    tree = {"data": {"sources": [{"path": target}]}}
    of_config = target.endswith((".yaml", ".yml"))
    if of_config:
        tree = config.read_tree(Path(target))
        checkpoint = (tree.get("policy") or {}).get("checkpoint", "")
        if not model and Path(checkpoint).is_dir():
            model = checkpoint
    if of_config or not model:
        contract = config.build(VisualContract, tree.get("visual") or {}, "visual.")
    else:
        contract = VisualContract.load(model)
    renderer = Renderer(load_tokenizer(find_checkpoint(model, weights=False)), contract) if model else None
    tools = tree.get("tools", ["crop_video"])
    longest = tree.get("pack_tokens", math.inf)

    # Each file once.
    files = {}
    for name in ("data", "val") if tree.get("val") else ("data",):
        cfg = config.build(DataConfig, tree.get(name) or {}, f"{name}.")
        for source in cfg.sources:
            files[source.path, cfg.video_root] = Rows(source.path)

    def look(videos: Videos, rows: Rows, home: Path, i: int) -> Looked:
        """Do to a row what a training does, up to its tokens."""
        found = Looked()
        try:
            with row_errors():
                row = rows[i]
                parse = parse_dialogue if "messages" in row else parse_task
                item = parse(row, f"row {i} of {rows.path}", home)
                found.id = item.id
                for clip in describe(item, tools, found):
                    clip.frames(videos, contract)
                if renderer and isinstance(item, Dialogue):
                    schemas = [TOOLS[name].schema for name in tools]
                    found.tokens = len(encode_dialogue(item, videos, renderer, schemas))
                if found.tokens > longest:
                    raise RowError(f"{found.tokens} tokens, more than pack_tokens = {longest}")
        except RowError as error:
            found.flaw = str(error)
        return found

    unusable, ids = 0, collections.Counter()
    with Undecoded(os.cpu_count() or 1) as videos, ThreadPoolExecutor(8) as pool:
        for (path, root), rows in files.items():
            look_at = functools.partial(look, videos, rows, Path(root or rows.path.parent))
            looked = list(tqdm(pool.map(look_at, range(len(rows))), desc=rows.path.name, total=len(rows), unit="row"))
            unusable += print_findings(path, looked)
            ids.update(found.id for found in looked)
    repeated = [name for name, rows in ids.items() if name and rows > 1]
    if repeated:
        print(f"{len(repeated)} repeated ids, such as {repeated[0]!r} of {ids[repeated[0]]} rows")
    if not renderer:
        print("no token lengths: name a checkpoint with --model")
    print(f"{unusable} unusable rows" if unusable else "all rows are usable")
    return int(unusable > 0)


def describe(item: Task | Dialogue, tools: Sequence[str], found: Looked) -> list[Media]:
    """Note what a row holds, and return the videos and images that it shows."""
    if isinstance(item, Task):
        found.kind = item.kind
        return [Media(path) for path in item.videos]
    clips = list(item.media)
    for turn in item.turns:
        clips += [part for part in turn["content"] if isinstance(part, Media)]
        text = "".join(part for part in turn["content"] if isinstance(part, str))
        for call in parse_calls(text) if turn["role"] == "assistant" else []:
            unknown = "ok" if call.name in tools else f"unknown tool {call.name!r}"
            found.calls.append(call.error or unknown)
    if item.agent != "main":
        found.kind = f"agent {item.agent}"
    else:
        found.kind = "with calls" if found.calls else "without calls"
    return clips


def print_findings(path: str, looked: list[Looked]) -> int:
    """Print what is true of a file, and return how many of its rows are unusable."""
    print(f"\n{path}: {len(looked)} rows")
    print("  " + shares_of(found.kind for found in looked if found.kind))
    calls = [outcome for found in looked for outcome in found.calls]
    if calls:
        print(f"  calls, as a rollout reads them: {shares_of(calls)}")
    lengths = [found.tokens for found in looked if found.tokens]
    if lengths:
        quantiles = ", ".join(f"{q} % at most {np.percentile(lengths, q):.0f}" for q in (50, 90, 99, 100))
        print(f"  tokens per row: {quantiles}")
    bad = [(i, found.flaw) for i, found in enumerate(looked) if found.flaw]
    for i, flaw in bad:
        print(f"  unusable: row {i}: {flaw}")
    return len(bad)


def shares_of(names: Iterable[str]) -> str:
    """Write `with calls 62, without calls 38`."""
    return ", ".join(f"{name} {n}" for name, n in collections.Counter(names).most_common())


# ------------------------------------------------------------------------------------------------ materialize


def materialize(root: Path, parquet_dir: Path, output_dir: Path) -> int:
    """Make the media paths of every parquet absolute; report each path that is not there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if output_dir.resolve() == parquet_dir.resolve():  # a wrong `root` would spoil the only copy
        raise ValueError(f"--output-dir {output_dir} is --parquet-dir itself; write into another folder")
    files = sorted(parquet_dir.glob("*.parquet"))
    if not files:
        print(f"{parquet_dir}: no parquet files here", file=sys.stderr)
        return 1
    output_dir.mkdir(parents=True, exist_ok=True)
    missing: collections.Counter[str] = collections.Counter()

    def absolute(url: str) -> str:
        if url.startswith(("file://", "/", "http://", "https://", "data:")):
            return url
        path = root.resolve() / url
        if not path.exists():
            missing[str(path)] += 1
        return f"file://{path}"

    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(v) for v in value]
        if isinstance(value, dict):
            return {k: absolute(v) if k in MEDIA_KEYS and isinstance(v, str) else walk(v) for k, v in value.items()}
        return value

    for file in files:
        table = pq.read_table(file)
        rows = table.to_pylist()
        for i, row in enumerate(rows):
            for column in {"messages", "videos", "images"} & row.keys():
                with row_errors(f"{file}: row {i}: "):
                    if isinstance(row[column], str):
                        row[column] = json.dumps(walk(decode_json(row[column], column)), ensure_ascii=False)
                    else:
                        row[column] = walk(row[column])
        # Under another name first: half a file is never taken for a whole one, and what a link leads to stays.
        target = output_dir / file.name
        unborn = target.with_name(target.name + ".new")
        pq.write_table(pa.Table.from_pylist(rows, table.schema), unborn)
        unborn.rename(target)
        print(f"{target}: {len(rows)} rows")
    if missing:
        listing = output_dir / "missing.txt"
        listing.write_text("".join(f"{n}\t{path}\n" for path, n in sorted(missing.items())))
        uses = missing.total()
        print(f"{len(missing)} media files ({uses} uses) are not below {root}: see {listing}", file=sys.stderr)
    return int(bool(missing))


# ------------------------------------------------------------------------------------------------ the commands


def main() -> int:
    parser = argparse.ArgumentParser("python -m study.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("check", help="tell the truth about a data file or a config's data")
    command.add_argument("target", metavar="PATH|CONFIG")
    command.add_argument("--model", default="", help="checkpoint whose tokenizer counts the tokens")
    command = commands.add_parser("materialize", help="sentinel paths -> file:// paths")
    command.add_argument("--root", type=Path, required=True, help="where the media archives were unpacked")
    command.add_argument("--parquet-dir", type=Path, required=True)
    command.add_argument("--output-dir", type=Path, required=True)
    args = parser.parse_args()
    try:
        if args.command == "materialize":
            return materialize(args.root, args.parquet_dir, args.output_dir)
        return check(args.target, args.model)
    except (config.ConfigError, FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
