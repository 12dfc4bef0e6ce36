"""Rows become tasks and tokens: schemas, shuffling, packing, gating, and `--check-data`."""

import collections
import contextlib
import itertools
import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scripted import END, TASK, Scripted, crop, play, turns
from scripts import REPO
from sft_rows import check_rows_of_a_rollout
from tiny import Pieces

from data import parse_task
from dialogues import parse_dialogue
from episode import NO_PROMPT, Trajectory
from grpo import GRPOConfig
from rl import RLConfig, Sampler, draw_k
from rl import check_row as check_rl_row
from rollout import AgentContext, RolloutConfig, ask_subagent
from runtime import config, dataset
from runtime.dataset import DataConfig, DataError, Dataset, RowError, Source, row_errors
from runtime.packing import best_fit
from runtime.policy import PolicyConfig
from runtime.script import read_all_rows
from runtime.video import VideoError
from sft import Batches, SFTConfig, check_row, encode_dialogue, target_kinds
from tools import ClipForSubagent

SAID = {"role": "assistant", "content": "a"}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ------------------------------------------------------------------------------------------------ gating and the overview


def test_k_is_uniform_over_the_choices_and_the_same_in_every_process():
    """The released code seeds K with Python's `hash`, which differs per process."""
    choices = [4, 8, 16, 32, 64]
    assert [draw_k(f"t{i}", i, choices, 7) for i in range(12)] == [64, 32, 64, 64, 8, 8, 16, 4, 32, 64, 16, 8]
    drawn = [draw_k(f"task-{i}", 0, choices) for i in range(5000)]
    assert all(abs(drawn.count(k) - 1000) < 4 * (1000 * 0.8) ** 0.5 for k in choices)


def test_the_frames_of_several_videos_carry_their_names(renderer):
    [episode] = play(renderer, turns("B" + END), [replace(TASK, videos=("/data/a.mp4", "/data/b.mp4"))])
    text = renderer.decode(episode.main.prompt.ids)
    assert re.findall(r"\n(\S+): <0.0 seconds>", text) == ["a.mp4", "b.mp4"]


# ------------------------------------------------------------------------------------------------ rows

