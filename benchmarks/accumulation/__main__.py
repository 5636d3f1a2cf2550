"""``python -m benchmarks.accumulation`` is ``python -m benchmarks accumulation``."""

import sys

from benchmarks.__main__ import main

sys.exit(main(["accumulation", *sys.argv[1:]]))
