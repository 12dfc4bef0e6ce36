"""The evaluation splits: miniatures in the datasets' real layouts, each known trap of theirs, figures by hand."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import rewards
from data import Task
from evals import benchmarks
from evals.benchmarks import SPLITS, UNGRADED, Cue, Item, ask_with_subtitles, figures, grade, load_split
from rewards import Judge, RewardConfig
from runtime.answers import parse_letter, parse_span
from runtime.dataset import DataError

CFG = RewardConfig()


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def parquet(path, rows, **types):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    for name, kind in types.items():
        table = table.set_column(table.column_names.index(name), name, pa.array([r[name] for r in rows], kind))
    pq.write_table(table, path)


@pytest.fixture
def shrink(monkeypatch):
    """Let a miniature of so many items (none: of any number) pass as the whole split."""

    def make(name, *counts, subtitled=0):
        monkeypatch.setitem(SPLITS, name, replace(SPLITS[name], counts=counts, subtitled=subtitled))

    return make


def verdict(prediction, score, judged=False):
    return {"prediction": prediction, "score": score, "judged": judged}


def records(items, verdicts):
    """What eval.py writes of them, as far as figures read it."""
    return [{"kind": i.task.kind, "groups": i.groups} | v for i, v in zip(items, verdicts, strict=True)]


def right_and_wrong(items, pattern):
    """Records of + right and - wrong answers."""
    return records(items, [verdict("A", 1.0) if mark == "+" else verdict("B", 0.0) for mark in pattern])


# ------------------------------------------------------------------------------------------------ VideoMME


def videomme_row(video, n, duration="short", answer="B"):
    return {
        "video_id": "001", "duration": duration, "domain": "Knowledge", "sub_category": "Astronomy", "url": "",
        "videoID": video, "question_id": f"{video}-{n}", "task_type": "OCR Problems", "question": "Which color?",
        "options": ["A. Red.", "B. Blue.", "C. Green.", "D. Vitamin C."], "answer": answer,
    }  # fmt: skip


def videomme(root):
    parquet(root / "videomme/test-00001-of-00002.parquet", [videomme_row("c-C", 1, "long", "D")])
    rows = [videomme_row("aA", 1), videomme_row("aA", 2), videomme_row("bB", 1, "medium", "A")]
    parquet(root / "videomme/test-00000-of-00002.parquet", rows)
    touch(root, "data/aA.mp4", "data/bB.MP4", "data/._aA.mp4")
    other_disk = root.with_name(root.name + "-other")
    touch(other_disk, "data/c-C.mkv")
    (root / "more").symlink_to(other_disk)


def test_videomme_letters_options_once_and_finds_videos_in_any_folder_and_container(tmp_path, shrink):
    videomme(tmp_path)
    shrink("videomme", 4)
    items = load_split("videomme", str(tmp_path))
    assert [item.task.id for item in items] == ["aA-1", "aA-2", "bB-1", "c-C-1"]  # not videoID, which repeats
    assert [item.task.answer for item in items] == ["B", "B", "A", "D"]
    assert items[0].task.question == "Which color?\nA. Red.\nB. Blue.\nC. Green.\nD. Vitamin C."
    assert items[0].task.options == ("Red.", "Blue.", "Green.", "Vitamin C.") and items[0].task.kind == "mcq"
    folders = ["data/aA.mp4", "data/aA.mp4", "data/bB.MP4", "more/data/c-C.mkv"]
    assert [item.task.videos for item in items] == [(str(tmp_path / path),) for path in folders]
    lines = right_and_wrong(items, "+-+-")
    for order in (lines, lines[::-1]):  # they come as items end: lengths were listed in the order of the first answers
        found = figures("videomme", order)
        assert list(found.items()) == [("accuracy", 50), ("short", 50), ("medium", 100), ("long", 0)]
    assert all(item.subtitles == () for item in items)  # only videomme_wsub reads them


SRT = """\ufeff1\r
00:00:01,000 --> 00:00:02,500\r
<font color="white" size=".72c">Hello\r
there</font>\r
\r
2\r
00:00:02,500 --> 00:00:04,000\r
<font color="white" size=".72c"></font>\r
\r
3\r
00:01:00,000 --> 01:00:00,000\r
<font color="white" size=".72c">The end.</font>\r
"""


def test_subtitles_are_those_shown_at_the_sampled_frames_in_order_each_once(tmp_path, shrink):
    videomme(tmp_path)
    shrink("videomme_wsub", subtitled=1)
    (tmp_path / "subtitle").mkdir()
    (tmp_path / "subtitle/aA.srt").write_bytes(SRT.encode())
    items = load_split("videomme_wsub", str(tmp_path))
    assert items[0].subtitles == (Cue(1, 2.5, "Hello there"), Cue(60, 3600, "The end."))
    assert items[1].subtitles is items[0].subtitles and items[2].subtitles == ()
    asked = ask_with_subtitles(items[0], [3000.0, 1.5, 2.0, 0.0]).question
    assert asked.index("Hello there") < asked.index("The end.") < asked.index("Which color?")
    assert asked.count("Hello there") == 1 and asked.endswith(items[0].task.question)
    assert "Hello" not in ask_with_subtitles(items[0], [61.0]).question
    assert ask_with_subtitles(items[0], [3.0, 4000.0]) == items[0].task
    assert ask_with_subtitles(items[2], [1.0]) == items[2].task


def test_subtitles_that_are_not_all_there_are_refused(tmp_path, shrink):
    """One cue was enough, so that a half unpacked subtitle.zip passed."""
    assert SPLITS["videomme_wsub"].subtitled == 744
    videomme(tmp_path)
    shrink("videomme_wsub", subtitled=2)
    (tmp_path / "aA.srt").write_bytes(SRT.encode())
    with pytest.raises(DataError, match=r"2 videos of videomme_wsub have an \.srt file, found 1\..*subtitle\.zip"):
        load_split("videomme_wsub", str(tmp_path))
    (tmp_path / "bB.srt").write_text("")
    assert len(load_split("videomme_wsub", str(tmp_path))) == 4


def test_a_subtitle_with_an_odd_clock_is_named(tmp_path, shrink):
    videomme(tmp_path)
    shrink("videomme_wsub")
    (tmp_path / "aA.srt").write_text("1\n00:00:01:00,5.1.2 --> 00:00:02,000\nhi\n")
    with pytest.raises(DataError, match=r"aA\.srt: 00:00:01:00,5\.1\.2 --> 00:00:02,000 are no times"):
        load_split("videomme_wsub", str(tmp_path))


# ------------------------------------------------------------------------------------------------ LongVideoBench


def longvideobench_rows():
    shared = {"question_category": "T2E", "level": "L1-Perception", "topic_category": "x", "question": "What next?"}
    return [
        shared | {
            "video_id": "v1", "id": "v1_0", "video_path": "v1.mp4", "subtitle_path": "v1_en.json", "duration": 12.0,
            "candidates": ["yes", "N/A", "no"], "correct_choice": 2, "duration_group": 15,
            "starting_timestamp_for_subtitles": 0.0,
        },
        shared | {
            "video_id": "v2", "id": "v2_0", "video_path": "v2.mp4", "subtitle_path": "v2_en.json", "duration": 900.0,
            "candidates": ["one", "two", "three", "four", "five"], "correct_choice": 4, "duration_group": 3600,
            "starting_timestamp_for_subtitles": 100.0,
        },
        shared | {
            "video_id": "v2", "id": "v2_1", "video_path": "v2.mp4", "subtitle_path": "v2_en.json", "duration": 900.0,
            "candidates": ["up", "down"], "correct_choice": 0, "duration_group": 600,
            "starting_timestamp_for_subtitles": 100.0,
        },
    ]  # fmt: skip


def spread(row):
    """As the parquet has it: five columns, the unused ones N/A."""
    options = (row.pop("candidates") + ["N/A"] * 5)[:5]
    return row | {f"option{n}": option for n, option in enumerate(options)}


@pytest.mark.parametrize("layout", ["parquet", "json"])
def test_longvideobench_keeps_the_index_of_its_options_in_both_layouts(tmp_path, shrink, layout):
    if layout == "parquet":
        parquet(tmp_path / "validation-00000-of-00001.parquet", [spread(row) for row in longvideobench_rows()])
    else:
        (tmp_path / "lvb_val.json").write_text(json.dumps(longvideobench_rows()))
    touch(tmp_path, "videos/v1.mp4", "videos/v2.mp4")
    shrink("longvideobench", 3)
    items = load_split("longvideobench", str(tmp_path))
    assert [item.task.answer for item in items] == ["C", "E", "A"]
    assert (
        items[0].task.question == "What next?\nA. yes\nB. N/A\nC. no"
    )  # an N/A inside is an option, at the end filler
    assert items[2].task.options == ("up", "down") and items[2].task.id == "v2_1"
    found = figures("longvideobench", right_and_wrong(items, "+-+"))
    assert list(found) == ["accuracy", "15", "600", "3600"]
    assert found["accuracy"] == pytest.approx(200 / 3) and (found["15"], found["3600"]) == (100, 0)


def test_a_split_with_hidden_answers_is_refused(tmp_path):
    rows = longvideobench_rows()
    rows[1]["correct_choice"] = -1
    (tmp_path / "lvb_val.json").write_text(json.dumps(rows))
    touch(tmp_path, "videos/v1.mp4", "videos/v2.mp4")
    with pytest.raises(DataError, match=r"lvb_val.json: row 1: its answer '' is none of its 5 options"):
        load_split("longvideobench", str(tmp_path))


# ------------------------------------------------------------------------------------------------ LVBench

LISTED = "When is it?\n(A) 00:10-00:20\n(B) 01:00-01:10\n(C) never\n(D) 02:00-02:05"
OPTIONS = ("00:10-00:20", "01:00-01:10", "never", "02:00-02:05")


def test_lvbench_reads_both_layouts_alike_and_counts_a_question_in_each_of_its_types(tmp_path, shrink):
    kinds = [["temporal grounding", "reasoning"], ["reasoning"]]
    rows = [{"uid": str(i), "question": LISTED, "answer": "BA"[i], "question_type": kinds[i]} for i in range(2)]
    parquet(tmp_path / "a/data/train-00000-of-00001.parquet", [r | {"video_path": "k-1.mp4"} for r in rows])
    listed = [r | {"video_path": "k-1.mp4", "options": [f"({x}) {o}" for x, o in zip("ABCD", OPTIONS)]} for r in rows]
    parquet(tmp_path / "b/train-00000-of-00001.parquet", listed)
    shrink("lvbench", 2)
    for folder in "ab":
        touch(tmp_path, f"{folder}/all_videos/k-1.mp4")
        items = load_split("lvbench", str(tmp_path / folder))
        assert [(item.task.id, item.task.answer) for item in items] == [("0", "B"), ("1", "A")]
        assert items[0].task.question == LISTED and items[0].task.options == OPTIONS  # not listed a second time
        found = figures("lvbench", right_and_wrong(items, "+-"))
        assert (found["accuracy"], found["temporal grounding"], found["reasoning"]) == (50, 100, 50)


# ------------------------------------------------------------------------------------------------ MLVU


def mlvu_row(kind, answer, n=0):
    listed = "How many?\n(A) one\n(B) two\n(C) three\n(D) four"
    candidates = ["one", "two", "three", "four"]
    return {"video_name": f"{kind}_{n}.mp4", "duration": 480.0, "question": listed, "candidates": candidates,
            "answer": answer, "task_type": kind}  # fmt: skip


def test_mlvu_gold_is_a_letter_or_a_text_and_options_are_not_listed_twice(tmp_path, shrink, capsys):
    golds = [("count", "B"), ("count", "four"), ("plotQA", "A"), ("count", "eleven")]  # eleven: a data defect
    rows = [mlvu_row(kind, gold, n) for n, (kind, gold) in enumerate(golds)]
    rows[1]["question"] = "How many?"
    parquet(tmp_path / "mlvu/test-00000-of-00001.parquet", rows)
    touch(tmp_path, *(f"videos/{row['video_name']}" for row in rows))
    shrink("mlvu", 3, 4)
    items = load_split("mlvu", str(tmp_path))
    assert [item.task.answer for item in items] == ["B", "D", "A", "?"] and "1 answers" in capsys.readouterr().err
    assert items[0].task.question == rows[0]["question"] and items[0].task.options == ("one", "two", "three", "four")
    assert items[1].task.question == rows[0]["question"].replace("(", "").replace(")", ".")  # lettered by us: A. one
    assert [grade(items[3], text, CFG)["score"] for text in ("A", "?", "eleven", "")] == [0, 0, 0, 0]
    assert len({item.task.id for item in items}) == 4


def test_mlvu_m_avg_weighs_tasks_alike_and_accuracy_questions(tmp_path, shrink):
    shrink("mlvu")
    parquet(tmp_path / "test-0.parquet", [mlvu_row(kind, "A") for kind in ("count", "plotQA", "plotQA", "plotQA")])
    touch(tmp_path, "count_0.mp4", "plotQA_0.mp4")
    items = load_split("mlvu", str(tmp_path))
    found = figures("mlvu", right_and_wrong(items, "-++-"))
    assert found["accuracy"] == 50 and found["m_avg"] == pytest.approx((0 + 200 / 3) / 2) and found["count"] == 0


# ------------------------------------------------------------------------------------------------ MMVU


def mmvu(root):
    url = "https://huggingface.co/datasets/yale-nlp/MMVU/resolve/main/videos/"
    rows = [
        {"video": url + "Art/1.mp4", "question_type": "multiple-choice", "answer": "E",
         "choices": {x: f"choice {x}" for x in "ABCDE"}},
        {"video": url + "Modern Physics/1.mp4", "question_type": "open-ended", "answer": "bosons",
         "choices": dict.fromkeys("ABCDE", "")},
        {"video": url + "Modern%20Physics/2.mp4", "question_type": "multiple-choice", "answer": "A",
         "choices": {x: f"choice {x}" for x in "ABCDE"}},
    ]  # fmt: skip
    rows = [r | {"id": f"validation_{i}", "question": "Why?", "metadata": {"subject": ""}} for i, r in enumerate(rows)]
    (root / "validation.json").write_text(json.dumps(rows))
    touch(root, "videos/Art/1.mp4", "videos/Modern_Physics/1.mp4", "videos/Modern_Physics/2.mp4")


def test_mmvu_numbers_are_per_subject_and_open_questions_have_no_options(tmp_path, shrink):
    mmvu(tmp_path)
    shrink("mmvu", 3)
    items = load_split("mmvu", str(tmp_path))
    videos = ["videos/Art/1.mp4", "videos/Modern_Physics/1.mp4", "videos/Modern_Physics/2.mp4"]
    assert [item.task.videos for item in items] == [(str(tmp_path / video),) for video in videos]
    assert [item.task.kind for item in items] == ["mcq", "oe", "mcq"] and items[1].task.question == "Why?"
    assert items[0].task.question.endswith("\nE. choice E") and items[0].task.answer == "E"


def test_mmvu_reports_all_questions_only_where_a_judge_graded_the_open_ones(tmp_path, shrink, monkeypatch):
    mmvu(tmp_path)
    shrink("mmvu")
    items = load_split("mmvu", str(tmp_path))
    words = [grade(item, answer, CFG) for item, answer in zip(items, ("E", "boson", "B"))]
    assert figures("mmvu", records(items, words)) == {"mc_625": 50}
    monkeypatch.setattr(rewards, "ask_judge", lambda question, gold, answer, judge: float("boson" in answer))
    judge = RewardConfig(open_answer="judge", judge=Judge(url="http://judge", model="m"))
    judged = [grade(item, answer, judge) for item, answer in zip(items, ("E", "boson", "B"))]
    found = figures("mmvu", records(items, judged))
    assert list(found)[:2] == ["mc_625", "all_1000"] and found["mc_625"] == 50
    assert found["all_1000"] == pytest.approx(200 / 3)


# ------------------------------------------------------------------------------------------------ Charades


def test_charades_restores_tenths_from_float16_and_counts_every_query(tmp_path, shrink):
    spans = [(24.3, 30.4), (0.0, 6.9), (10.0, 20.0), (0.0, 8.0)]
    rows = [{"video": "AB12C.mp4", "caption": "a person sits.", "timestamp": np.array(s, np.float16)} for s in spans]
    parquet(tmp_path / "data/test-00000-of-00001.parquet", rows, timestamp=pa.list_(pa.float16()))
    touch(tmp_path, "Charades_v1_480/AB12C.mp4")
    shrink("charades", 4)
    items = load_split("charades", str(tmp_path))
    assert [item.task.answer for item in items] == ["[24.3, 30.4]", "[0.0, 6.9]", "[10.0, 20.0]", "[0.0, 8.0]"]
    assert len({item.task.id for item in items}) == 4 and "a person sits?" in items[0].task.question
    assert not any(c.isdigit() for c in items[0].task.question)  # an example span would be copied
    verdicts = [grade(item, text, CFG) for item, text in zip(items, ("00:24.3 to 00:30.4", "soon", "15 and 20", ""))]
    assert [v["prediction"] for v in verdicts] == ["[24.3, 30.4]", None, "[15.0, 20.0]", None]
    found = figures("charades", records(items, verdicts))
    assert found == pytest.approx({"miou": 37.5, "r@0.3": 50, "r@0.5": 50, "r@0.7": 25})
    assert list(found)[0] == "miou"


# ------------------------------------------------------------------------------------------------ the toy


def test_the_toy_is_a_split_like_the_others(toy_dir):
    items = load_split("toy", str(toy_dir))
    assert len(items) == 8 and all(item.task.kind == "oe" and Path(item.task.videos[0]).exists() for item in items)
    verdicts = [grade(item, item.task.answer if i < 6 else "grey", CFG) for i, item in enumerate(items)]
    assert figures("toy", records(items, verdicts)) == {"accuracy": 75}


# ------------------------------------------------------------------------------------------------ errors that speak


def test_an_absent_dataset_names_the_command_that_fetches_it(tmp_path):
    root = tmp_path / "my data"
    fetch = f"hf download lmms-lab/LVBench --repo-type dataset --local-dir '{root}'"
    with pytest.raises(DataError, match="no such folder") as error:
        load_split("lvbench", str(root))
    assert fetch in str(error.value) and "unpack its video archives" in str(error.value)
    root.mkdir()
    with pytest.raises(DataError, match=r"no file train-\*\.parquet, where") as error:
        load_split("lvbench", str(root))
    assert fetch in str(error.value)
    with pytest.raises(DataError, match=r"python -m study\.toy build"):
        load_split("toy", str(root))


def test_a_wrong_number_of_items_is_refused(tmp_path):
    videomme(tmp_path)
    with pytest.raises(DataError, match="videomme has 2700 items, found 4"):
        load_split("videomme", str(tmp_path))


def test_missing_videos_are_one_error(tmp_path, shrink):
    rows = [videomme_row(f"v{i}", n) for i in range(7) for n in (1, 2)]
    parquet(tmp_path / "videomme/test-0.parquet", rows)
    touch(tmp_path, "v3.mp4", "V0.mp4")  # names are case-sensitive: V0 is another video
    shrink("videomme", 14)
    with pytest.raises(DataError, match=r"^6 videos of videomme .*: v0, v1, v2, v4, v5, \.\.\.\. `hf download"):
        load_split("videomme", str(tmp_path))


def test_other_revisions_and_broken_files_are_named(tmp_path, shrink):
    shrink("videomme")
    shrink("mmvu")
    rows = [videomme_row("aA", 1) | {"question_id": "same"}, videomme_row("aA", 2) | {"question_id": "same"}]
    touch(tmp_path, "aA.mp4")
    parquet(tmp_path / "test-0.parquet", rows)
    with pytest.raises(DataError, match="1 ids of videomme occur twice, such as same"):
        load_split("videomme", str(tmp_path))
    del rows[0]["question_id"]
    parquet(tmp_path / "test-0.parquet", rows[:1])
    with pytest.raises(DataError, match=r"test-0.parquet: row 0: no field 'question_id', only .*videoID"):
        load_split("videomme", str(tmp_path))
    (tmp_path / "test-0.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(DataError, match=r"test-0.parquet: not a readable parquet file"):
        load_split("videomme", str(tmp_path))
    for text, wrong in (
        ("version https://git-lfs", "is not JSON"),
        ('{"data": []}', "expected a list of rows, got dict"),
    ):
        (tmp_path / "validation.json").write_text(text)
        with pytest.raises(DataError, match=f"validation.json:? {wrong}"):
            load_split("mmvu", str(tmp_path))


# ------------------------------------------------------------------------------------------------ answers

MCQ = Item(Task("t", "", (), "mcq", "D", ("red", "blue", "a green car", "Vitamin C")), {})


@pytest.mark.parametrize(
    "text, letter",
    [
        ("D", "D"), ("(D)", "D"), ("D.", "D"), ("D: Vitamin C", "D"), ("D) Vitamin C", "D"), ("(D) Vitamin C.", "D"),
        ("**D.** vitamin c", "D"), ("vitamin C", "D"), ("\\boxed{D}", "D"), ("$\\boxed{\\text{D}}$", "D"),
        ("d) vitamin C", "D"), ("D\nVitamin C", "D"), ("C) green car", "C"), ("A. blue", "A"), ("E", None), ("D or E", None),
        ("The answer is A because of the light.", "A"), ("a man", None), (None, None), ("", None),
    ],
)  # fmt: skip
def test_a_letter_is_read_in_every_form_and_only_among_the_options(text, letter):
    assert grade(MCQ, text, CFG) == verdict(letter, float(letter == "D"))


def test_a_species_is_an_option_and_not_a_letter():
    assert parse_letter("E. coli", ("yeast", "E. coli")) == "B"


@pytest.mark.parametrize(
    "text, span",
    [
        ("12.5 and 20.1", (12.5, 20.1)), ("<12.5 seconds> to <20.1 seconds>", (12.5, 20.1)),
        ("It starts at 12.5 s and ends at 20.1 s.", (12.5, 20.1)), ('{"start": 12.5, "end_time": 20.1}', (12.5, 20.1)),
        ("I looked at 0 - 60. It happens from 00:12 to 00:20.", (12, 20)), ("0 - 60\n3 - 5", (3, 5)),
        ("20.1–12.5s", (12.5, 20.1)), ("[\n12.5,\n20.1\n]", (12.5, 20.1)), ("in 3 or 4 places", None),
        ("1" * 20_000, None), ("5" + " " * 20_000, None),  # seconds of work, once
    ],
)  # fmt: skip
def test_a_span_is_read_in_every_form_and_from_the_last_sentence(text, span):
    assert parse_span(text) == span


def test_open_answers_are_texts():
    item = Item(Task("t", "", (), "oe", "a red car"), {})
    assert grade(item, " red car ", CFG) == verdict("red car", 1.0) and grade(item, " ", CFG) == UNGRADED


# ------------------------------------------------------------------------------------------------ the published numbers


def test_a_line_that_is_no_json_is_named_and_an_empty_one_is_none(tmp_path, monkeypatch, toy_dir):
    monkeypatch.setitem(SPLITS, "toy", replace(SPLITS["toy"], tables=("test.jsonl",)))
    rows = [json.dumps(row, default=str) for row in pq.read_table(toy_dir / "test.parquet").to_pylist()[:2]]
    (tmp_path / "videos").symlink_to(toy_dir / "videos")
    (tmp_path / "test.jsonl").write_text("\n\n".join(rows))
    assert len(load_split("toy", str(tmp_path))) == 2
    (tmp_path / "test.jsonl").write_text("\n".join([*rows, "milk"]))
    with pytest.raises(DataError, match=r"test\.jsonl: row 2: the line is not JSON"):
        load_split("toy", str(tmp_path))


def test_the_published_numbers_are_columns_of_our_splits_and_average_as_claimed():
    published = yaml.safe_load((Path(benchmarks.__file__).parent.parent / "configs/eval/published.yaml").read_text())
    table = published["table"]
    assert set(table["columns"]) <= set(SPLITS) and len(table["figures"]) == len(table["frames"]) == 7
    rows = {row["name"]: row["scores"] for row in table["rows"]}
    assert len(rows) == 15 and all(len(scores) == 7 for scores in rows.values())
    means = {name: sum(scores) / 7 for name, scores in rows.items() if None not in scores}
    assert means["ParaVT-8B"] == pytest.approx(59.34, abs=0.005)  # both as on the project page
    assert means["Qwen3-VL-8B"] == pytest.approx(55.60, abs=0.005)
    line = {"kind": "mcq", "groups": {}} | UNGRADED
    for name, figure in zip(table["columns"], table["figures"]):
        assert next(iter(figures(name, [line]))) == figure
