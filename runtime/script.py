"""script.py: what sft.py, rl.py and eval.py do around their work: read the command line, open the checkpoint, and end.

    cfg, args = command_line(RLConfig, __doc__)       # SCRIPT CONFIG [key.sub=value ...] [--dry-run | --check-data]
    run_script(main, cfg)                             # calls main(cfg); does not return
    source, renderer = open_checkpoint("Qwen/...")

An error that a user can fix, a full disk, Ctrl-C and SIGTERM end a script with one sentence, any other error with a traceback.
Under torchrun, each rank prints its own.
"""

import argparse
import atexit
import contextlib
import errno
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tqdm import tqdm

from runtime import config
from runtime.checkpoints import find_checkpoint
from runtime.config import ConfigError, UserError
from runtime.dataset import RowError, Rows, row_errors
from runtime.distributed import print0
from runtime.engine import map_in_threads
from runtime.folder import ScriptConfig
from runtime.prompts import Prompts
from runtime.render import Renderer, load_tokenizer
from runtime.run import RunConfig
from runtime.video import Videos
from runtime.visual import VisualContract

Config = TypeVar("Config", bound=ScriptConfig)
GOES_ON = "The same command resumes from what was saved"


def command_line(cls: type[Config], doc: str, load: Callable = config.load) -> tuple[Config, argparse.Namespace]:
    """Parse the command line, and load its config. A bad config ends the program with its message."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a YAML file of configs/")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.sub=value", help="override a value")
    parser.add_argument("--dry-run", action="store_true", help="check config, data and memory plan; load no weights")
    if "data" in cls.__dataclass_fields__:
        parser.add_argument("--check-data", action="store_true", help="read, open and encode every row; name bad ones")
    args = parser.parse_intermixed_args()
    expandable_segments()
    try:
        return load(cls, args.config, args.overrides), args
    except ConfigError as error:
        sys.exit(f"error: {error}")


def expandable_segments() -> None:
    """Let CUDA's allocator extend its segments. Micro-batches differ in length, so segments of a fixed size would leave gaps.
    torch reads this when it first uses the allocator, not when it is imported."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def run_script(work: Callable[[Config], int | None], cfg: Config) -> NoReturn:
    """Call `work(cfg)`, a script's main function, then end the process."""
    interrupts = []

    def interrupt(*_) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends another one, which would end the cleanup
        interrupts.append(True)  # a library that writes a file may end with another error
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)  # how a scheduler ends a job
    try:
        status = work(cfg)
    except SystemExit as ended:
        status = ended.code
    except BaseException as error:
        if interrupts:
            status = f"interrupted. {GOES_ON} in {cfg.run}"
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            lost = error.filename or cfg.run
            status = f"error: {lost}: the disk is full; what was complete is untouched. {GOES_ON}"
        elif isinstance(error, UserError | FileNotFoundError) or (isinstance(error, OSError) and error.filename):
            status = f"error: {error}"
        else:
            status = traceback.format_exc().rstrip()
    end_process(status)


def end_process(status: int | str | None) -> NoReturn:
    """End the process with a status, or with a sentence and status 1. `sys.exit` would join all threads, but a thread can hang
    for ever: in a tool, in a video, at a silent API."""
    if isinstance(status, str):
        sys.stderr.write(status + "\n")  # in one piece: the ranks of several nodes share a terminal or a log
        status = 1
    atexit._run_exitfuncs()  # they free the memory in /dev/shm and close logs
    with contextlib.suppress(OSError):  # nobody reads them any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status or 0)


def progress_bar(*iterable, **options) -> tqdm:
    """Return a progress bar. If the output is not a terminal, it writes one line per minute."""
    if not sys.stderr.isatty():
        options |= {"mininterval": 60.0, "maxinterval": 60.0}
    return tqdm(*iterable, **options)


# ------------------------------------------------------------------------------------------------ the checkpoint


def open_checkpoint(
    name: str, visual: VisualContract | None = None, prompts: Prompts | None = None, weights: bool = True
) -> tuple[Path, Renderer]:
    """Return a checkpoint's folder and its renderer. Refuse another visual contract or other prompts than it was trained with
    (None: its own). Without `weights`, fetch only its small files."""
    source = find_checkpoint(name, weights)
    visual = visual or VisualContract.load(source)
    prompts = prompts or Prompts.load(source)
    visual.refuse_unlike(source)
    prompts.refuse_unlike(source)
    if prompts.changed:
        print0(f"  note    prompts: not ours: {', '.join(prompts.changed)}")
    return source, Renderer(load_tokenizer(source), visual, prompts)


def note_not_looked_up(checkpoint: str) -> None:
    """Tell, in a dry run, that the run will download the checkpoint."""
    print0(f"  note    checkpoint: {checkpoint} was not looked up; the run fetches it from the hub")


# ------------------------------------------------------------------------------------------------ --check-data


# Reads, opens and encodes a row: (row, its name, where relative paths start, cfg, renderer, videos) -> its tokens, its oddities.
# cfg is an SFTConfig or an RLConfig.
CheckRow = Callable[[dict, str, Path, Any, Renderer, Videos], tuple[int, list[str]]]


def read_all_rows(cfg: RunConfig, check_row: CheckRow) -> int:
    """Check every row of `data` and `val`. Print counts, oddities and the first bad rows. Return 1 if any is bad."""
    _, renderer = open_checkpoint(cfg.policy.checkpoint, cfg.visual, cfg.prompts, weights=False)
    files = []
    for data in filter(None, (cfg.data, cfg.val)):
        for source in data.sources:
            rows = Rows(source.path)
            files.append((rows, Path(data.video_root or rows.path.parent)))
    status = 0
    with Videos(cfg.workers) as videos:
        for rows, root in files:
            if not read_file(rows, root, cfg, renderer, videos, check_row):
                status = 1
    return status


def read_file(rows: Rows, root: Path, cfg: RunConfig, renderer: Renderer, videos: Videos, check_row: CheckRow) -> bool:
    """Check every row of a file. Return whether all can be used."""

    def read(i: int) -> tuple[int, list[str]] | str:
        """Return the row's tokens and oddities, or why it cannot be used."""
        try:
            with row_errors():
                return check_row(rows[i], f"{rows.path.name}:{i}", root, cfg, renderer, videos)
        except RowError as error:
            return str(error)

    tokens = []  # of each usable row
    oddities: Counter[str] = Counter()
    bad = []
    results = map_in_threads(read, range(len(rows)), at_once=2 * cfg.workers)
    for i, result in enumerate(progress_bar(results, total=len(rows), unit="row")):
        if isinstance(result, str):
            bad.append(f"  row {i}: {result}")
        else:
            tokens.append(result[0])
            oddities.update(result[1])

    longest = max(tokens, default=0)
    print(f"{rows.path}: {len(rows)} rows, {len(bad)} unusable; {sum(tokens)} tokens, at most {longest}")
    for oddity, count in oddities.items():
        print(f"  note    {count} rows with {oddity}")
    for line in bad[:10]:
        print(line)
    return not bad
