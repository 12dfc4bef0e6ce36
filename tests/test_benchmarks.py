"""The evaluation splits: miniatures with the real layouts and known traps of the datasets, and figures by hand."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from episode import Task
from evals import tables
from evals.benchmarks import SPLITS, UNGRADED, Cue, Item, count_items, figures, grade, load_split, with_subtitles
from runtime.dataset import DataError


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
def load(tmp_path, monkeypatch):
    """load(split, counts...) -> the split's items below tmp_path. `counts`: allowed numbers of items (none: any number)."""

    def make(name, *counts, subtitled=0, root=tmp_path, limit=0):
        monkeypatch.setitem(SPLITS, name, replace(SPLITS[name], counts=counts, subtitled=subtitled))
        return load_split(name, str(root), limit)

    return make


def verdict(prediction, score, judged=False):
    return {"prediction": prediction, "score": score, "judged": judged}


def records(items, verdicts):
    """Return lines of eval.py with the keys that `figures` reads."""
    return [{"kind": i.task.kind} | v for i, v in zip(items, verdicts, strict=True)]


def videomme_row(video, n, answer="B"):
    options = ["A. Red.", "B. Blue.", "C. Green.", "D. Vitamin C."]
    row = {"video_id": "001", "videoID": video, "question_id": f"{video}-{n}", "question": "Which color?"}
    return row | {"options": options, "answer": answer}


def videomme(root):
    parquet(root / "videomme/test-00001-of-00002.parquet", [videomme_row("c-C", 1, "D")])
    rows = [videomme_row("aA", 1), videomme_row("aA", 2), videomme_row("bB", 1, "A")]
    parquet(root / "videomme/test-00000-of-00002.parquet", rows)
    touch(root, "data/aA.mp4", "data/bB.MP4", "data/._aA.mp4")
    other_disk = root.with_name(root.name + "-other")
    touch(other_disk, "data/c-C.mkv")
    (root / "more").symlink_to(other_disk)


def test_videomme_letters_options_once_and_finds_videos_anywhere(tmp_path, load):
    videomme(tmp_path)
    items = load("videomme", 4)
    assert [item.task.id for item in items] == ["aA-1", "aA-2", "bB-1", "c-C-1"]  # not videoID, which repeats
    assert [item.task.answer for item in items] == ["B", "B", "A", "D"]
    assert items[0].task.question == "Which color?\nA. Red.\nB. Blue.\nC. Green.\nD. Vitamin C."
    assert items[0].task.options == ("Red.", "Blue.", "Green.", "Vitamin C.") and items[0].task.kind == "mcq"
    folders = ["data/aA.mp4", "data/aA.mp4", "data/bB.MP4", "more/data/c-C.mkv"]
    assert [item.task.videos for item in items] == [(str(tmp_path / path),) for path in folders]
    assert figures("videomme", records(items, [verdict("A", 1.0), UNGRADED] * 2)) == {"accuracy": 50}
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


def test_subtitles_are_those_of_the_sampled_frames_in_order_each_once(tmp_path, load):
    videomme(tmp_path)
    (tmp_path / "subtitle").mkdir()
    (tmp_path / "subtitle/aA.srt").write_bytes(SRT.encode())
    items = load("videomme_wsub", subtitled=1)
    assert items[0].subtitles == (Cue(1, 2.5, "Hello there"), Cue(60, 3600, "The end."))
    assert items[1].subtitles is items[0].subtitles and items[2].subtitles == ()
    asked = with_subtitles(items[0], [3000.0, 1.5, 2.0, 0.0]).question
    assert asked.index("Hello there") < asked.index("The end.") < asked.index("Which color?")
    assert asked.count("Hello there") == 1 and asked.endswith(items[0].task.question)
    assert "Hello" not in with_subtitles(items[0], [61.0]).question
    assert with_subtitles(items[0], [3.0, 4000.0]) == items[0].task
    assert with_subtitles(items[2], [1.0]) == items[2].task


def test_subtitles_that_are_not_all_there_are_refused(tmp_path, load):
    """Past bug: one cue was enough, so a partly unpacked subtitle.zip passed."""
    assert SPLITS["videomme_wsub"].subtitled == 744
    videomme(tmp_path)
    (tmp_path / "aA.srt").write_bytes(SRT.encode())
    with pytest.raises(DataError, match=r"2 videos of videomme_wsub have an \.srt file, found 1\..*unpack its"):
        load("videomme_wsub", subtitled=2)
    (tmp_path / "bB.srt").write_text("")
    assert len(load("videomme_wsub", subtitled=2)) == 4


