"""What does a look add to the peak memory of a step?"""

import json
import os
import subprocess
import sys

from benchmarks.memory.look_peak import ENVIRONMENT, NETWORKS
from benchmarks.tables import Table


def test_look_peak(benchmark, publish, quick):
    names = list(NETWORKS)[:1] if quick else list(NETWORKS)
    peaks = benchmark.pedantic(measure, args=(names,), rounds=1)
    rows = []
    for name, of_steps in peaks.items():
        # The first step without a look makes what all later ones keep.
        plain = max(of_steps["without"][1:])
        first, *later = of_steps["with"]
        ratios = [f"{first / plain:.2f}", f"{max(later) / plain:.2f}"]
        rows.append([name, f"{plain:.1f}", *ratios])
    columns = ["network", "a step without, in logits of a micro-batch"]
    columns += ["first step with a look, ratio", "later ones, at most"]
    publish("look", Table(columns, rows), {"rows": rows, "peaks": peaks})


def measure(names):
    """By network: peaks of steps without looks and with them."""
    peaks = {}
    for name in names:
        command = [sys.executable, "-m", "benchmarks.memory.look_peak", name]
        environment = os.environ | ENVIRONMENT
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        )
        peaks[name] = json.loads(done.stdout)
    return peaks
