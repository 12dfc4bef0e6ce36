"""prepare.py: check data before training. The trainers never import it.

    python -m study.prepare check PATH|CONFIG [--model DIR]

It parses every row, reads every image, opens every video, and reads calls as a rollout reads them. It counts the ids that
rows share, and the tokens of each row under the model's tokenizer. Of a config, it checks `data` and `val`. The exit
status is 1 if any row is unusable.
"""

import argparse
import collections
import functools
import math
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data import Call, Task, parse_task
from runtime import config
from runtime.checks import find_checkpoint
from runtime.dataset import DataConfig, RowError, Rows, row_errors
from runtime.dialogue import Dialogue, Media, parse_dialogue
from runtime.prompts import Prompts
from runtime.render import Renderer, load_tokenizer
from runtime.video import Clip, Videos
from runtime.visual import VisualContract
from sft import encode_dialogue
from tools import TOOLS, parse_calls


class Undecoded(Videos):
    """Frames of the right number, size and times, which nobody decoded: all that token counts depend on."""

    def frames(self, path: str, indices: Sequence[int], size: tuple[int, int]) -> Clip:
        times = self.info(path).times[list(indices)].tolist()
        return Clip(np.broadcast_to(np.uint8(0), (len(times), size[1], size[0], 3)), tuple(times))


@dataclass(frozen=True)
class Settings:
    """What a training needs to read its rows."""

    files: list[tuple[str, Rows, Path]]  # the path as written, the rows, the folder of their relative paths
    contract: VisualContract
    renderer: Renderer | None  # None: no checkpoint, so no tokens are counted
    tools: list[str]
    pack_tokens: float


@dataclass
class RowReport:
    """The result of checking one row."""

    item: Task | Dialogue | None = None  # None: it could not be parsed
    tokens: int = 0  # 0: nobody counted
    error: str = ""  # why it cannot be used


def check(target: str, model: str) -> int:
    """Check every row of a data file, or of all files of a run's config. Return 1 if any is unusable."""
    settings = read_settings(target, model)
    unusable = 0
    ids = collections.Counter()
    with Undecoded(os.cpu_count() or 1) as videos, ThreadPoolExecutor(8) as pool:
        for path, rows, home in settings.files:
            read = functools.partial(check_row, settings, videos, rows, home)
            reports = list(tqdm(pool.map(read, range(len(rows))), desc=rows.path.name, total=len(rows), unit="row"))
            print_reports(path, reports, settings.tools)
            unusable += sum(bool(report.error) for report in reports)
            ids.update(report.item.id for report in reports if report.item)

    repeated = [name for name, rows in ids.items() if rows > 1]
    if repeated:
        print(f"{len(repeated)} repeated ids, such as {repeated[0]!r} of {ids[repeated[0]]} rows")
    if not settings.renderer:
        print("no token lengths: name a checkpoint with --model")
    print(f"{unusable} unusable rows" if unusable else "all rows are usable")
    return int(unusable > 0)


def read_settings(target: str, model: str) -> Settings:
    """Read a run's config. A lone data file has the default settings, and the contract of the model."""
    is_config = target.endswith((".yaml", ".yml"))
    tree = config.read_tree(Path(target)) if is_config else {"data": {"sources": [{"path": target}]}}

    # The checkpoint that a config names may not exist yet.
    checkpoint = (tree.get("policy") or {}).get("checkpoint", "")
    if not model and Path(checkpoint).is_dir():
        model = checkpoint
    if is_config or not model:
        contract = config.build(VisualContract, tree.get("visual") or {}, "visual.")
    else:
        contract = VisualContract.load(model)

    texts = tree.get("prompts") or {}
    if isinstance(texts, str):
        texts = config.read_tree(Path(texts))
    prompts = config.build(Prompts, texts, "prompts.")
    renderer = None
    if model:
        renderer = Renderer(load_tokenizer(find_checkpoint(model, weights=False)), contract, prompts)

    # List each file once, even if several sources name it.
    files = {}
    for name in ("data", "val") if tree.get("val") else ("data",):
        cfg = config.build(DataConfig, tree.get(name) or {}, f"{name}.")
        for source in cfg.sources:
            rows = Rows(source.path)
            files[source.path, cfg.video_root] = (source.path, rows, Path(cfg.video_root or rows.path.parent))
    tools = tree.get("tools", ["crop_video"])
    return Settings(list(files.values()), contract, renderer, tools, tree.get("pack_tokens", math.inf))


def check_row(settings: Settings, videos: Videos, rows: Rows, home: Path, i: int) -> RowReport:
    """Do to row i what a training does, up to its tokens."""
    report = RowReport()
    try:
        with row_errors():
            row = rows[i]
            parse = parse_dialogue if "messages" in row else parse_task
            report.item = parse(row, f"row {i} of {rows.path}", home)
            for media in media_of(report.item):
                media.frames(videos, settings.contract)
            if settings.renderer and isinstance(report.item, Dialogue):
                schemas = [TOOLS[name].schema for name in settings.tools]
                report.tokens = len(encode_dialogue(report.item, videos, settings.renderer, schemas))
            if report.tokens > settings.pack_tokens:
                raise RowError(f"{report.tokens} tokens, more than pack_tokens = {settings.pack_tokens}")
    except RowError as error:
        report.error = str(error)
    return report


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
    """Print the kinds of a file's rows, their calls and lengths, and each row that cannot be used."""
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


def main() -> int:
    parser = argparse.ArgumentParser("python -m study.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("check", help="check a data file, or the data of a config")
    command.add_argument("target", metavar="PATH|CONFIG")
    command.add_argument("--model", default="", help="checkpoint whose tokenizer counts the tokens")
    args = parser.parse_args()
    try:
        return check(args.target, args.model)
    except (config.ConfigError, FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
