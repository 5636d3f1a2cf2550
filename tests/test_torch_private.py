"""A private entry point of torch that is not there is named; those that no other test
tries.
"""

import re
import runpy

import pytest
import torch

from scatterpar import torch_private as private

pytestmark = pytest.mark.core

WORDS = (
    r"torch \S+ has no {}, which scatterpar needs; install a version of torch that the"
)


@pytest.mark.parametrize("name", ["_foreach_copy_", "_C._current_graph_task_id"])
def test_missing_name_told_at_import(name, monkeypatch):
    monkeypatch.delattr(f"torch.{name}")
    with pytest.raises(RuntimeError, match=WORDS.format(re.escape(f"torch.{name}"))):
        runpy.run_path(private.__file__)


def test_imports_without_the_dispatch_key(monkeypatch):
    """``threads/test_generators.py`` says what replicas then do."""
    monkeypatch.setattr("torch._C._dispatch_key_parse", lambda name: torch.device(name))
    assert private.HAS_RANDOM_KEY
    assert not runpy.run_path(private.__file__)["HAS_RANDOM_KEY"]


@pytest.mark.parametrize(
    ("options", "records"),
    [
        pytest.param({"mode": "reduce-overhead"}, True, marks=pytest.mark.slow),
        pytest.param({"mode": "default"}, False, marks=pytest.mark.slow),
        ({"backend": "cudagraphs"}, True),
        ({"backend": "eager"}, False),
    ],
)
def test_compile_options_are_repeated(options, records):
    how = private.compile_fn_of(torch.compile(lambda x: x, **options))
    assert private.records_cuda_graphs(how) == records
    runs = []
    compiled = torch.compile(
        lambda x: x, backend=lambda graph, _: runs.append(1) or graph.forward
    )
    assert private.compile_fn_of(compiled)(lambda x: x * 3)(torch.ones(1)).item() == 3.0
    assert runs == [1]
