"""The process of one row: ``python -m benchmarks.card.row ARGUMENTS``, which ``run.py`` starts.

What the row finds goes to standard output, a line of JSON at a time: check, result, verdict. What
it and its libraries print goes to standard error, and so does where its threads are if it is late.
"""

import _thread
import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable

from benchmarks.card.page import FAILED, NOT_RUN, PASSED
from benchmarks.card.rows import by_name
from benchmarks.card.setting import NotRun, Setting

Say = Callable[..., None]  # (result, part of the check's name, verdict)


def main() -> None:
    """Run the row that the first argument names."""
    arguments = json.loads(sys.argv[1])
    # Lines for the page go to the old standard output, all other output to the error.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    _thread.start_new_thread(_end_with_parent, ())
    seconds = arguments["until"] - time.time()
    # A second before ``run.py`` kills this process.
    faulthandler.dump_traceback_later(max(0.5, seconds - 1.0))
    setting = Setting.from_json(arguments["setting"])
    name = arguments["row"]

    def say(result: str, part: str = "", verdict: str = PASSED) -> None:
        check = f"{name}, {part}" if part else name
        lines.write(json.dumps([check, result, verdict]) + "\n")

    try:
        if setting.under:
            importlib.import_module(setting.under).install()
        by_name(name).run(setting, say)
    except NotRun as reason:
        say(str(reason), verdict=NOT_RUN)
    except BaseException as error:
        traceback.print_exc()
        words = str(error).strip().splitlines() or [""]
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        say(f"{kind}{words[0][:300]}", verdict=FAILED)
    lines.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some libraries abort in a process that ends in the usual way


def _end_with_parent() -> None:
    """End this process when the one that started it has ended, for any reason."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
