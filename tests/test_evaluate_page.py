"""docs/evaluate.md, followed word by word: on the toy, and on a mock of Video-MME's layout.

Stand-ins: a folder is the hub, the toy's model lies where the hub's names point, and a script says what 8B models say."""

import re
import runpy
import shlex
import shutil
import sys
import zipfile
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from endpoint import Endpoint
from scripts import REPO
from test_guides import Fork

PAGE = (REPO / "docs" / "evaluate.md").read_text("utf-8")


def fill_hub(root: Path, video: Path) -> None:
    """Write 2,700 questions on 900 videos, and three zips, of which two hold the first seven videos."""
    rows, options = [], ["A. Red.", "B. Blue.", "C. Green.", "D. None."]
    for i in range(2700):
        row = {"videoID": f"{i // 3:03d}_-x", "question_id": f"{i // 3}-{i % 3}", "question": "Which color?"}
        rows.append(row | {"options": options, "answer": "AB"[i % 2]})
    (root / "videomme").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), root / "videomme" / "test-00000-of-00001.parquet")
    for number, held in (("01", [899, 4, 5]), ("02", [800]), ("03", [0, 1, 2, 3, 6])):
        with zipfile.ZipFile(root / f"videos_chunked_{number}.zip", "w") as archive:
            for i in held:
                archive.write(video, f"data/{i:03d}_-x.mp4")


def read_hub(hub: Path, code: str) -> None:
    """Run the page's Python."""
    import huggingface_hub

    class Folder:
        def glob(self, pattern):
            return [str(path.relative_to(hub)) for path in hub.glob(pattern)]

        def open(self, name):
            return open(hub / name, "rb")

    huggingface_hub.HfFileSystem = Folder
    exec(code, {})


def evaluate(command: list[str]) -> None:
    """Run eval.py. Where it would load 8B weights, ParaVT-8B says B and the other A, each after a thought."""
    from tiny_checkpoint import Scripted

    import rollout

    def open_engine(source, renderer, cfg, logs):
        assert (cfg.server_gpus, cfg.max_batch_tokens, cfg.max_context) == ((), 16384, 16384)
        letter = "B" if "ParaVT" in str(source) else "A"
        return Scripted(renderer, lambda prompt, seed: f"So.</think><answer>{letter}</answer><|im_end|>")

    rollout.open_engine = open_engine
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


@pytest.mark.slow
def test_the_page_is_followed_word_by_word(tmp_path, toy_dir, monkeypatch):
    page = Fork(tmp_path, toy_dir, "evaluate.md")
    for name in ("ParaVT/ParaVT-8B", "Qwen/Qwen3-VL-8B-Instruct"):
        shutil.copytree(toy_dir / "model", tmp_path / name, ignore=shutil.ignore_patterns("visual.json"))  # as stock
    _, videos, gpu, key = page.commands
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    told = page.shell(0)  # the toy's own weights
    assert told.count("(4 of 8)") == 2 and "| untrained | none     | gain " in told

    # The questions, and the seven videos alone, come from the hub.
    home = tmp_path / "hub" / "datasets" / "lmms-lab" / "Video-MME"
    fill_hub(home, min((toy_dir / "videos").glob("test*.mp4")))
    fetch, code = videos.split("python - <<'END'\n")
    assert fetch.startswith(
        'hf download lmms-lab/Video-MME --repo-type dataset --include "*.parquet" --local-dir data/'
    )
    shutil.copytree(home, tmp_path / shlex.split(fetch)[-1], ignore=shutil.ignore_patterns("*.zip"))
    told = page.run(partial(read_hub, tmp_path / "hub", code.removesuffix("END\n")))
    zips = re.findall(r"videos_chunked_(\d+)\.zip \S*/data/(\d+)_-x\.mp4\n", told)
    assert zips == [("01", "004"), ("01", "005"), *(("03", f"{i:03d}") for i in (0, 1, 2, 3, 6))]

    # Both models and their table; then those behind an API, of which each is sent its own key.
    exports, _, key = key.partition("\n")
    for name in re.findall(r"(\w+)=\.\.\.", exports):
        monkeypatch.setenv(name, f"of {name}")
    openai, host, told = Endpoint("B"), Endpoint("B"), []
    for command in (gpu + key).replace("\\\n", " ").splitlines():
        words = shlex.split(command.replace("https://HOST/v1", host.url))[1:]
        if "gpt4o" in command:
            words.append(f"api.url={openai.url}")
        if not told:
            dry = page.run(partial(evaluate, [*words, "--dry-run"]))
        told.append(page.run(partial(evaluate, words)))
    for there, name, requests in ((openai, "OPENAI", 20), (host, "HOST", 40)):
        there.shutdown()
        assert there.keys == {f"Bearer of {name}_API_KEY"} and len(there.bodies) > requests
    _, _, table, gpt4o, hosted = told
    assert "ok      videomme: 20 items, 40 episodes" in dry and "MISSING" not in dry
    # Ten golds are B, ten A. Nothing published stands beside them.
    found = {}
    for row in re.findall(r"^\| (.*8B \(own\).*) \|$", table, re.M):
        model, arm, figure, _, _, score, *_ = map(str.strip, row.split("|"))
        found.setdefault((model[0], arm, figure), score)
    for who, arm in (("P", "parallel"), ("Q", "none")):
        assert re.fullmatch(r"50\.0 \[.*\] \(20 of 2700\)", found[who, arm, "score"])
    assert re.fullmatch(r"\+0\.0 \[-.*, \+.*\] \(20\)", found["P", "parallel", "gain"])
    assert not any(arm == "published" for _, arm, _ in found)
    quoted = re.search(r"^```text\n(.*)\n```", PAGE, re.M)[1]
    assert re.search(re.escape(quoted).replace(r"\.\.\.", ".*"), table)
    assert all("50.0 [" in said for said in (gpt4o, hosted))
    first_hour = PAGE.partition("\n## Words of your own")[0]
    assert len(first_hour.splitlines()) <= 80
