"""prepare.py: what is done to data before training. Run as `python data.py ...`; the trainers never import it.

python data.py check PATH|CONFIG [--model DIR] [--decode]
    every row parsed, every video opened (`--decode`: its overview decoded), token lengths under the model's
    tokenizer; exit status 1 if anything is unusable
python data.py materialize --root MEDIA --parquet-dir IN --output-dir OUT
    sentinel paths (`longvt_source/...`, `museg/...`, `selfqa/...`) -> file://MEDIA/...; lists what is missing
python data.py parallelize IN OUT [--summaries FILE]
    sequential tool trajectories whose calls do not depend on each other -> all calls in one turn, all reports in the
    next; frames in the responses give way to text: the response's own, or the summary that FILE gives
"""

import argparse
import collections
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import config
from checks import find_tokenizer
from contract import Renderer, VisualContract, load_tokenizer
from dataset import Clip, DataConfig, Dialogue, RowError, Rows, Source, encode_dialogue, parse_dialogue, parse_task
from video import Frames, VideoError, Videos, uniform_indices, window_indices

MEDIA_KEYS = ("video", "video_url", "image", "image_url", "url")
CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.S)
THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.S)

# ------------------------------------------------------------------------------------------------ check


def check(target: str, model: str, decode: bool) -> int:
    """Print the truth about a data file, or about all files of a run's config."""
    from tools import TOOLS

    names = ["crop_video"]
    if target.endswith((".yaml", ".yml")):
        tree = config.read_tree(Path(target))
        cfg = config.build(DataConfig, tree.get("data") or {}, "data.")
        contract = config.build(VisualContract, tree.get("visual") or {}, "visual.")
        own = (tree.get("policy") or {}).get("checkpoint", "")
        model = model or (own if Path(own).is_dir() else "")
        names = tree.get("tools", names)
    else:
        cfg = DataConfig(sources=(Source(target),))
        contract = VisualContract.load(model) if model else VisualContract()
    renderer = Renderer(load_tokenizer(find_tokenizer(model)), contract) if model else None
    tools = [TOOLS[name].schema for name in names]
    problems = 0
    with Videos() as videos:
        for source in cfg.sources:
            problems += _check_file(source, cfg, contract, renderer, videos, decode, tools)
    print("all rows are usable" if not problems else f"{problems} unusable rows or media files")
    return int(problems > 0)


def _check_file(
    source: Source,
    cfg: DataConfig,
    contract: VisualContract,
    renderer: Renderer | None,
    videos: Videos,
    decode: bool,
    tools: list[dict],
) -> int:
    from tqdm import tqdm

    rows = Rows(source.path)
    root = Path(cfg.video_root or rows.path.parent)
    items, kinds, bad = [], collections.Counter(), {}
    for i in tqdm(range(len(rows)), desc=f"{rows.path.name}: rows", unit="row"):
        try:
            row = rows[i]
            parse = parse_dialogue if "messages" in row else parse_task
            item = parse(row, f"{rows.path.name}:{i}", root, source.loss_weight)
        except RowError as error:
            bad[f"row {i}"] = str(error)
            continue
        items.append(item)
        kinds[_kind(item)] += 1

    def probe(path: str) -> tuple[str, str]:
        try:
            if decode:
                videos.overview(path, contract.overview_frames, contract.frame_size)
            else:
                videos.info(path)
        except VideoError as error:
            return path, error.reason
        return path, ""

    paths = sorted({path for item in items for path in _video_paths(item)})
    with ThreadPoolExecutor(8) as pool:
        for path, reason in tqdm(pool.map(probe, paths), total=len(paths), desc="videos", unit="file"):
            if reason:
                bad[path] = reason

    print(f"\n{rows.path}: {len(rows)} rows, {len(paths)} videos")
    print("  " + ", ".join(f"{kind} {n}" for kind, n in kinds.most_common()))
    if renderer and any(isinstance(item, Dialogue) for item in items):
        lengths = []
        for item in tqdm(items, desc="tokens", unit="row"):
            if not any(path in bad for path in _video_paths(item)):
                lengths.append(len(encode_dialogue(item, videos, renderer, tools, look=_looker(videos, contract))))
        _histogram(lengths)
    elif not renderer:
        print("  token lengths: name a checkpoint with --model")
    for what, reason in list(bad.items())[:20]:
        print(f"  unusable: {what}: {reason}")
    if len(bad) > 20:
        print(f"  ... and {len(bad) - 20} more")
    return len(bad)


def _kind(item: Any) -> str:
    if not isinstance(item, Dialogue):
        return item.kind
    if item.agent != "main":
        return {"sub": "sub-agent", "direct": "direct, no tools offered"}[item.agent]
    calls = sum(p.count("<tool_call>") for t in item.turns for p in t["content"] if isinstance(p, str))
    return "with calls" if calls else "without calls"


