"""script.py: what sft.py, rl.py and eval.py do around their work: read the command line, check, run, and end.

    cfg, args = command_line(RLConfig, __doc__)       # SCRIPT CONFIG [key.sub=value ...] [--dry-run | --check-data]
    run_training(SCRIPT, cfg, args)                   # calls SCRIPT.main(cfg); does not return

    with open_run(cfg, SCRIPT) as (source, renderer): # in SCRIPT.main: check everything, and lock the run's folder
    source, renderer = open_checkpoint("Qwen/...")    # eval.py and study.ask open theirs in the same way

An error that a user can fix, a full disk, Ctrl-C and SIGTERM end a script with one sentence, any other error with a traceback.
Under torchrun, each rank prints its own.
"""

import argparse
import atexit
import contextlib
import errno
import fcntl
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tqdm import tqdm

from runtime import config
from runtime.checkpoints import find_checkpoint, on_the_hub, refuse_quantized, saved_step
from runtime.checks import (
    USER_ERRORS,
    refuse_other_run,
    refuse_other_weights,
    refuse_replaced_checkpoint,
    refuse_template,
    refuse_unlike_nodes,
    require_writable,
)
from runtime.config import ConfigError
from runtime.dataset import Dataset, RowError, Rows, require_rows, row_errors
from runtime.distributed import barrier, print0, rank
from runtime.prompts import Prompts
from runtime.render import Renderer, load_tokenizer
from runtime.run import RunConfig
from runtime.video import Videos
from runtime.visual import VisualContract

T = TypeVar("T")
GOES_ON = "The same command resumes from what was saved"


def command_line(cls: type[T], doc: str, load: Callable = config.load) -> tuple[T, argparse.Namespace]:
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


def run_script(work: Callable[[Any], int | None], cfg: Any) -> NoReturn:
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
        elif isinstance(error, USER_ERRORS):
            status = f"error: {error}"
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            lost = error.filename or cfg.run
            status = f"error: {lost}: the disk is full; what was complete is untouched. {GOES_ON}"
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


# ------------------------------------------------------------------------------------------------ what a script works on


def open_checkpoint(
    name: str, visual: VisualContract | None = None, prompts: Prompts | None = None, weights: bool = True
) -> tuple[Path, Renderer]:
    """Return a checkpoint's folder and its renderer. Refuse another visual contract or other prompts than it was trained with;
    None: its own. Without `weights`, fetch only its small files."""
    source = find_checkpoint(name, weights)
    visual = visual or VisualContract.load(source)
    prompts = prompts or Prompts.load(source)
    visual.refuse_unlike(source)
    prompts.refuse_unlike(source)
    return source, Renderer(load_tokenizer(source), visual, prompts)


@contextlib.contextmanager
def only_run_in(run: Path) -> Iterator[None]:
    """Hold RUN/.lock for the length of the block; the kernel frees it even after kill -9. Refuse a folder that another process holds."""
    run.mkdir(parents=True, exist_ok=True)
    with open(run / ".lock", "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigError(
                f"run = {str(run)!r}: {lock.read()} is using this folder; wait, or choose another `run`"
            ) from None
        except OSError as error:  # some shared file systems have no locks
            print(f"{run}/.lock: {error}; make sure that no other run uses this folder")
        lock.truncate(0)
        print(f"process {os.getpid()} on {os.uname().nodename}", end="", file=lock, flush=True)
        os.fsync(lock.fileno())  # the other nodes read it
        yield


def passed(check: str, dry: bool) -> None:
    """Tell, in a dry run, that a check has passed."""
    if dry:
        print(f"  ok      {check}")


def note_not_looked_up(checkpoint: str) -> None:
    """Tell, in a dry run, that the run will download the checkpoint."""
    print(f"  note    checkpoint: {checkpoint} was not looked up; the run fetches it from the hub")


# ------------------------------------------------------------------------------------------------ sft.py and rl.py


@dataclass(frozen=True)
class Script:
    """What differs between sft.py and rl.py."""

    main: Callable[[RunConfig], None]
    parse: Callable[[dict, str, Path], Any]  # (row, its name, where relative paths start) -> a Task or a Dialogue
    count_tokens: Callable[[Any, RunConfig, Renderer, Videos], int]  # encodes a parsed row
    require_hardware: Callable[[RunConfig, bool], None]  # (cfg, dry): shows the memory plan; refuses what does not fit
    schemas: Callable[[Any], dict[str, dict]]  # of the tools that the prompt offers, by their names
    list_oddities: Callable[[Any], list[str]] = lambda item: []  # of a parsed row; --check-data counts them