def test_longvideobench_keeps_the_index_of_its_options(tmp_path, load):
    rows = []
    golds = {"v1_0 yes N/A no N/A N/A": 2, "v2_0 one two three four five": 4, "v2_1 up down N/A N/A N/A": 0}
    for words, gold in golds.items():
        id, *options = words.split()  # five columns, the unused ones N/A
        row = {"id": id, "video_path": f"{id[:2]}.mp4", "question": "What next?", "correct_choice": gold}
        rows.append(row | {f"option{n}": option for n, option in enumerate(options)})
    parquet(tmp_path / "validation-00000-of-00001.parquet", rows)
    touch(tmp_path, "videos/v1.mp4", "videos/v2.mp4")
    items = load("longvideobench", 3)
    assert [item.task.answer for item in items] == ["C", "E", "A"]
    assert items[0].task.question == "What next?\nA. yes\nB. N/A\nC. no"  # at the end, N/A is a filler
    assert items[2].task.options == ("up", "down") and items[2].task.id == "v2_1"


LISTED = "When is it?\n(A) 00:10-00:20\n(B) 01:00-01:10\n(C) never\n(D) 02:00-02:05"
OPTIONS = ("00:10-00:20", "01:00-01:10", "never", "02:00-02:05")


def test_lvbench_reads_both_layouts_alike(tmp_path, load):
    rows = [{"uid": str(i), "question": LISTED, "answer": "BA"[i], "video_path": "k-1.mp4"} for i in range(2)]
    parquet(tmp_path / "a/data/train-00000-of-00001.parquet", rows)
    listed = [r | {"options": [f"({x}) {o}" for x, o in zip("ABCD", OPTIONS)]} for r in rows]
    parquet(tmp_path / "b/train-00000-of-00001.parquet", listed)
    for folder in "ab":
        touch(tmp_path, f"{folder}/all_videos/k-1.mp4")
        items = load("lvbench", 2, root=tmp_path / folder)
        assert [(item.task.id, item.task.answer) for item in items] == [("0", "B"), ("1", "A")]
        assert items[0].task.question == LISTED and items[0].task.options == OPTIONS  # not listed a second time
        assert items[1].task.videos == (str(tmp_path / folder / "all_videos/k-1.mp4"),)


def test_mlvu_gold_is_a_letter_or_a_text_and_options_are_not_listed_twice(tmp_path, load):
    rows, asked = [], "How many?\n(A) one\n(B) two\n(C) three\n(D) four"
    for kind, gold in (("count", "B"), ("count", "four"), ("plotQA", "A"), ("count", "eleven")):  # the last is a defect
        row = {"video_name": f"{kind}_{len(rows)}.mp4", "task_type": kind, "question": asked, "answer": gold}
        rows.append(row | {"candidates": ["one", "two", "three", "four"]})
    rows[1]["question"] = "How many?"
    parquet(tmp_path / "mlvu/test-00000-of-00001.parquet", rows)
    touch(tmp_path, *(f"videos/{row['video_name']}" for row in rows))
    items = load("mlvu", 3, 4)
    assert [item.task.answer for item in items] == ["B", "D", "A", "?"]
    assert items[0].task.question == rows[0]["question"] and items[0].task.options == ("one", "two", "three", "four")
    assert items[1].task.question == rows[0]["question"].replace("(", "").replace(")", ".")  # lettered by us: A. one
    assert [grade(items[3], text, "exact")["score"] for text in ("A", "?", "eleven", "")] == [0, 0, 0, 0]
    assert len({item.task.id for item in items}) == 4


