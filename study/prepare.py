"""prepare.py: what is done to data before training. Run as `python data.py ...`; the trainers never import it.

python data.py check PATH|CONFIG [--model DIR] [--decode]
    every row parsed, every image read and video opened (`--decode`: the frames that its rows show decoded), token
    lengths under the model's tokenizer; of a config, its `data` and its `val`; exit status 1 if anything is unusable
python data.py materialize --root MEDIA --parquet-dir IN --output-dir OUT
    sentinel paths (`longvt_source/...`, `museg/...`, `selfqa/...`) -> file://MEDIA/...; lists what is missing
python data.py parallelize IN OUT [--summaries FILE]
    sequential tool trajectories whose calls do not depend on each other -> all calls in one turn, all reports in the
    next; frames in the responses give way to text: the response's own, or the summary that FILE gives
"""

import argparse
import collections
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data import Clip, Dialogue, Task, encode_dialogue, parse_dialogue, parse_task
from runtime import config
from runtime.checks import find_tokenizer
from runtime.contract import Renderer, VisualContract, load_tokenizer
from runtime.dataset import DataConfig, RowError, Rows
from runtime.video import Frames, VideoError, Videos

MEDIA_KEYS = ("video", "video_url", "image", "image_url", "url")
CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.S)
THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.S)

# ------------------------------------------------------------------------------------------------ check


class Undecoded(Videos):
    """Frames of the right number, size and times, which nobody decoded: all that token counts depend on."""

    def frames(self, path: str, indices: Sequence[int], size: tuple[int, int]) -> Frames:
        times = self.info(path).times[list(indices)].tolist()
        return Frames(np.broadcast_to(np.uint8(0), (len(times), size[1], size[0], 3)), tuple(times))


def check(target: str, model: str, decode: bool) -> int:
    """Print the truth about a data file, or about all files of a run's config."""
    from tools import TOOLS

    tree = {"data": {"sources": [{"path": target}]}}
    if of_config := target.endswith((".yaml", ".yml")):
        tree = config.read_tree(Path(target))
        own = (tree.get("policy") or {}).get("checkpoint", "")
        model = model or (own if Path(own).is_dir() else "")
    if of_config or not model:
        contract = config.build(VisualContract, tree.get("visual") or {}, "visual.")
    else:
        contract = VisualContract.load(model)
    renderer = Renderer(load_tokenizer(find_tokenizer(model)), contract) if model else None
    tools = [TOOLS[name].schema for name in tree.get("tools", ["crop_video"])]
    names = ["data", "val"] if tree.get("val") else ["data"]
    cfgs = [config.build(DataConfig, tree.get(name) or {}, f"{name}.") for name in names]
    files = dict.fromkeys((source.path, cfg.video_root) for cfg in cfgs for source in cfg.sources)  # each once
    sources = [(Rows(path), root) for path, root in files]
    problems, cores, most = 0, os.cpu_count() or 1, math.inf
    if of_config and renderer:
        from sft import SFTConfig  # torch

        most = tree.get("pack_tokens", SFTConfig.pack_tokens)
    with Undecoded(cores) as undecoded, Videos(cores) as videos:
        for rows, root in sources:
            items, bad = _read_rows(rows, Path(root or rows.path.parent))
            bad |= _look_at_media(items.values(), videos if decode else undecoded, contract)
            lengths = []
            if renderer:
                good = {row: item for row, item in items.items() if not any(clip.path in bad for clip in _clips(item))}
                lengths, refused = _lengths(good, undecoded, renderer, tools, most)
                bad |= refused
            kinds = collections.Counter(map(_kind, items.values()))
            print(f"\n{rows.path}: {len(rows)} rows")
            print("  " + ", ".join(f"{kind} {n}" for kind, n in kinds.most_common()))
            if lengths:
                shares = ", ".join(f"{q} % at most {np.percentile(lengths, q):.0f}" for q in (50, 90, 99, 100))
                print(f"  tokens per row: {shares}")
            elif not renderer:
                print("  token lengths: name a checkpoint with --model")
            for what, reason in list(bad.items())[:20]:
                print(f"  unusable: {what}: {reason}")
            if len(bad) > 20:
                print(f"  ... and {len(bad) - 20} more")
            problems += len(bad)
    print("all rows are usable" if not problems else f"{problems} unusable rows or media files")
    return int(problems > 0)