def run_training(script: Script, cfg: RunConfig, args: argparse.Namespace) -> NoReturn:
    """Train, or do what --dry-run or --check-data asks for. Then end the process."""
    work = script.main
    if args.dry_run:
        work = partial(dry_run, script=script)
    elif args.check_data:
        work = partial(read_all_rows, script=script)
    run_script(work, cfg)


def dry_run(cfg: RunConfig, script: Script) -> None:
    """Show what memory a run needs, then check what else it needs. The first fault ends it. The checkpoint comes last: before its
    training, a dry run shows all the rest."""
    require_ready(cfg, script, dry=True)
    if on_the_hub(cfg.policy.checkpoint):
        note_not_looked_up(cfg.policy.checkpoint)
    else:
        source, _ = open_start(cfg, script)
        passed(f"checkpoint: {source}", dry=True)


@contextlib.contextmanager
def open_run(cfg: RunConfig, script: Script) -> Iterator[tuple[Path, Renderer]]:
    """Check everything that a training run needs, then lock its folder. Yield the checkpoint's folder and its renderer.
    All ranks check, and the first one reports."""
    require_ready(cfg, script, dry=False)
    source, renderer = open_start(cfg, script)
    with contextlib.ExitStack() as held:
        if rank() == 0:
            held.enter_context(only_run_in(Path(cfg.run)))
        barrier()  # the others read the lock
        refuse_unlike_nodes(cfg, source)
        yield source, renderer


def require_ready(cfg: RunConfig, script: Script, dry: bool) -> None:
    """Refuse hardware, a folder or data with which a training cannot work, before anything is written or loaded."""
    if cfg.prompts.changed:
        print0(f"  note    prompts: not ours: {', '.join(cfg.prompts.changed)}")
    script.require_hardware(cfg, dry)
    refuse_replaced_checkpoint(Path(cfg.run), Path(cfg.policy.checkpoint))
    require_writable(cfg.run)
    refuse_other_run(cfg)
    passed(f"run: {cfg.run}", dry)
    require_rows(script.parse, cfg.data, cfg.val)
    passed(f"data: {Dataset(cfg.data, script.parse).total} rows", dry)


def open_start(cfg: RunConfig, script: Script) -> tuple[Path, Renderer]:
    """Open the checkpoint that a run starts from. Refuse to resume from other weights than the run began with: reference and
    frozen tower would be new, and the text model old."""
    source, renderer = open_checkpoint(cfg.policy.checkpoint, cfg.visual, cfg.prompts)
    refuse_quantized(source)
    if saved_step(Path(cfg.run) / "state"):
        refuse_other_weights(Path(cfg.run), source, f"policy.checkpoint = {cfg.policy.checkpoint!r}")
    refuse_template(source, renderer, script.schemas(cfg))
    return source, renderer


# ------------------------------------------------------------------------------------------------ --check-data


def read_all_rows(cfg: RunConfig, script: Script) -> int:
    """Read every row of `data` and `val`, open its files and encode it. Print counts, oddities and the first bad rows. Return 1 if
    any is bad."""
    _, renderer = open_checkpoint(cfg.policy.checkpoint, cfg.visual, cfg.prompts, weights=False)
    files = []
    for data in filter(None, (cfg.data, cfg.val)):
        files += [(Rows(source.path), data.video_root) for source in data.sources]
    status = 0
    with Videos(cfg.workers) as videos, ThreadPoolExecutor(2 * cfg.workers) as readers:
        encode = partial(script.count_tokens, cfg=cfg, renderer=renderer, videos=videos)
        for rows, root in files:
            read = partial(read_row, rows=rows, root=Path(root or rows.path.parent), script=script, encode=encode)
            results = list(progress_bar(readers.map(read, range(len(rows))), total=len(rows), unit="row"))
            lengths = [tokens for tokens, _, _ in results]
            bad = [f"  row {i}: {reason}" for i, (_, reason, _) in enumerate(results) if reason]
            oddities = Counter(oddity for _, _, oddities in results for oddity in oddities)
            longest = max(lengths, default=0)
            print(f"{rows.path}: {len(rows)} rows, {len(bad)} unusable; {sum(lengths)} tokens, at most {longest}")
            for oddity, count in oddities.items():
                print(f"  note    {count} rows with {oddity}")
            for line in bad[:10]:
                print(line)
                status = 1
    return status


def read_row(
    i: int, rows: Rows, root: Path, script: Script, encode: Callable[[Any], int]
) -> tuple[int, str, list[str]]:
    """Return how many tokens a row has, why it cannot be used ("" if it can), and what is odd about it."""
    try:
        with row_errors():
            item = script.parse(rows[i], f"{rows.path.name}:{i}", root)
            return encode(item), "", script.list_oddities(item)
    except RowError as error:
        return 0, str(error), []
