"""The tables of evaluations. tests/golden/ has what they look like; their numbers are computed here by hand."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from evaluations import line, lines, write_results
from scripts import REPO

from evals import tables
from evals.results import Results
from evals.tables import interval, per_item, rates
from runtime import config

RESULTS = config.read_tree(Path(__file__).parent / "results.yaml")


def write_runs(folder: Path, name: str) -> list[Path]:
    """Write the result files of this name in results.yaml. Return the folders of their runs."""
    runs = []
    for file in RESULTS[name]:
        rows = lines(file["scores"], **file.get("all", {}))
        for i, fields in file.get("lines", {}).items():
            rows[i] |= fields
        more = {key: file[key] for key in ("name", "arm", "k", "total") if key in file}
        runs.append(write_results(folder / file["run"], file["split"], rows, **more).parent)
    return list(dict.fromkeys(runs))


def test_the_tables_of_results(tmp_path, golden, capsys):
    """Past bugs: no average, because Charades has its own K; an empty column `average`; published scores beside 20 of 2700
    items; no gain for a model that is asked with its own K; a gain over one video with [nan, nan]."""
    runs = [*map(str, write_runs(tmp_path, "table"))]
    tables.main(["table", *runs, "--baseline", "Qwen3-VL-8B", "--by", "duration"])
    golden("eval_table.txt", capsys.readouterr().out)
    tables.main(["table", *runs, "--by", "kind"])
    assert (
        " nan " not in capsys.readouterr().out
    )  # past bug: the score of MMVU's open questions, which its headline leaves out


def test_the_toys_ablation_prints_beside_the_papers(tmp_path, golden, capsys):
    """What is missing is empty, and the paper's f stands in the column of its scale. A start has the first step of plain GRPO, a
    training the mean of its steps: of f, 0.40 and 0.20."""
    write_runs(tmp_path, "ablation")
    for name, steps in RESULTS["metrics"].items():
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(step) + "\n" for step in steps)
        (tmp_path / name / "metrics.jsonl").write_text(text + '{"f": 0.')  # a running training's last line
    tables.main(["ablation", f"{tmp_path}/NAME", f"{tmp_path}/eval/NAME"])
    golden("eval_ablation.txt", capsys.readouterr().out)


@pytest.mark.parametrize(
    "words", ["ablation nowhere/NAME runs/eval/NAME", "ablation nowhere runs/NAME", "table nowhere"]
)
def test_a_place_without_runs_is_refused(words):
    with pytest.raises(SystemExit, match="error: .*nowhere"):
        tables.main(words.split())


# ------------------------------------------------------------------------------------------------ numbers


def test_an_interval_is_the_binomials_and_as_wide_as_there_are_videos():
    ones, width = [1] * 300 + [0] * 700, 2 * 1.96 * math.sqrt(0.3 * 0.7 / 1000)
    low, high = interval(ones, [str(i) for i in range(1000)])
    assert high - low == pytest.approx(width, rel=0.1) and (low + high) / 2 == pytest.approx(0.3, abs=0.005)
    low, high = interval(ones, [str(i // 10) for i in range(1000)])  # ten questions a video, right or wrong together
    assert high - low == pytest.approx(width * math.sqrt(10), rel=0.15)
    assert interval([1, 0] * 50, [f"v{i // 2}" for i in range(100)]) == (0.5, 0.5)  # no spread between videos
    assert str(interval([1, 1, 1], ["v"] * 3)) == "(nan, nan)"  # one video gives no interval


def test_a_gain_is_over_the_items_of_both():
    """Past bug: with limit=20 there was none."""
    ours = [line(f"{v}-{n}", v < 6, video=f"v/{v}.mp4") for v in range(7) for n in range(3)][:20]
    base = [row | {"score": float(i % 2)} for i, row in enumerate(ours)]
    text = tables.gain_text(Results("videomme", 64, "", ours), Results("videomme", 64, "", base[1:19]))
    # Of items 1 to 18, ours has 17 and the base 9 (the odd ones).
    assert text.startswith(", +44.4 [")
    # All 7 ** 7 draws of 7 videos: two items of the first, one of the last, three of the others.
    sums, counts = np.array([2, 3, 3, 3, 3, 3, 0]) - [1, 2, 1, 2, 1, 2, 0], np.array([2, 3, 3, 3, 3, 3, 1])
    draws = np.array(np.meshgrid(*[np.arange(7)] * 7)).reshape(7, -1)
    exact = np.quantile(100 * sums[draws].sum(0) / counts[draws].sum(0), [0.025, 0.975])
    assert json.loads(text.partition(" ")[2].partition(" ")[2].replace("+", "")) == pytest.approx(exact, abs=3)
    ours, base = (Results("lvbench", 64, "", lines(scores, videos=["v"])) for scores in ("11", "10"))
    assert tables.gain_text(ours, base) == ", +50.0"  # one video gives no interval


@pytest.mark.parametrize(
    "name, average", [("ParaVT-8B", "59.3"), ("Qwen3-VL-8B", "55.6"), ("Video-R1-7B (own)", "52.3")]
)
def test_the_published_scores_have_the_average_of_the_project_page(name, average):
    published = tables.read_published()["table"]
    scores = tables.published_scores(name, published)
    assert tables.average_cell(scores, published["columns"]) == average
    scores.pop("charades")
    assert tables.average_cell(scores, published["columns"]) == ""
    assert (
        {len(row["scores"]) for row in published["rows"]}
        == {7}
        == {len(published["frames"]), len(published["columns"])}
    )


def test_costs_and_rates_are_means_over_all_items():
    """A failed item has no format, and counts 0. Models of other authors have none, and old records no critical tokens."""
    rows = [line("a", 1, tokens=30, seconds=3.0, truncated=True, subagent_tokens=9, critical_tokens=36), line("b", 0)]
    rows[0]["calls"] = [{"error": ""}, {"error": "timeout"}]
    rows[1]["prediction"] = None
    assert rates(rows) == {"error_rate": 0, "refused_rate": 0, "unparsed_rate": 50, "truncated_rate": 50}
    costs = {
        "calls": 0.5, "tool_usage_rate": 50, "failed_calls": 0.5, "turns": 1, "tokens": 20, "subagent_tokens": 4.5,
        "critical_tokens": 23, "seconds": 2,
    }  # fmt: skip
    nan = pytest.approx(math.nan, nan_ok=True)
    assert per_item(rows) == costs | {"f": nan, "well_formed": nan}
    rows[0] |= {"f": 1.0, "well_formed": 1.0}
    del rows[0]["critical_tokens"]
    rows[1] |= {"error": "EngineError: gone"}
    assert per_item(rows) == costs | {"f": 0.5, "well_formed": 0.5, "critical_tokens": nan}
    rows[0] |= {"error": "Refusal: no"}
    assert rates(rows) == {"error_rate": 50, "refused_rate": 50, "unparsed_rate": 0, "truncated_rate": 50}


# ------------------------------------------------------------------------------------------------ refusals


def test_results_that_make_no_table_are_refused(tmp_path):
    *_, base, conan = write_runs(tmp_path, "table")
    again, old, damaged = tmp_path / "again", tmp_path / "old", tmp_path / "damaged"
    write_results(again, "videomme", lines("1"), name="Conan", arm="conan", k=16)
    write_results(old, "lvbench", [{"name": "toy", "split": "toy", "weights": "abc", "total": 8}, *lines("1")])
    file = write_results(damaged, "lvbench", lines("10"))
    file.write_text(file.read_text().replace("\n", '\n{"id": "0", "sc\n', 1))
    for given, options, named in (
        ([conan, again], {}, "conan/videomme-K16-conan.jsonl and .*again/videomme-K16-conan.jsonl"),  # the same cell
        ([tmp_path / "none"], {}, "no results in .*/none"),
        ([old], {}, "lvbench-K64-parallel.jsonl: line 1 "),  # of an older version
        ([damaged], {}, "lvbench-K64-parallel.jsonl: line 2 "),
        ([base], {"by": "topic"}, "--by topic"),
        # Past bug: the column of gains was empty without a message.
        ([base], {"baseline": "Qwen3-VL-8"}, "--baseline 'Qwen3-VL-8': .*Qwen3-VL-8B"),
    ):
        with pytest.raises(config.UserError, match=named):
            tables.all_tables(given, **options)


@pytest.mark.slow
@pytest.mark.parametrize("command", [[str(REPO / "eval.py"), "table", "."], ["-m", "study.lab", "B", "--answer", "B"]])
def test_output_that_nobody_reads_to_its_end_stops_in_silence(tmp_path, command):
    """Past bug: `python eval.py table RUN | head` ended with a BrokenPipeError."""
    write_results(tmp_path, "lvbench", lines("1"))
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    pipes = {"stdout": writer, "stderr": subprocess.PIPE, "text": True}
    ended = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, **pipes)
    os.close(writer)
    assert ended.stderr == ""