def _read_rows(rows: Rows, root: Path) -> tuple[dict[str, Task | Dialogue], dict[str, str]]:
    """What can be read, and the reasons of what cannot, both by row."""
    items, bad = {}, {}
    for i in tqdm(range(len(rows)), desc=f"{rows.path.name}: rows", unit="row"):
        try:
            row = rows[i]
            items[f"row {i}"] = (parse_dialogue if "messages" in row else parse_task)(row, f"row {i}", root)
        except RowError as error:
            bad[f"row {i}"] = str(error)
    return items, bad


def _look_at_media(items: Iterable[Task | Dialogue], videos: Videos, contract: VisualContract) -> dict[str, str]:
    """What is wrong with a file, by path."""

    def look(clip: Clip) -> str:
        try:
            clip.frames(videos, contract)
        except VideoError as error:
            return error.reason
        return ""

    clips = list({clip: None for item in items for clip in _clips(item)})
    with ThreadPoolExecutor(8) as pool:
        reasons = tqdm(pool.map(look, clips), total=len(clips), desc="media", unit="clip")
        return {clip.path: reason for clip, reason in zip(clips, reasons) if reason}


def _lengths(
    items: dict[str, Task | Dialogue], videos: Undecoded, renderer: Renderer, tools: list[dict], most: float
) -> tuple[list[int], dict[str, str]]:
    """Tokens of each dialogue, and the reasons of those that a training would skip."""
    lengths, refused = [], {}
    dialogues = {row: item for row, item in items.items() if isinstance(item, Dialogue)}
    for row, dialogue in tqdm(dialogues.items(), desc="tokens", unit="row"):
        try:
            lengths.append(len(encode_dialogue(dialogue, videos, renderer, tools)))
            if lengths[-1] > most:
                raise RowError(f"{lengths[-1]} tokens, more than pack_tokens = {most}")
        except RowError as error:
            refused[row] = str(error)
    return lengths, refused


def _kind(item: Task | Dialogue) -> str:
    if isinstance(item, Task):
        return item.kind
    if item.agent != "main":
        return f"agent {item.agent}"
    calls = any("<tool_call>" in p for t in item.turns for p in t["content"] if isinstance(p, str))
    return "with calls" if calls else "without calls"


def _clips(item: Task | Dialogue) -> list[Clip]:
    if isinstance(item, Task):
        return [Clip(path) for path in item.videos]
    return [*item.media, *(p for turn in item.turns for p in turn["content"] if isinstance(p, Clip))]


# ------------------------------------------------------------------------------------------------ materialize


def materialize(root: Path, parquet_dir: Path, output_dir: Path) -> int:
    """Make the media paths of every parquet absolute; report each path that is not there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = sorted(parquet_dir.glob("*.parquet"))
    if not files:
        print(f"{parquet_dir}: no parquet files here", file=sys.stderr)
        return 1
    output_dir.mkdir(parents=True, exist_ok=True)
    missing: collections.Counter[str] = collections.Counter()

    def place(url: str) -> str:
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
            return {k: place(v) if k in MEDIA_KEYS and isinstance(v, str) else walk(v) for k, v in value.items()}
        return value

    for file in files:
        table = pq.read_table(file)
        for column in {"messages", "videos", "images"} & set(table.column_names):
            values = [
                json.dumps(walk(json.loads(v)), ensure_ascii=False) if isinstance(v, str) else walk(v)
                for v in table[column].to_pylist()
            ]
            field = table.schema.field(column)
            table = table.set_column(table.column_names.index(column), field, pa.array(values, field.type))
        pq.write_table(table, output_dir / file.name)
        print(f"{output_dir / file.name}: {table.num_rows} rows")
    if missing:
        listing = output_dir / "missing.txt"
        listing.write_text("".join(f"{n}\t{path}\n" for path, n in sorted(missing.items())))
        print(
            f"{len(missing)} media files ({missing.total()} uses) are not below {root}: see {listing}", file=sys.stderr
        )
    return int(bool(missing))


# ------------------------------------------------------------------------------------------------ parallelize


def parallelize(source: Path, target: Path, summaries: Path | None) -> int:
    """Rewrite what can be rewritten; list every other row with the reason in TARGET.skipped.jsonl."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows, given = Rows(source), collections.defaultdict(dict)
    for entry in Rows(summaries) if summaries else ():
        given[entry["row"]][entry["call"]] = entry["summary"]
    converted, skipped = [], []
    for i in range(len(rows)):
        try:
            row = rows[i]
            messages = json.loads(row["messages"]) if isinstance(row["messages"], str) else row["messages"]
            converted.append(row | {"messages": json.dumps(parallel_messages(messages, given[i]), ensure_ascii=False)})
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # whatever a foreign row may be shaped like
            skipped.append({"row": i, "reason": f"{error}" if isinstance(error, RowError) else f"malformed: {error!r}"})
    if target.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(converted), target)
    else:
        target.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in converted))
    listing = target.with_suffix(".skipped.jsonl")
    listing.write_text("".join(json.dumps(entry) + "\n" for entry in skipped))
    print(f"{len(converted)} of {len(rows)} rows -> {target}; {len(skipped)} could not be converted: {listing}")
    return int(not converted)


