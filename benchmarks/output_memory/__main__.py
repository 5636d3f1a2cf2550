"""``python -m benchmarks.output_memory`` is ``python -m benchmarks output_memory``."""

import sys

from benchmarks.__main__ import main

sys.exit(main(["output_memory", *sys.argv[1:]]))
