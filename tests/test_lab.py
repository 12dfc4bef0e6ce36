"""`python -m study.lab`: the kind of a question, the scores of a text and its structure."""

import pytest
from scripts import REPO

from study import lab

DONE = "<think>\nThe clip shows it.\n</think>\n<answer>B</answer>"


@pytest.mark.parametrize("answer, kind", [("B", "mcq"), ("(b)", "mcq"), ("A dog", "oe"), ("0:12 - 0:20", "tvg"), ("2 cats and 3 dogs", "oe")])  # fmt: skip
def test_the_labs_kind_follows_from_the_gold_answer(monkeypatch, capsys, answer, kind):
    monkeypatch.setattr("sys.argv", ["lab.py", f"<answer>{answer}</answer>", "--answer", answer])
    lab.main()
    parts = dict(line.split() for line in capsys.readouterr().out.splitlines() if len(line.split()) == 2)
    assert (parts["kind"], float(parts["R_acc"])) == (kind, 1)


def test_the_lab_paints_the_structure_and_scores_by_the_reward_of_a_config(monkeypatch, capsys):
    """The toy pays for the answer alone."""
    for more, reward in (([], "1.80"), (["--config", str(REPO / "configs" / "toy_paragrpo.yaml")], "1.00")):
        monkeypatch.setattr("sys.argv", ["lab.py", DONE, "--answer", "B", *more])
        lab.main()
        told = capsys.readouterr().out
        assert told.split("\n")[1].split() == ["R", reward] and "[<][a][n][s][w][e][r][>]B[<]" in told
