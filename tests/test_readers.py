"""The comparison of video readers: a frame is told by its pixels, and a wrong one is counted."""

from dataclasses import replace

import numpy as np
import pytest

from study import readers

CUT = next(kind for kind in readers.KINDS if kind.hidden)
HEVC = next(kind for kind in readers.KINDS if kind.codec == "libx265")


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    path = tmp_path_factory.mktemp("readers") / "cut.mp4"
    readers.write_file(path, replace(CUT, frames=150))
    return path


def in_color(number: int) -> np.ndarray:
    return np.repeat(readers.picture(number)[..., None], 3, -1)


def test_every_number_is_read_off_its_picture():
    rng = np.random.default_rng(0)
    for number in (0, 1, 255, 256, 499, 35_999, 65_535, *rng.integers(0, 65_536, 50)):
        blurred = 0.6 * in_color(number) + rng.integers(0, 90, (readers.HEIGHT, readers.WIDTH, 3))
        assert readers.number_of(blurred) == number


def test_a_picture_that_mixes_two_frames_has_no_number():
    for other in (6, 7, 300):
        mixed = in_color(5)
        mixed[: readers.HEIGHT // 2] = in_color(other)[: readers.HEIGHT // 2]  # of another frame than below
        assert readers.number_of(mixed) is None


def test_our_reader_has_every_frame_of_a_cut_and_of_open_gops(cut, tmp_path):
    readers.write_file(tmp_path / "hevc.mp4", replace(HEVC, frames=150))
    for path, shown in ((cut, range(CUT.hidden, 150)), (tmp_path / "hevc.mp4", range(150))):
        pixels = readers.ours(str(path), list(range(len(shown))))
        assert [readers.number_of(p) for p in pixels] == list(shown)


def test_a_reader_that_returns_neighbors_is_counted_wrong(cut):
    """What decord2 did: right for a while, then the frame before or behind."""
    pixels = readers.ours(str(cut), [0, 10, 21, 29, 40])
    answer = [readers.number_of(p) for p in pixels]
    assert readers.count(answer, [88, 98, 108, 118, 128]) == "3 right, **2 wrong**"
    assert readers.count([None, *answer[1:]], answer) == "4 right, **1 wrong**"  # unreadable is wrong
    assert readers.count(answer, answer) == "5 right"


def test_a_reader_is_asked_in_a_process_of_its_own_and_may_refuse(cut, tmp_path):
    assert readers.ask("ours", cut, [0, 61]) == [88, 149]
    (tmp_path / "text.mp4").write_text("not a video")
    assert "cannot be decoded" in readers.ask("ours", tmp_path / "text.mp4", [0])


def test_the_table_has_a_row_per_file_and_says_why_one_was_refused(cut, tmp_path, monkeypatch):
    def ask(reader, path, indices):
        return [*indices[:-1], 999] if reader == "one off" else f"Error: no decoder for {path}"

    monkeypatch.setattr(readers, "FOLDER", tmp_path)
    monkeypatch.setattr(readers, "ask", ask)
    plain = replace(readers.KINDS[0], name="plain", frames=100)
    header, _, row, *rest = readers.compare([plain], ["one off", "closed"]).splitlines()[2:]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["plain", "63 right, **1 wrong**", "refused"]
    assert rest[-1] == "- plain, closed: Error: no decoder for FILE"
