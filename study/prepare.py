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
import functools
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data import Dialogue, Media, Task, encode_dialogue, parse_dialogue, parse_task
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


@dataclass
class Looked:
    """What there is to say about a row."""

    kind: str = ""
    turns: int = 0  # of the assistant
    reopened: int = 0  # those whose opening is changed to the rollout's
    calls: list[str] = field(default_factory=list)  # "ok", or why a rollout could not run it
    tokens: int = 0  # 0: nobody counted
    flaw: str = ""  # why it cannot be used


def check(target: str, model: str, decode: bool) -> int:
    """Print the truth about a data file, or about all files of a run's config."""
    from tools import TOOLS, parse_calls

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
    renderer = Renderer(load_tokenizer(find_tokenizer(model)), contract) if model else None
    names = tree.get("tools", ["crop_video"])
    tools = [TOOLS[name].schema for name in names]
    longest = math.inf
    if of_config and renderer:
        from sft import SFTConfig  # torch

        longest = tree.get("pack_tokens", SFTConfig.pack_tokens)

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
            row = rows[i]
            parse = parse_dialogue if "messages" in row else parse_task
            item = parse(row, f"row {i}", home)
            found.kind = _kind(item)
            for clip in _clips(item):
                clip.frames(videos, contract)
            if isinstance(item, Task):
                return found
            said = [turn["content"] for turn in item.turns if turn["role"] == "assistant"]
            found.turns, found.reopened = len(said), item.reopened
            for parts in said:
                for call in parse_calls("".join(part for part in parts if isinstance(part, str))):
                    unknown = f"unknown tool {call.name!r}" if call.name not in names else "ok"
                    found.calls.append(call.error or unknown)
            if renderer:
                found.tokens = len(encode_dialogue(item, videos, renderer, tools))
            if found.tokens > longest:
                raise RowError(f"{found.tokens} tokens, more than pack_tokens = {longest}")
        except (RowError, VideoError) as error:
            found.flaw = str(error)
        return found

    unusable, cores = 0, os.cpu_count() or 1
    with Videos(cores) if decode else Undecoded(cores) as videos, ThreadPoolExecutor(8) as pool:
        for (path, root), rows in files.items():
            look_at = functools.partial(look, videos, rows, Path(root or rows.path.parent))
            looked = list(tqdm(pool.map(look_at, range(len(rows))), desc=rows.path.name, total=len(rows), unit="row"))
            print_findings(path, looked, renderer is not None)
            unusable += sum(bool(found.flaw) for found in looked)
    print("all rows are usable" if not unusable else f"{unusable} unusable rows")
    return int(unusable > 0)


def print_findings(path: str, looked: list[Looked], counted: bool) -> None:
    """Print what is true of a file; `counted`: a tokenizer was there."""
    print(f"\n{path}: {len(looked)} rows")
    print("  " + shares_of(found.kind for found in looked if found.kind))
    turns, reopened = sum(found.turns for found in looked), sum(found.reopened for found in looked)
    if turns:
        print(f"  openings: {reopened} of {turns} assistant turns are changed to begin as a rollout does")
    calls = [outcome for found in looked for outcome in found.calls]
    if calls:
        print(f"  calls, as a rollout reads them: {shares_of(calls)}")
    lengths = [found.tokens for found in looked if found.tokens]
    if lengths:
        quantiles = ", ".join(f"{q} % at most {np.percentile(lengths, q):.0f}" for q in (50, 90, 99, 100))
        print(f"  tokens per row: {quantiles}")
    elif not counted:
        print("  token lengths: name a checkpoint with --model")
    bad = [(i, found.flaw) for i, found in enumerate(looked) if found.flaw]
    for i, flaw in bad[:20]:
        print(f"  unusable: row {i}: {flaw}")
    if len(bad) > 20:
        print(f"  ... and {len(bad) - 20} more")


def shares_of(names: Iterable[str]) -> str:
    """Write `with calls 62, without calls 38`."""
    return ", ".join(f"{name} {n}" for name, n in collections.Counter(names).most_common())


def _kind(item: Task | Dialogue) -> str:
    if isinstance(item, Task):
        return item.kind
    if item.agent != "main":
        return f"agent {item.agent}"
    calls = any("<tool_call>" in p for t in item.turns for p in t["content"] if isinstance(p, str))
    return "with calls" if calls else "without calls"


def _clips(item: Task | Dialogue) -> list[Media]:
    if isinstance(item, Task):
        return [Media(path) for path in item.videos]
    clips = list(item.media)
    for turn in item.turns:
        clips += [part for part in turn["content"] if isinstance(part, Media)]
    return clips


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
        for row in rows:
            for column in {"messages", "videos", "images"} & row.keys():
                if isinstance(row[column], str):
                    row[column] = json.dumps(walk(json.loads(row[column])), ensure_ascii=False)
                else:
                    row[column] = walk(row[column])
        pq.write_table(pa.Table.from_pylist(rows, table.schema), output_dir / file.name)
        print(f"{output_dir / file.name}: {len(rows)} rows")
    if missing:
        listing = output_dir / "missing.txt"
        listing.write_text("".join(f"{n}\t{path}\n" for path, n in sorted(missing.items())))
        uses = missing.total()
        print(f"{len(missing)} media files ({uses} uses) are not below {root}: see {listing}", file=sys.stderr)
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
            messages = parallel_messages(messages, given[i])
        except RowError as error:
            skipped.append({"row": i, "reason": str(error)})
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # whatever shape a foreign row may have
            skipped.append({"row": i, "reason": f"malformed: {error!r}"})
        else:
            converted.append(row | {"messages": json.dumps(messages, ensure_ascii=False)})
    if target.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(converted), target)
    else:
        target.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in converted))
    listing = target.with_suffix(".skipped.jsonl")
    listing.write_text("".join(json.dumps(entry) + "\n" for entry in skipped))
    print(f"{len(converted)} of {len(rows)} rows -> {target}; {len(skipped)} could not be converted: {listing}")
    return int(not converted)


def parallel_messages(messages: list[dict], summaries: dict[int, str]) -> list[dict]:
    """Turn [.., call, response, call, response, answer] into [.., calls, responses, answer], or raise RowError.

    Calls are independent when no window lies inside an earlier one (that would be a closer look at what it showed) and
    none is repeated. The first turn's thought stays; later ones speak of results that are not there yet, and go."""
    roles = [message.get("role") for message in messages]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    if roles[first:][-1:] != ["assistant"] or "<answer>" not in _text(messages[-1]):
        raise RowError("the last turn is not an answer")

    # All calls and all responses, in their order; each turn's calls are answered before the next turn.
    calls, responses = [], []
    between, final = messages[first:-1], messages[-1]
    for message in between:
        text = _text(message)
        if message["role"] != "assistant":
            blocks = re.findall(r"<tool_response>\s*(.*?)\s*</tool_response>", text, re.S) or [text]
            for block in blocks:
                responses.append(summaries.get(len(responses), block).strip())
            continue
        found = CALL.findall(text)
        if not found or len(calls) != len(responses):
            raise RowError(f"a turn with {len(found)} calls, after {len(calls)} calls and {len(responses)} responses")
        calls += found
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
        for begin, stop in windows:
            if begin <= start and end <= stop:
                raise RowError(f"window {start:g} - {end:g} refines the earlier {begin:g} - {stop:g}")
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
