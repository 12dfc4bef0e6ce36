"""The files of JSON lines that a run writes: half a line is no record, and a new file replaces the old one only when it is whole."""

import json
import math

import pytest

from runtime.lines import append_line, read_lines, write_lines

ONE = b'{"step": 0}\n'


@pytest.mark.parametrize("cut", [b"", b'{"step": 1, "lo', b'{"step": 1}'])
def test_a_last_line_without_a_line_break_is_no_record(tmp_path, cut):
    """So is one that only lacks its line break: the next record would be appended to it."""
    for whole in (b"", ONE):
        (tmp_path / "a.jsonl").write_bytes(whole + cut)
        assert list(read_lines(tmp_path / "a.jsonl")) == [{"step": 0}] * bool(whole)


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(ONE + b'{"st\n' + ONE)
    with pytest.raises(ValueError):
        list(read_lines(tmp_path / "a.jsonl"))


def test_records_that_are_read_and_written_again_are_the_same_bytes(tmp_path):
    """A resumed run rewrites the lines that it keeps. Some text has Unicode's separators of lines."""
    records = [
        {"step": 0, "loss": 0.1 + 0.2, "kl": 5e-324, "gap": -0.0, "grad_norm": math.inf},
        {"said": "a\u2028b\x85c\n"},
    ]
    for record in [*records, {"nan": math.nan}]:
        append_line(tmp_path / "a.jsonl", record)
    assert list(read_lines(tmp_path / "a.jsonl"))[:2] == records
    write_lines(tmp_path / "b.jsonl", list(read_lines(tmp_path / "a.jsonl")))
    written = (tmp_path / "a.jsonl").read_bytes()
    assert written == (tmp_path / "b.jsonl").read_bytes()
    assert written.splitlines()[1].decode() == json.dumps(records[1])


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path, monkeypatch):
    def fill_disk(_) -> None:
        raise OSError(28, "No space left on device")

    append_line(tmp_path / "a.jsonl", {"step": 0})
    monkeypatch.setattr("os.fsync", fill_disk)
    with pytest.raises(OSError):
        write_lines(tmp_path / "a.jsonl", [{"step": 1}])
    assert list(read_lines(tmp_path / "a.jsonl")) == [{"step": 0}]
