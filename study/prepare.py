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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data import Call, Task, encode_dialogue, parse_task
from runtime import config
from runtime.checks import find_checkpoint
from runtime.dataset import DataConfig, RowError, Rows, decode_json, row_errors
from runtime.dialogue import Dialogue, Media, parse_dialogue
from runtime.prompts import Prompts
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
class RowReport:
    """What `check` has found in a row."""

    item: Task | Dialogue | None = None  # None: it could not be parsed
    tokens: int = 0  # 0: nobody counted
    error: str = ""  # why it cannot be used


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
    texts = tree.get("prompts") or {}
    if isinstance(texts, str):
        texts = config.read_tree(Path(texts))
    prompts = config.build(Prompts, texts, "prompts.")
    renderer = Renderer(load_tokenizer(find_checkpoint(model, weights=False)), contract, prompts) if model else None
    tools = tree.get("tools", ["crop_video"])
    longest = tree.get("pack_tokens", math.inf)

    # Each file once.
    files = {}
    for name in ("data", "val") if tree.get("val") else ("data",):
        cfg = config.build(DataConfig, tree.get(name) or {}, f"{name}.")
        for source in cfg.sources:
            files[source.path, cfg.video_root] = Rows(source.path)

    def read_row(videos: Videos, rows: Rows, home: Path, i: int) -> RowReport:
        """Do to a row what a training does, up to its tokens."""
        report = RowReport()
        try:
            with row_errors():
                row = rows[i]
                parse = parse_dialogue if "messages" in row else parse_task
                report.item = parse(row, f"row {i} of {rows.path}", home)
                for media in media_of(report.item):
                    media.frames(videos, contract)
                if renderer and isinstance(report.item, Dialogue):
                    schemas = [TOOLS[name].schema for name in tools]
                    report.tokens = len(encode_dialogue(report.item, videos, renderer, schemas))
                if report.tokens > longest:
                    raise RowError(f"{report.tokens} tokens, more than pack_tokens = {longest}")
        except RowError as error:
            report.error = str(error)
        return report

    unusable, ids = 0, collections.Counter()
    with Undecoded(os.cpu_count() or 1) as videos, ThreadPoolExecutor(8) as pool:
        for (path, root), rows in files.items():
            read = functools.partial(read_row, videos, rows, Path(root or rows.path.parent))
            reports = list(tqdm(pool.map(read, range(len(rows))), desc=rows.path.name, total=len(rows), unit="row"))
            print_reports(path, reports, tools)
            unusable += sum(bool(report.error) for report in reports)
            ids.update(report.item.id for report in reports if report.item)
    repeated = [name for name, rows in ids.items() if rows > 1]
    if repeated:
        print(f"{len(repeated)} repeated ids, such as {repeated[0]!r} of {ids[repeated[0]]} rows")
    if not renderer:
        print("no token lengths: name a checkpoint with --model")
    print(f"{unusable} unusable rows" if unusable else "all rows are usable")
    return int(unusable > 0)


def media_of(item: Task | Dialogue) -> list[Media]:
    """Return the videos and images that a row shows."""
    if isinstance(item, Task):
        return [Media(path) for path in item.videos]
    parts = [part for turn in item.turns for part in turn["content"]]
    return [*item.media, *(part for part in parts if isinstance(part, Media))]


def calls_of(item: Task | Dialogue) -> list[Call]:
    """Return the calls of a dialogue's assistant, as a rollout reads them."""
    calls = []
    for turn in item.turns if isinstance(item, Dialogue) else ():
        if turn["role"] == "assistant":
            calls += parse_calls("".join(turn["content"]))
    return calls


def print_reports(path: str, reports: list[RowReport], tools: Sequence[str]) -> None:
    """Print what is true of a file."""
    kinds, outcomes = [], []
    for item in (report.item for report in reports if report.item):
        calls = calls_of(item)
        for call in calls:
            outcomes.append(call.error or ("ok" if call.name in tools else f"unknown tool {call.name!r}"))
        if isinstance(item, Task):
            kinds.append(item.kind)
        elif item.agent != "main":
            kinds.append(f"agent {item.agent}")
        else:
            kinds.append("with calls" if calls else "without calls")
    print(f"\n{path}: {len(reports)} rows\n  {count(kinds)}")
    if outcomes:
        note = " (the toy has unparseable ones on purpose)" if "unparseable" in outcomes else ""
        print(f"  calls, as a rollout reads them: {count(outcomes)}{note}")
    lengths = [report.tokens for report in reports if report.tokens]
    if lengths:
        quantiles = ", ".join(f"{q} % at most {np.percentile(lengths, q):.0f}" for q in (50, 90, 99, 100))
        print(f"  tokens per row: {quantiles}")
    for i, report in enumerate(reports):
        if report.error:
            print(f"  unusable: row {i}: {report.error}")


def count(names: Iterable[str]) -> str:
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