ROWS = yaml.safe_load((Path(__file__).parent / "data_rows.yaml").read_text("utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder in which the rows of data_rows.yaml stand. Only their reading is tested, so its files are empty."""
    root = tmp_path_factory.mktemp("rows")
    (root / "more").mkdir()
    for name in ("a.mp4", "b.mp4", "more/a.mp4", "a.png", "b.png"):
        (root / name).touch()
    return root


def check(parse, row: dict, case: dict, folder: Path) -> None:
    """Compare what `parse` makes of a row with its case in data_rows.yaml."""
    row = json.loads(json.dumps(row).replace("FOLDER", str(folder)))
    if "refused" in case:
        with pytest.raises(RowError) as error, row_errors():
            parse(row, "rows:0", folder)
        for word in case["refused"]:
            assert word.replace("FOLDER", str(folder)) in str(error.value)
    else:
        item = json.loads(json.dumps(asdict(parse(row, "rows:0", folder))).replace(f"{folder}/", ""))
        assert {name: item[name] for name in case["becomes"]} == case["becomes"]


@pytest.mark.parametrize("name", ROWS["tasks"])
def test_a_row_of_rl_is_the_task_that_it_says_or_is_refused_by_name(folder, name):
    case, row = ROWS["tasks"][name], dict(ROWS["plain_task"])
    if "asks" in case:
        row["prompt"] = [{"role": "user", "content": case["asks"]}]
    row["extra_info"] = row["extra_info"] | case.get("info", {})
    check(parse_task, row | case.get("row", {}), case, folder)


@pytest.mark.parametrize("name", ROWS["dialogues"])
def test_a_row_of_sft_is_the_dialogue_that_it_says_or_is_refused_by_name(folder, name):
    case = ROWS["dialogues"][name]
    messages = {"messages": case["messages"]} if "messages" in case else {}
    check(parse_dialogue, messages | case.get("row", {}), case, folder)


def test_an_unknown_question_type_is_reported_once(caplog, folder):
    row = ROWS["plain_task"] | {"extra_info": {"answer": "B", "question_type": "riddle"}}
    for _ in range(2):
        parse_task(row, "rows:0", folder)
    [said] = caplog.messages
    assert "question_type = 'riddle'" in said


# ------------------------------------------------------------------------------------------------ tokens of SFT rows


@pytest.fixture
def video(toy_dir) -> str:
    return str(toy_dir / "videos" / "train00000.mp4")


@pytest.fixture
def encode(toy_renderer, videos, schemas):
    """encode(messages, agent="sub", ...) -> the row that SFT trains on for such a row."""

    def make(messages, root=Path("/nowhere"), **columns):
        dialogue = parse_dialogue({"messages": messages, **columns}, "file:0", root)
        return encode_dialogue(dialogue, videos, toy_renderer, schemas)

    return make


def shows(name: str, *text: str, **options) -> dict:
    return {"role": "user", "content": [{"image" if name.endswith(".png") else "video": name, **options}, *text]}


@pytest.mark.parametrize("said", ROWS["kinds"])
def test_a_token_is_of_the_kind_of_the_content_that_it_carries(said):
    """Past bug: with Qwen's merges every answer letter counted as `structure`, because its token begins with the tag's `>`."""
    pieces = [*said.split("|"), "<|im_end|>", "<|endoftext|>"]
    mask = [int(not piece.startswith("#")) for piece in pieces]
    kinds = target_kinds(Trajectory(NO_PROMPT, [*range(len(pieces))], mask), Pieces(*pieces))
    assert kinds == [*ROWS["kinds"][said].split(), "structure", "structure"]


@pytest.mark.parametrize("agent, said, refused", [
    ("main", crop(), ""),
    ("main", crop().replace("crop_video", "search"), r"'search': .*\['crop_video'\]"),
    ("main", "<tool_code>print(search(query='x'))</tool_code>", "'search'"),
    ("main", "<tool_call>search</tool_call>", ""),  # --check-data counts it
    ("direct", crop(), r"'crop_video': .*\[\]"),
])  # fmt: skip
def test_a_call_of_a_tool_that_is_not_offered_is_refused(encode, agent, said, refused):
    with pytest.raises(RowError, match=refused) if refused else contextlib.nullcontext():
        encode([{"role": "user", "content": "Which?"}, {"role": "assistant", "content": said}], agent=agent)


@pytest.mark.parametrize("opening, edges", [("<think>", "  {}\r\n"), ("\n\n<think>\r\n  ", "\n{} ")])
def test_a_row_has_the_ids_of_the_same_conversation_rolled_out(video, toy_renderer, videos, schemas, opening, edges):
    """Published rows begin with `<think>Text` or `<think>\\n\\n`, so their first token differs from the one after the forced
    prefix."""
    thoughts = (f"I look.\n</think>\n{crop(0, 4)}\n{crop(0, 4)}", "It flashed.\n</think>\n<answer>red</answer>")
    check_rows_of_a_rollout(toy_renderer, videos, schemas, video, opening, edges.format("A red flash."), thoughts)


def test_a_sub_agents_row_is_what_a_rollout_asks_in_its_tools_words(video, encode, toy_renderer, videos):
    window = {"video_start": 4, "video_end": 12}
    said = {"role": "assistant", "content": "No flash."}
    engine = Scripted(toy_renderer, lambda prompt, seed: "No flash.<|im_end|>")
    context = AgentContext(engine, toy_renderer, videos, RolloutConfig())
    for words in ({}, {"request": "Which text is here?", "system": "You read text."}):
        learned = encode([shows(video, **window), said], agent="sub", **words)
        agent, report = ask_subagent(context, ClipForSubagent(learned.clips[0], (4, 12), **words), 0)
        assert report == "No flash." and agent.all_ids == learned.ids[: len(agent.all_ids)]
        text = toy_renderer.decode(agent.all_ids)
        assert all(word in text for word in words.values()) and ("What happens here?<" in text) != bool(words)
        assert len(learned.clips[0]) == 8 and all(4 <= t <= 12 for t in learned.clips[0].times)
    asked = encode([shows(video, "Which?", **window), said], agent="sub")
    assert "What happens here?\nQuestion: Which?<" in toy_renderer.decode(asked.ids)


def test_images_and_text_only_rows_are_rows_too(tmp_path, encode, toy_renderer):
    noise = np.random.default_rng(0).integers(0, 256, (100, 200, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    learned = encode([shows("a.png", "<image>What?"), SAID], tmp_path)
    assert learned.ids.count(toy_renderer.image_pad) == 2 * 1
    assert "seconds>" not in toy_renderer.decode(learned.ids)
    text_only = encode([{"role": "user", "content": "2+2?"}, SAID])
    assert text_only.clips == [] and sum(text_only.mask) >= 2


# ------------------------------------------------------------------------------------------------ bad rows, and --check-data


@pytest.fixture(scope="module")
def trap(tmp_path_factory, toy_dir) -> Path:
    """A folder with a good video, one of zeros, an image that is cut off, and a pipe without a writer."""
    folder = tmp_path_factory.mktemp("trap")
    (folder / "good.mp4").symlink_to(toy_dir / "videos" / "train00000.mp4")
    (folder / "zeros.mp4").write_bytes(bytes(2000))
    Image.new("RGB", (9, 9)).save(folder / "half.png")
    os.truncate(folder / "half.png", 45)
    os.mkfifo(folder / "fifo")
    return folder


@pytest.fixture
def checked(toy_dir, trap, capsys):
    """checked(messages of rows) -> the config that reads them, the status of its --check-data, and the lines."""

    def run(*messages) -> tuple[SFTConfig, int, list[str]]:
        source = Source(write_jsonl(trap / "sft.jsonl", [{"messages": m} for m in messages]))
        overrides = [f"policy.checkpoint={toy_dir}/model", "decoders=1", "pack_tokens=2000", "val=null"]
        cfg = config.load(SFTConfig, REPO / "configs" / "toy_sft.yaml", overrides)
        cfg = replace(cfg, data=DataConfig((source,), max_bad_fraction=1.0))
        return cfg, read_all_rows(cfg, check_row), capsys.readouterr().out.splitlines()

    return run


def test_training_rejects_the_rows_that_check_data_names_for_the_same_reasons(
    checked, toy_renderer, videos, caplog, monkeypatch
):
    """A row that raises an unforeseen error is left out, and its reason names the error."""
    monkeypatch.setattr(dataset, "_logged", set())
    whys = {
        "RecursionError": "[" * 100_000,
        "OverflowError": [shows("good.mp4", video_start=-1e308, video_end=1e308), SAID],
        "OverflowError: ": [shows("good.mp4", video_start=-(10**400), video_end=10**400), SAID],
        "half.png: cannot be decoded": [shows("half.png"), SAID],
        "zeros.mp4: cannot be decoded": [shows("zeros.mp4"), SAID],
        "fifo: is not a regular file": [shows("good.mp4"), SAID, shows("fifo"), SAID],
        r"\ud800.png: no such file": [shows("\ud800.png"), SAID],  # half of an emoji
        "good.mp4: cannot be decoded (Unidentified": [{"role": "user", "content": [{"image": "good.mp4"}]}, SAID],
        "more than pack_tokens = 2000": [shows("good.mp4", "why " * 3000, nframes=2), SAID],
    }
    cfg, status, [first, *lines] = checked(*whys.values(), [shows("good.mp4", nframes=2), SAID])
    batches = Batches(cfg.data, cfg, videos, toy_renderer)
    [micro] = batches.make(0, len(whys) + 1)
    [[learned]] = [bundle.rows for bundle in micro.bundles]
    assert status == 1
    assert first.endswith(f": 10 rows, 9 unusable; {len(learned.ids)} tokens, at most {len(learned.ids)}")
    assert lines == [f"  row {i}: {batches.dataset.bad[f'sft.jsonl:{i}']}" for i in range(len(whys))]
    assert [why for why, line in zip(whys, lines) if why not in line] == []
    traces = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert traces == [OverflowError]  # the first of its type; errors from a file's worker are not ours


def test_check_data_counts_what_is_odd_about_usable_rows(checked):
    """It is often a mistake, but the toy builds it in on purpose."""
    asked = {"role": "user", "content": "q"}
    called, unread = ({"role": "assistant", "content": text} for text in (crop() * 2, "<tool_call>{</tool_call>"))
    reply = {"role": "tool", "content": "r"}
    _, status, lines = checked([asked, called, reply, SAID], [asked, unread], [asked, unread, reply, SAID])
    odd = [("2", "fewer replies than calls"), ("3", "no frame"), ("2", "a call that cannot be parsed")]
    assert not status and lines[1:] == [f"  note    {count} rows with {what}" for count, what in odd]
    _, status, lines = checked([shows("good.mp4"), called, reply, reply, SAID])
    assert not status and len(lines) == 1


def test_a_video_that_cannot_be_shown_fails_its_episodes_and_is_no_bad_row(trap, toy_renderer, videos):
    bad, good = rows = [ROWS["plain_task"] | {"videos": [name]} for name in ("zeros.mp4", "good.mp4")]
    data = DataConfig((Source(write_jsonl(trap / "rl.jsonl", rows)),))
    cfg = RLConfig(run="run", policy=PolicyConfig(""), data=data, batch_tasks=2, grpo=GRPOConfig(group_size=2))
    engine = Scripted(toy_renderer, lambda prompt, seed: "B" + END)
    with contextlib.closing(Sampler(cfg, engine, toy_renderer, videos)) as sampler:
        sampler.start(0)
        groups, _ = sampler.get(0)
    assert sorted(group.episodes[0].error_kind for group in groups) == ["", "VideoError"]
    assert not sampler.dataset.bad
    tokens, oddities = check_rl_row(good, "rl.jsonl:1", trap, cfg, toy_renderer, videos)
    assert tokens > 0 and not oddities
    with pytest.raises(VideoError):
        check_rl_row(bad, "rl.jsonl:0", trap, cfg, toy_renderer, videos)


# ------------------------------------------------------------------------------------------------ batches


def number(row, origin, root):
    if row.get("bad"):
        raise RowError("marked as bad")
    return row["n"]


def numbers(dataset: Dataset, *steps: int, size: int, **share) -> list[int]:
    return [draw.item for step in steps for draw in dataset.batch(step, size, **share)]


def numbered(path: Path, n: int, bad=(), first=0) -> str:
    """Write n rows with numbers from `first` on, of which some are bad."""
    return write_jsonl(path, [{"n": first + i, "bad": i in bad} for i in range(n)])


@pytest.fixture
def mixture(tmp_path):
    a, b = numbered(tmp_path / "a.jsonl", 30), str(tmp_path / "b.parquet")
    pq.write_table(pa.Table.from_pylist([{"n": 100 + i} for i in range(20)]), b)
    return DataConfig(sources=(Source(a, weight=2.0), Source(b, weight=0.5)), seed=3)


def test_an_epoch_holds_each_row_as_often_as_its_weight_says_and_numbers_its_copies_over_all_ranks(mixture):
    """Past bug: a row that stood twice in a batch was sampled twice with the same seeds."""
    assert len(Dataset(mixture, number)) == 70
    epochs = [collections.defaultdict(list), collections.defaultdict(list)]
    for step, rank in itertools.product(range(2), range(3)):
        for draw in Dataset(mixture, number).batch(step, 70, rank, 3):
            epochs[draw.epoch][draw.item].append(draw.copy)
    for copies in epochs:
        assert all(sorted(copies[i]) == [0, 1] for i in range(30))
        assert [numbers for n, numbers in copies.items() if n >= 100] == [[0]] * 10
    assert epochs[0].keys() != epochs[1].keys()  # another random half in every epoch


def test_a_batch_depends_on_the_step_and_not_on_the_ranks_or_the_past(mixture):
    steps = [numbers(Dataset(mixture, number), step, size=12) for step in range(14)]
    resumed = Dataset(mixture, number)
    for step in (9, 2, 13):
        assert numbers(resumed, step, size=12) == steps[step]
        for world in (2, 3, 5):
            shares = [numbers(resumed, step, size=12, rank=rank, world=world) for rank in range(world)]
            assert [shares[i % world][i // world] for i in range(12)] == steps[step]
    assert steps[0] != numbers(Dataset(DataConfig(mixture.sources, seed=4), number), 0, size=12)


def test_the_first_sources_are_read_once_before_the_mixture(mixture, tmp_path):
    """This is a curriculum. It delays the mixture and changes nothing else."""
    opening = Source(numbered(tmp_path / "c.jsonl", 10, first=200), first=True)
    read = numbers(Dataset(DataConfig((*mixture.sources, opening), seed=3), number), *range(10), size=8)
    assert sorted(read[:10]) == list(range(200, 210)) and max(read[10:]) < 200
    assert read[10:] == numbers(Dataset(mixture, number), 0, size=70)
    with pytest.raises(DataError, match="`first`"):
        Dataset(DataConfig((opening,)), number)


@pytest.mark.parametrize("first", [True, False])
def test_a_source_that_gives_no_row_is_refused(mixture, tmp_path, first):
    few = Source(numbered(tmp_path / "c.jsonl", 20), weight=0.02, first=first)
    with pytest.raises(DataError, match="c.jsonl: weight = 0.02 times 20 rows"):
        Dataset(DataConfig((*mixture.sources, few)), number)
    assert numbers(Dataset(DataConfig((replace(few, weight=0.03), mixture.sources[0])), number), 0, size=1)


def test_a_bad_row_is_named_once_and_skipped_and_too_many_stop_the_run(tmp_path, capsys):
    path = numbered(tmp_path / "a.jsonl", 50, bad=(3, 7))
    seen = numbers(Dataset(DataConfig((Source(path),), max_bad_fraction=0.04), number), *range(30), size=5)
    assert collections.Counter(seen) == {i: 3 for i in range(50) if i not in (3, 7)}
    assert capsys.readouterr().err.count("marked as bad") == 2
    with pytest.raises(RowError, match="2 of 50 rows .*max_bad_fraction = 0.02"):
        Dataset(DataConfig((Source(path),), max_bad_fraction=0.02), number).batch(0, 50)
    dataset = Dataset(DataConfig((Source(path),), max_bad_fraction=0.1), number)
    assert 1 in numbers(dataset, 0, size=50)
    dataset.reject("a.jsonl:1", "too long")  # SFT rejects a row after reading it
    assert sorted(numbers(dataset, 1, size=50)) == [0, 2, *range(4, 7), *range(8, 50)]
    Path(path).write_text("{\n")
    with pytest.raises(RowError, match="JSON"):
        Dataset(DataConfig((Source(path),), max_bad_fraction=0.0), number).batch(0, 1)


def test_a_rank_holds_its_bad_rows_against_the_rows_that_it_has_met(tmp_path):
    datasets = []
    for n in (400, 20):
        source = Source(numbered(tmp_path / f"{n}.jsonl", 4000, bad=range(0, 4000, n)))
        datasets.append(Dataset(DataConfig((source,), max_bad_fraction=0.01), number))
    good, bad = datasets
    numbers(good, *range(100), size=400, rank=7, world=8)  # ten epochs
    assert 5 <= len(good.bad) <= 10
    with pytest.raises(RowError, match="6 of 500 rows"):
        numbers(bad, *range(10), size=400, rank=7, world=8)


def test_a_row_is_known_by_its_files_name_wherever_it_is_and_files_of_one_name_are_told_apart(tmp_path):
    """K and all seeds derive from task names."""
    (tmp_path / "more").mkdir()
    paths = numbered(tmp_path / "a.jsonl", 5, bad=(3,)), numbered(tmp_path / "more" / "a.jsonl", 5, first=10)
    dataset = Dataset(DataConfig(tuple(map(Source, paths)), max_bad_fraction=0.5), number)
    seen = collections.Counter(numbers(dataset, *range(3), size=10))
    assert seen[3] == 0 and seen[13] == 3
    moved = Dataset(DataConfig((Source(paths[1]),)), lambda row, origin, root: origin)
    assert sorted(numbers(moved, 0, size=5)) == [f"a.jsonl:{i}" for i in range(5)]


@given(st.lists(st.integers(1, 120), max_size=30))
def test_packing_loses_no_row_and_keeps_to_the_room(lengths):
    bins = best_fit(lengths, 100)
    assert sorted(sum(bins, [])) == list(range(len(lengths)))
    assert all(len(rows) == 1 or sum(lengths[i] for i in rows) <= 100 for rows in bins)


def test_packing_puts_the_longest_first_where_the_least_room_stays():
    """60 opens a bin, 50 opens another, 40 just fits beside 60, and 30 and 20 beside 50. Longer items get their own bin."""
    assert best_fit([20, 30, 40, 50, 60], 100) == [[4, 2], [3, 1, 0]]
    assert best_fit([5, 101, 60, 35, 250], 100) == [[4], [1], [2, 3, 0]]