def test_options_in_another_order_than_the_questions_are_told_once(tmp_path, load, capsys):
    rows = []
    for listed in ("(A) one\n(B) two", "(A) two\n(B) one", "B. one\nA. two", "(A) two (B) one"):
        row = {"video_name": "a.mp4", "task_type": "count", "answer": "B", "candidates": ["one", "two"]}
        rows.append(row | {"question": f"How many?\n{listed}"})
    parquet(tmp_path / "mlvu/test-00000-of-00001.parquet", rows)
    touch(tmp_path, "a.mp4")
    items = load("mlvu")
    assert [item.task.question.count("one") for item in items] == [1, 1, 2, 1]
    told = "  note    mlvu: 2 questions list their options in another order, such as count-1\n"
    assert capsys.readouterr().out == told
    load("mlvu", limit=1)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("options", [{"A": "one", "B": "two"}, '["one", "two"]', ["one", 2], ["x"] * 11])
def test_options_that_are_no_list_of_texts_are_refused(tmp_path, load, monkeypatch, options):
    """Past bug: such a split was asked with options "A. A, B. B", or "A. [", and ended with a table."""
    row = {"video_name": "a.mp4", "task_type": "count", "question": "How many?", "answer": "B", "candidates": options}
    row |= {"uid": "1", "video_path": "a.mp4", "options": options}
    touch(tmp_path, "a.mp4")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    for name in ("mlvu", "lvbench"):
        monkeypatch.setitem(SPLITS, name, replace(SPLITS[name], question_files="rows.jsonl"))
        with pytest.raises(DataError, match="rows.jsonl: row 0: .*must be a list of at most 10 texts"):
            load(name)


def test_mmvu_numbers_are_per_subject_and_open_questions_have_no_options(tmp_path, load):
    url, rows = "https://huggingface.co/datasets/yale-nlp/MMVU/resolve/main/videos/", []
    for name, gold in (("Art/1", "E"), ("Modern Physics/1", "bosons"), ("Modern%20Physics/2", "A")):
        kind, text = ("multiple-choice", "choice {}") if len(gold) == 1 else ("open-ended", "")
        choices = {letter: text.format(letter) for letter in "ABCDE"}
        row = {"id": name, "video": f"{url}{name}.mp4", "question_type": kind, "choices": choices}
        rows.append(row | {"question": "Why?", "answer": gold})
    (tmp_path / "validation.json").write_text(json.dumps(rows))
    touch(tmp_path, "videos/Art/1.mp4", "videos/Modern_Physics/1.mp4", "videos/Modern_Physics/2.mp4")
    items = load("mmvu", 3)
    videos = ["videos/Art/1.mp4", "videos/Modern_Physics/1.mp4", "videos/Modern_Physics/2.mp4"]
    assert [item.task.videos for item in items] == [(str(tmp_path / video),) for video in videos]
    assert [item.task.kind for item in items] == ["mcq", "oe", "mcq"] and items[1].task.question == "Why?"
    assert items[0].task.question.endswith("\nE. choice E") and items[0].task.answer == "E"


def test_charades_restores_tenths_from_float16_and_counts_every_query(tmp_path, load):
    spans = [(24.3, 30.4), (0.0, 6.9), (10.0, 20.0), (0.0, 8.0)]
    rows = [{"video": "AB12C.mp4", "caption": "a person sits.", "timestamp": np.array(s, np.float16)} for s in spans]
    parquet(tmp_path / "data/test-00000-of-00001.parquet", rows, timestamp=pa.list_(pa.float16()))
    touch(tmp_path, "Charades_v1_480/AB12C.mp4")
    items = load("charades", 4)
    assert [item.task.answer for item in items] == ["[24.3, 30.4]", "[0.0, 6.9]", "[10.0, 20.0]", "[0.0, 8.0]"]
    assert len({item.task.id for item in items}) == 4 and items[0].caption == "a person sits."
    # protocols.yaml says how to answer. Otherwise a prompt of the authors could not be verbatim.
    assert items[0].task.question == "During which part of the video does this happen: a person sits?"
    texts = ("00:24.3 to 00:30.4", "soon", "15 and 20", "")
    verdicts = [grade(item, text, "exact") for item, text in zip(items, texts)]
    assert [v["prediction"] for v in verdicts] == ["[24.3, 30.4]", None, "[15.0, 20.0]", None]
    found = figures("charades", records(items, verdicts))
    assert found == pytest.approx({"miou": 37.5, "r@0.3": 50, "r@0.5": 50, "r@0.7": 25})
    assert list(found)[0] == "miou"


