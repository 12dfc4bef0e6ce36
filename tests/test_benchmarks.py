"""The evaluation splits: rows in the datasets' layouts (items.yaml), incomplete datasets, and figures by hand."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from episode import Task
from evals.benchmarks import SPLITS, UNGRADED, Cue, Files, Item, count_items, figures, grade, load_split, with_subtitles
from runtime import config
from runtime.dataset import DataError, RowError

ITEMS = config.read_tree(Path(__file__).parent / "items.yaml")


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
        return
    for row in rows:
        if "timestamp" in row:
            row["timestamp"] = np.array(row["timestamp"], np.float16)
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture
def load(tmp_path, monkeypatch):
    """load(split, counts...) -> the split's items below tmp_path. `counts`: allowed numbers of items (none: any number)."""

    def make(name, *counts, subtitled=0, limit=0):
        monkeypatch.setitem(SPLITS, name, replace(SPLITS[name], counts=counts, subtitled=subtitled))
        return load_split(name, str(tmp_path), limit)

    return make


# ------------------------------------------------------------------------------------------------ rows to items


@pytest.mark.parametrize("dataset", ITEMS["datasets"], ids=lambda dataset: dataset["questions"])
def test_rows_become_items(tmp_path, load, dataset):
    write_rows(tmp_path / dataset["questions"], [{**case["row"]} for case in dataset["rows"]])
    touch(tmp_path, *dataset["videos"])
    expected = []
    for case in dataset["rows"]:
        item = {"question": case["row"].get("question"), "kind": "mcq", "options": ()} | case["item"]
        task = Task(*(item[name] for name in ("id", "question", "video", "kind", "answer")), tuple(item["options"]))
        task = replace(task, videos=(str(tmp_path / item["video"]),))
        expected.append(Item(task, caption=item.get("caption", ""), duration=item.get("duration", "")))
    assert load(dataset["split"]) == expected


@pytest.mark.parametrize("split, named, row", ITEMS["refused"])
def test_a_row_that_could_not_be_graded_is_refused(tmp_path, split, named, row):
    touch(tmp_path, "a.mp4")
    with pytest.raises(RowError, match=named):
        SPLITS[split].parse(row, 0, Files(tmp_path))


def test_options_in_another_order_than_the_questions_are_told_once(tmp_path, load, capsys):
    rows = []
    for listed in ("(A) one\n(B) two", "(A) two\n(B) one", "B. one\nA. two", "(A) two (B) one"):
        row = {"video_name": "a.mp4", "task_type": "count", "answer": "B", "candidates": ["one", "two"]}
        rows.append(row | {"question": f"How many?\n{listed}"})
    write_rows(tmp_path / "mlvu/test-0.parquet", rows)
    touch(tmp_path, "a.mp4")
    assert [item.task.question.count("one") for item in load("mlvu")] == [1, 1, 2, 1]
    told = capsys.readouterr().out
    assert told.count("\n") == 1 and "mlvu: 2 questions" in told and "count-1" in told
    load("mlvu", limit=1)
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------------------------------------------ subtitles


@pytest.fixture
def films(tmp_path):
    """Seven questions of VideoMME about seven videos, v0 to v6, in two files."""
    rows = []
    for i in range(7):
        row = {"videoID": f"v{i}", "question_id": f"v{i}-1", "question": "Which?", "duration": "short"}
        rows.append(row | {"options": ["A. Red.", "B. Blue."], "answer": "B"})
    write_rows(tmp_path / "videomme/test-00001-of-00002.parquet", rows[4:])
    write_rows(tmp_path / "videomme/test-00000-of-00002.parquet", rows[:4])
    return [f"v{i}.mp4" for i in range(7)]


def test_subtitles_are_those_of_the_sampled_frames_in_order_each_once(tmp_path, load, films):
    touch(tmp_path, *films)
    (tmp_path / "subtitle").mkdir()
    (tmp_path / "subtitle/v0.srt").write_bytes(("\ufeff" + ITEMS["srt"].replace("\n", "\r\n")).encode())
    first, second, *_ = load("videomme_wsub", subtitled=1)
    assert first.subtitles == (Cue(1, 2.5, "Hello there"), Cue(60, 3600, "The end."))
    assert second.subtitles == load("videomme")[0].subtitles == ()  # only videomme_wsub reads them
    asked = with_subtitles(first, [3000.0, 1.5, 2.0, 0.0]).question
    assert asked.index("Hello there") < asked.index("The end.") < asked.index("Which?")
    assert asked.count("Hello there") == 1
    assert asked.endswith(first.task.question)
    assert "Hello" not in with_subtitles(first, [61.0]).question
    assert with_subtitles(first, [3.0, 4000.0]) == first.task
    assert with_subtitles(second, [1.0]) == second.task