def parallel_messages(messages: list[dict], summaries: dict[int, str]) -> list[dict]:
    """[.., call, response, call, response, answer] -> [.., calls, responses, answer], or RowError with the reason.

    Calls are independent when no window lies inside an earlier one (that would be a closer look at what it showed) and
    none is repeated. The first turn's thought stays; later ones speak of results that are not there yet, and go."""
    first = next((i for i, m in enumerate(messages) if m.get("role") == "assistant"), len(messages))
    *between, final = messages[first:] or [{}]
    calls, responses = [], []
    for message in between:
        text = _text(message)
        if message["role"] != "assistant":
            blocks = re.findall(r"<tool_response>\s*(.*?)\s*</tool_response>", text, re.S) or [text]
            responses += [summaries.get(len(responses) + i, block).strip() for i, block in enumerate(blocks)]
        elif not (found := CALL.findall(text)) or len(calls) != len(responses):
            raise RowError(f"a turn with {len(found)} calls, after {len(calls)} calls and {len(responses)} responses")
        else:
            calls += found
    if final.get("role") != "assistant" or "<answer>" not in _text(final):
        raise RowError("the last turn is not an answer")
    if len(calls) < 2:
        raise RowError(f"{len(calls)} calls: nothing to run in parallel")
    if len(calls) != len(responses):
        raise RowError(f"{len(calls)} calls but {len(responses)} responses")
    if "" in responses:
        raise RowError(f"response {responses.index('')} has no text, and no summary is given for it")
    _assert_independent(calls)
    thought = THOUGHT.match(_text(between[0]))
    turn = f"<think>\n{thought[1].strip()}\n</think>\n" if thought and thought[1].strip() else ""
    turn += "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    reports = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in responses)
    return [*messages[:first], {"role": "assistant", "content": turn}, {"role": "user", "content": reports}, final]


def _assert_independent(calls: list[str]) -> None:
    windows = []
    for call in calls:
        try:
            arguments = json.loads(call)["arguments"]
            start, end = float(arguments["start_time"]), float(arguments["end_time"])
        except (ValueError, KeyError, TypeError):
            raise RowError(f"not a crop_video call with start_time and end_time: {call[:80]}") from None
        for earlier in windows:
            if earlier[0] <= start and end <= earlier[1]:
                raise RowError(f"window {start:g} - {end:g} refines the earlier {earlier[0]:g} - {earlier[1]:g}")
        windows.append((start, end))


def _text(message: dict) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(p["text"] for p in content if p.get("type") == "text")


def main() -> int:
    import data

    parser = argparse.ArgumentParser(prog="data.py", description=data.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("check", help="tell the truth about a data file or a config's data")
    command.add_argument("target", metavar="PATH|CONFIG")
    command.add_argument("--model", default="", help="checkpoint whose tokenizer counts the tokens")
    command.add_argument("--decode", action="store_true", help="decode what the rows show, not only open the files")
    command = commands.add_parser("materialize", help="sentinel paths -> file:// paths")
    command.add_argument("--root", type=Path, required=True, help="where the media archives were unpacked")
    command.add_argument("--parquet-dir", type=Path, required=True)
    command.add_argument("--output-dir", type=Path, required=True)
    command = commands.add_parser("parallelize", help="sequential trajectories -> parallel calls")
    command.add_argument("source", type=Path, metavar="IN")
    command.add_argument("target", type=Path, metavar="OUT")
    command.add_argument("--summaries", type=Path, help='JSONL of {"row": i, "call": j, "summary": text}')
    args = parser.parse_args()
    try:
        if args.command == "materialize":
            return materialize(args.root, args.parquet_dir, args.output_dir)
        if args.command == "parallelize":
            return parallelize(args.source, args.target, args.summaries)
        return check(args.target, args.model, args.decode)
    except (config.ConfigError, FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head`
        os._exit(1)