def test_an_absent_dataset_names_the_command_that_fetches_it(tmp_path):
    root = tmp_path / "my data"
    fetch = f"hf download lmms-lab/LVBench --repo-type dataset --local-dir '{root}'"
    for _ in range(2):
        with pytest.raises(DataError, match=r"no file train-\*\.parquet, where") as error:
            load_split("lvbench", str(root))
        assert fetch in str(error.value) and "unpack its archives" in str(error.value)
        root.mkdir(exist_ok=True)  # an empty folder is like none


def test_missing_videos_are_one_error(tmp_path, load):
    rows = [videomme_row(f"v{i}", n) for i in range(7) for n in (1, 2)]
    parquet(tmp_path / "videomme/test-0.parquet", rows)
    touch(tmp_path, "v3.mp4", "V0.mp4")  # names are case-sensitive: V0 is another video
    with pytest.raises(DataError, match=r"^6 videos of videomme .*, such as v0, v1, v2, v4, v5\. `hf download"):
        load("videomme", 14)


def test_a_limit_needs_the_videos_of_its_items_only(tmp_path, load):
    """Past bug: trying two items needed the whole dataset."""
    parquet(tmp_path / "videomme/test-0.parquet", [videomme_row(f"v{i}", 1) for i in range(4)])
    parquet(tmp_path / "videomme/test-1.parquet", [videomme_row(f"v{i}", 1) for i in range(4, 7)])
    touch(tmp_path, "v0.mp4", "v1.mp4")
    for name in ("videomme", "videomme_wsub"):
        assert [item.task.id for item in load(name, 7, subtitled=4, limit=2)] == ["v0-1", "v1-1"]
        with pytest.raises(DataError, match="^1 videos of .* such as v2"):
            load(name, 7, subtitled=4, limit=3)
    assert count_items("videomme", str(tmp_path)) == 7
    with pytest.raises(DataError, match="videomme has 8 items, found 7"):
        load("videomme", 8, limit=2)


@pytest.mark.parametrize(
    "changes, problem",
    [
        ([{"question_id": None}], r"test-0.parquet: row 0: KeyError\('question_id'\)\. Another revision"),
        ([{}, {}], "1 items of videomme have the id of another one"),
        ([{"answer": ""}], r"row 0: .*its answer '' is none of its 4 options; hidden answers cannot"),
    ],
)
def test_other_revisions_and_hidden_answers_are_refused(tmp_path, load, changes, problem):
    touch(tmp_path, "aA.mp4")
    rows = [videomme_row("aA", 1) | change for change in changes]
    parquet(tmp_path / "test-0.parquet", [{k: v for k, v in row.items() if v is not None} for row in rows])
    with pytest.raises(DataError, match=problem):
        load("videomme")


# ------------------------------------------------------------------------------------------------ answers

SPAN = Item(Task("t", "When?", (), "tvg", "[12.0, 20.0]"))
OPEN = Item(Task("t", "What?", (), "oe", "red car"))
MCQ = Item(Task("t", "", (), "mcq", "D", ("red", "blue", "a green car", "Vitamin C")))


def test_what_cannot_be_read_scores_nothing():
    """test_answers.py tests the forms of an answer."""
    for text, letter in (("D", "D"), ("A. blue", "A"), ("E", None), (None, None), ("", None)):
        assert grade(MCQ, text, "exact") == verdict(letter, float(letter == "D"))
    assert grade(SPAN, "12 to 20", "exact") == verdict("[12.0, 20.0]", 1.0)
    assert grade(OPEN, " the red car ", "exact") == verdict("the red car", 1.0)
    assert grade(OPEN, " ", "exact") == UNGRADED


def test_an_open_answer_is_compared_or_judged():
    assert grade(OPEN, "The answer is red car.", "exact") == verdict("red car.", 1.0)
    assert grade(OPEN, "It must be the red car.", "exact") == verdict("It must be the red car.", 0.0)
    judge = lambda question, gold, answer: float("crimson" in answer)  # noqa: E731
    assert grade(OPEN, "A crimson car.", "judge", judge) == verdict("A crimson car.", 1.0, judged=True)


def test_the_published_numbers_are_of_our_splits():
    table = tables.read_published()["table"]
    assert set(table["columns"]) <= set(SPLITS) and len(table["frames"]) == 7
    assert len(table["rows"]) == 15 and all(len(row["scores"]) == 7 for row in table["rows"])
