"""The null CUDA is built again only if a source is newer."""

import os

from nullcuda.build import is_current


def test_build_is_current_until_a_source_changes(tmp_path):
    source = tmp_path / "runtime.c"
    other = tmp_path / "null.h"
    stamp = tmp_path / "built"
    for number, path in enumerate((source, other)):
        path.touch()
        os.utime(path, (number, number))
    assert not is_current(stamp, [source, other])
    stamp.touch()
    assert is_current(stamp, [source, other])
    os.utime(other, (2**32, 2**32))
    assert not is_current(stamp, [source, other])
