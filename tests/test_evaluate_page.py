"""The commands of docs/evaluate.md run: on the toy, and on a mock of Video-MME's layout.

Stand-ins: a folder is the hub, the toy's model lies where the hub's names point, and a script says what 8B models say."""

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
from test_guides import Fork


def fill_hub(root: Path, video: Path) -> None:
    """Write 2,700 questions on 900 videos, and two zips, of which one holds the first seven videos."""
    rows, options = [], ["A. Red.", "B. Blue.", "C. Green.", "D. None."]
    for i in range(2700):
        row = {"videoID": f"{i // 3:03d}_-x", "question_id": f"{i // 3}-{i % 3}", "question": "Which color?"}
        rows.append(row | {"options": options, "answer": "AB"[i % 2]})
    (root / "videomme").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), root / "videomme" / "test-00000-of-00001.parquet")
    for number, held in (("01", [800, 899]), ("02", range(10))):
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
    """Run eval.py. Where it would load 8B weights, the model says B after a thought."""
    from tiny_checkpoint import Scripted

    import rollout

    said = "So.</think><answer>B</answer><|im_end|>"
    rollout.open_engine = lambda source, renderer, cfg, logs: Scripted(renderer, lambda prompt, seed: said)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path, toy_dir, monkeypatch):
    page = Fork(tmp_path, toy_dir, "evaluate.md")
    for name in ("ParaVT/ParaVT-8B", "Qwen/Qwen3-VL-8B-Instruct"):
        shutil.copytree(toy_dir / "model", tmp_path / name, ignore=shutil.ignore_patterns("visual.json"))  # as stock
    _, videos, gpu, key = page.commands
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    assert "| untrained " in page.shell(0)

    # The first seven videos, and no others, come from the hub.
    home = tmp_path / "hub" / "datasets" / "lmms-lab" / "Video-MME"
    fill_hub(home, min((toy_dir / "videos").glob("test*.mp4")))
    fetch, code = videos.split("python - <<'END'\n")
    shutil.copytree(home, tmp_path / shlex.split(fetch)[-1], ignore=shutil.ignore_patterns("*.zip"))
    told = page.run(partial(read_hub, tmp_path / "hub", code.removesuffix("END\n")))
    assert [Path(line).name for line in told.splitlines()] == [f"{i:03d}_-x.mp4" for i in range(7)]

    # Both models and their table; then those behind an API.
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    monkeypatch.setenv("HOST_API_KEY", "x")
    api = Endpoint("B")
    told = []
    for command in (gpu + key.partition("\n")[2]).replace("\\\n", " ").splitlines():
        words = shlex.split(command.replace("https://HOST/v1", api.url))[1:]
        if "gpt4o" in command:
            words.append(f"api.url={api.url}")
        told.append(page.run(partial(evaluate, words)))
    api.shutdown()
    assert len(told) == 5
    for row in ("ParaVT-8B (own)", "Qwen3-VL-8B (own)"):
        assert f"| {row} " in told[2]
    assert all("(20 of 2700)" in table for table in told)