def _video_paths(item: Any) -> list[str]:
    if not isinstance(item, Dialogue):
        return list(item.videos)
    clips = [*item.media, *(p for turn in item.turns for p in turn["content"] if isinstance(p, Clip))]
    return [clip.path for clip in clips if not clip.still]


def _looker(videos: Videos, contract: VisualContract):
    """Frames of the right number, size and times without decoding: all that token counts depend on."""

    def look(clip: Clip) -> Frames:
        if clip.still:
            return clip.frames(videos, contract)
        info = videos.info(clip.path)
        if clip.start is None:
            chosen = uniform_indices(info.n_frames, clip.nframes or contract.overview_frames)
        else:
            limits = contract.crop_fps, contract.crop_min_frames, contract.crop_max_frames
            chosen = window_indices(info.times, clip.start, clip.end, *limits)
        width, height = contract.frame_size(info.width, info.height)
        pixels = np.broadcast_to(np.uint8(0), (len(chosen), height, width, 3))
        return Frames(pixels, tuple(info.times[chosen].tolist()))

    return look


def _histogram(lengths: list[int], bins: int = 8) -> None:
    counts, edges = np.histogram(lengths, bins)
    print(f"  tokens per row: mean {np.mean(lengths):.0f}, longest {max(lengths)}")
    for count, low, high in zip(counts, edges, edges[1:]):
        print(f"  {low:7.0f} - {high:7.0f} {'#' * round(40 * count / max(counts)):40} {count}")


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

    rows, given = Rows(source), {}
    for entry in Rows(summaries) if summaries else ():
        given[entry["row"], entry["call"]] = entry["summary"]
    converted, skipped = [], []
    for i in range(len(rows)):
        try:
            row = rows[i]
            messages = json.loads(row["messages"]) if isinstance(row["messages"], str) else row["messages"]
            texts = {call: text for (r, call), text in given.items() if r == i}
            converted.append({**row, "messages": json.dumps(parallel_messages(messages, texts), ensure_ascii=False)})
        except (RowError, ValueError, KeyError, TypeError) as error:  # whatever a foreign row may be shaped like
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
    first = next((i for i, m in enumerate(messages) if m.get("role") == "assistant"), None)
    if first is None:
        raise RowError("no assistant turn")
    opening, calls, responses, thought = messages[:first], [], [], ""
    for message in messages[first:-1]:
        text, has_frames = _text(message)
        if message["role"] != "assistant":
            responses += _summarise(text, has_frames, summaries, len(responses))
            continue
        if len(calls) != len(responses):
            raise RowError(f"{len(calls)} calls but {len(responses)} responses before the next turn")
        found = CALL.findall(text)
        if not found:
            raise RowError("an assistant turn before the last has no call")
        if not calls:
            match = THOUGHT.match(text)
            thought = match[1].strip() if match else ""
        calls += found
    final = messages[-1]
    text, _ = _text(final)
    if final.get("role") != "assistant" or "<answer>" not in text:
        raise RowError("the last turn is not an answer")
    if len(calls) < 2:
        raise RowError(f"{len(calls)} calls: nothing to run in parallel")
    if len(calls) != len(responses):
        raise RowError(f"{len(calls)} calls but {len(responses)} responses")
    _assert_independent(calls)
    turn = f"<think>\n{thought}\n</think>\n" if thought else ""
    turn += "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    reports = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in responses)
    return [*opening, {"role": "assistant", "content": turn}, {"role": "user", "content": reports}, final]


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


def _summarise(text: str, has_frames: bool, summaries: dict[int, str], done: int) -> list[str]:
    blocks = re.findall(r"<tool_response>\s*(.*?)\s*</tool_response>", text, re.S) or [text.strip()]
    reports = [summaries.get(done + i, block).strip() for i, block in enumerate(blocks)]
    if not all(reports):
        what = "frames only" if has_frames else "empty"
        raise RowError(f"response {done + reports.index('')} is {what} and no summary is given for it")
    return reports


def _text(message: dict) -> tuple[str, bool]:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content, False
    texts = [part["text"] for part in content if part.get("type") == "text"]
    return "\n".join(texts), len(texts) < len(content)


def main() -> int:
    import data

    parser = argparse.ArgumentParser(prog="data.py", description=data.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("check", help="tell the truth about a data file or a config's data")
    command.add_argument("target", metavar="PATH|CONFIG")
    command.add_argument("--model", default="", help="checkpoint whose tokenizer counts the tokens")
    command.add_argument("--decode", action="store_true", help="decode every overview, not only open the files")
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
