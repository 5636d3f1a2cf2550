"""Checks of the machine: copies, one exact step, and the tests of the repository."""

from __future__ import annotations

from scatterpar.checkup.card.setting import REPOSITORY, Finding, NotRun, Setting
from scatterpar.checkup.copies import examine
from scatterpar.checkup.training import take_step


def copies(setting: Setting) -> Finding:
    """Copies between every two memories, of 1000 bytes to 256 MiB, and between all GPUs at once."""
    found = list(examine(setting.devices))
    wrong = [str(route).strip() for route in found if not route.arrives]
    if wrong:
        return Finding(False, "; ".join(wrong))
    speeds = [
        route.gigabytes_per_second for route in found if "host" not in route.source + route.target
    ]
    between = f"; between devices {min(speeds):.1f} to {max(speeds):.1f} GB/s" if speeds else ""
    return Finding(True, f"{len(found)} ways{between}")


def exact(setting: Setting) -> Finding:
    """The doctor's step on all devices, beside plain torch on one."""
    found = take_step(setting.devices)
    return Finding(found.is_exact, found.words)


def tests(setting: Setting) -> Finding:
    """The tests that need an accelerator, in a clone."""
    folder = REPOSITORY / "tests"
    if not (folder / "test_graphs.py").exists():
        raise NotRun("the tests are in a clone of the repository alone")
    files = [str(path) for path in folder.glob("test_*.py") if "mark.cuda" in path.read_text()]
    files += [str(folder / name) for name in ("test_graphs.py", "test_accelerator.py")]
    options = ["-m", "not slow", "-q", "-p", "no:cacheprovider", "--color=no"]
    with setting.start("pytest", *options, *dict.fromkeys(files)) as process:
        assert process.stdout is not None
        lines = process.stdout.read().strip().splitlines()
    return Finding(process.returncode == 0, lines[-1].strip("= ") if lines else "no output")
