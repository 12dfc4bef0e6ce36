"""script.py: what sft.py, rl.py and eval.py do around their work: read the command line, run, and end.

    cfg, args = command_line(SFTConfig, __doc__)      # SCRIPT CONFIG [key.sub=value ...] [--dry-run | --check-data]
    run_script(main, cfg, *USER_ERRORS)               # calls main(cfg); does not return

An error that a user can fix, a full disk and Ctrl-C end a script with one sentence, any other error with a traceback. Under
torchrun, each rank prints its own.
"""

import argparse
import atexit
import contextlib
import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from runtime.config import ConfigError, load

T = TypeVar("T")
GOES_ON = "The same command resumes from what was saved"


def command_line(cls: type[T], doc: str) -> tuple[T, argparse.Namespace]:
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


def run_script(work: Callable[[Any], int | None], cfg: Any, *errors: type[Exception]) -> NoReturn:
    """Call `work(cfg)`, a script's main function, then end the process. `errors` are those that a user can fix."""
    interrupts = []

    def interrupt(*_) -> None:
        interrupts.append(True)  # a library that writes a file may end with another error
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        status = work(cfg)
    except SystemExit as ended:
        status = ended.code
    except BaseException as error:
        if interrupts:
            status = f"interrupted. {GOES_ON} in {cfg.run}"
        elif isinstance(error, errors):
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
