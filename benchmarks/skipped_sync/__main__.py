"""``python -m benchmarks.skipped_sync`` is ``python -m benchmarks skipped_sync``."""

import sys

from benchmarks.__main__ import main

sys.exit(main(["skipped_sync", *sys.argv[1:]]))