def test_subtitles_that_are_not_all_there_are_refused(tmp_path, load, films):
    """Past bug: one cue was enough, so a partly unpacked subtitle.zip passed."""
    assert SPLITS["videomme_wsub"].subtitled == 744
    touch(tmp_path, *films, "v0.srt")
    with pytest.raises(DataError, match=r"2 videos of videomme_wsub.* found 1\."):
        load("videomme_wsub", subtitled=2)
    touch(tmp_path, "v6.srt")
    assert len(load("videomme_wsub", subtitled=2)) == 7


# ------------------------------------------------------------------------------------------------ incomplete datasets


def test_an_absent_dataset_names_the_command_that_fetches_it(tmp_path):
    root = tmp_path / "my data"
    fetch = f"hf download lmms-lab/LVBench --repo-type dataset --local-dir '{root}'"
    for _ in range(2):
        with pytest.raises(DataError, match=r"train-\*\.parquet") as error:
            load_split("lvbench", str(root))
        assert fetch in str(error.value)
        root.mkdir(exist_ok=True)  # an empty folder is like none


def test_videos_are_found_behind_links_in_the_order_of_their_rows(tmp_path, load, films):
    other_disk = tmp_path.with_name(tmp_path.name + "-other")
    touch(other_disk, *(f"data/{film}" for film in films))
    (tmp_path / "more").symlink_to(other_disk)
    touch(tmp_path, "data/._v0.mp4")  # as macOS leaves it
    assert [item.task.videos for item in load("videomme")] == [(f"{tmp_path}/more/data/{film}",) for film in films]


def test_an_incomplete_split_is_refused_and_a_limit_needs_the_videos_of_its_items_only(tmp_path, load, films):
    """Past bug: trying two items needed the whole dataset."""
    touch(tmp_path, *films[:2], "V3.mp4")  # names are case-sensitive: V3 is another video
    for name in ("videomme", "videomme_wsub"):
        assert [item.task.id for item in load(name, 7, subtitled=4, limit=2)] == ["v0-1", "v1-1"]
        with pytest.raises(DataError, match="^1 videos of .* v2"):
            load(name, 7, subtitled=4, limit=3)
    with pytest.raises(DataError, match=r"^5 videos of videomme .*v2, v3, v4, v5, v6\. `hf download"):
        load("videomme", 7)
    with pytest.raises(DataError, match="videomme has 8 items, found 7"):
        load("videomme", 8, limit=2)
    touch(tmp_path, *films)
    assert len(load("videomme", 6, 7)) == count_items("videomme", str(tmp_path)) == 7


def test_another_revision_is_refused_with_the_row(tmp_path, load):
    touch(tmp_path, "a.mp4")
    row = {"videoID": "a", "question_id": "a-1", "question": "Which?", "options": ["Red.", "Blue."], "answer": "B"}
    for rows, problem in (
        ([{"videoID": "a"}], r"test-0.parquet: row 0: KeyError\('question_id'\)"),
        ([row, row | {"answer": ""}], "test-0.parquet: row 1: RowError.*answer ''"),
        ([row, row], "1 items of videomme have the id of another"),  # results are stored by id
    ):
        write_rows(tmp_path / "test-0.parquet", rows)
        with pytest.raises(DataError, match=problem):
            load("videomme")


# ------------------------------------------------------------------------------------------------ answers

OPEN = Item(Task("t", "What?", (), "oe", "red car"))


@pytest.mark.parametrize("question", ITEMS["grades"], ids=lambda question: question["gold"])
def test_an_answer_is_read_and_graded(question):
    item = Item(Task("t", "", (), question["kind"], question["gold"], tuple(question.get("options", ()))))
    for answer, prediction, score in question["answers"]:
        expected = {"prediction": prediction, "score": score, "judged": False}
        assert grade(item, answer, "exact") == expected, answer


def test_a_judge_grades_open_answers_only():
    asked = []
    judge = lambda *texts: asked.append(texts) or 1.0  # noqa: E731
    assert grade(OPEN, "A crimson car.", "judge", judge) == {"prediction": "A crimson car.", "score": 1, "judged": True}
    assert asked == [("What?", "red car", "A crimson car.")]
    assert not grade(Item(Task("t", "", (), "mcq", "A")), "A", "judge", judge)["judged"]
    assert grade(OPEN, None, "judge", judge) == UNGRADED


@pytest.mark.parametrize("case", ITEMS["figures"], ids=lambda case: " ".join([case["split"], *case["figures"]]))
def test_the_figures_of_a_split_by_hand(case):
    records = [{"kind": kind, "score": score, "judged": judged} for kind, score, judged in case["records"]]
    found = figures(case["split"], records)
    assert found == pytest.approx(case["figures"])
    assert list(found) == list(case["figures"])  # the headline figure first
