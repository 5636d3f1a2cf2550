"""Entries beside a loss are joined when they are read; the type stays."""

import copy
import functools
import gc
import pickle
import weakref
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from harness.oracle import assert_close, build, randint, randn

from calls.mappings import CASES, both, told
from calls.mappings import KINDS as MAPPINGS
from calls.programs import Own, mlp
from scatterpar import ScatterOnceParallel
from scatterpar.calls import unread_outputs

ROWS, LABELS = randn(9, 6), randint(3, 9)
LAYOUTS = [["cpu"] * 2, ["cpu:0", "cpu:1", "cpu:0"]]


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    name: str = "a"


@dataclass
class Cache:
    keys: torch.Tensor


def named(kind):
    return lambda **entries: kind(entries)


KINDS = {"dict": dict, "OrderedDict": named(OrderedDict), "dataclass": Output}


@pytest.fixture(params=LAYOUTS, ids="+".join)
def layout(request):
    return request.param


def called(make, layout):
    def forward(self, rows, labels):
        logits = self.net(rows)
        return make(loss=F.cross_entropy(logits, labels), logits=logits)

    net = build(lambda: Own(forward, net=mlp()))
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        return engine(ROWS, LABELS), net(ROWS, LABELS), engine


def entry(output, name):
    return output[name] if isinstance(output, dict) else getattr(output, name)


@pytest.mark.parametrize("kind", KINDS)
def test_unread_entry_is_joined_at_its_first_access(layout, kind):
    output, expected, engine = called(KINDS[kind], layout)
    assert isinstance(output, type(expected))
    before = engine.last_step.bytes["compute"]
    entry(output, "loss").backward()
    logits = entry(output, "logits")
    assert logits.requires_grad
    assert_close(logits.detach(), entry(expected, "logits").detach(), "logits")
    assert entry(output, "logits") is logits
    if len(set(layout)) > 1:
        assert engine.last_step.bytes["compute"] > before


@pytest.mark.parametrize("kind", KINDS)
def test_unread_output_is_copied_and_pickled_whole(kind):
    output, expected, _ = called(KINDS[kind], ["cpu"] * 2)
    with torch.no_grad():
        detached = [copy.copy(output)]
    for copied in detached:
        assert type(copied) is type(expected)
        assert_close(
            entry(copied, "logits").detach(), entry(expected, "logits").detach(), kind
        )
    values = entry(output, "logits").detach()
    plain = {"dict": dict, "OrderedDict": named(OrderedDict), "dataclass": Output}[kind]
    restored = pickle.loads(pickle.dumps(plain(loss=values.sum(), logits=values)))
    assert type(restored) is type(expected)


def test_dict_methods_see_joined_entries():
    for read in (
        lambda output: dict(output)["logits"],
        lambda output: {**output}["logits"],
        lambda output: dict(output.items())["logits"],
        lambda output: list(output.values())[1],
        lambda output: output.get("logits"),
        lambda output: output.pop("logits"),
    ):
        output, expected, _ = called(dict, ["cpu"] * 2)
        assert list(output) == ["loss", "logits"]
        assert_close(read(output).detach(), expected["logits"].detach(), "logits")


def test_written_entry_stays():
    output, _, _ = called(dict, ["cpu"] * 2)
    output["logits"] = 3
    assert output["logits"] == 3
    output, _, _ = called(Output, ["cpu"] * 2)
    output.logits = 3
    assert output.logits == 3


def test_entry_that_cannot_be_joined_raises_when_read(layout):
    def make(loss, logits):
        return {"loss": loss, "states": logits.detach()[None, :2].mean(2)}

    output, _, _ = called(make, layout)
    output["loss"].backward()
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be joined"):
            output["states"]


def test_entries_that_nobody_reads_are_freed():
    alive = []

    def make(loss, logits):
        alive.append(weakref.ref(logits))
        return {"loss": loss, "logits": logits}

    output, _, _ = called(make, ["cpu"] * 2)
    loss = output["loss"]
    loss.backward()
    del output
    gc.collect()
    assert [reference() for reference in alive[:2]] == [None, None]


def test_names_of_what_reads_all_exist():
    assert {"items", "values", "copy", "popitem", "update"} < unread_outputs._OF_ALL


@pytest.mark.parametrize("kind", MAPPINGS)
@pytest.mark.parametrize("case", CASES)
def test_mapping_answers_as_a_plain_one(case, kind):
    """``setdefault`` gave None, and the next read joined over what ``|=`` had set."""
    unread, plain = both(kind)
    assert type(unread) is not type(plain)
    assert told(CASES[case], unread) == told(CASES[case], plain)


@pytest.mark.parametrize("protocol", [0, 1, 2, pickle.HIGHEST_PROTOCOL])
def test_unread_fields_are_pickled(protocol):
    output = unread_outputs.read_later(Output(1, 2), {"loss": 1}, {"logits": lambda: 3})
    restored = pickle.loads(pickle.dumps(output, protocol))
    assert type(restored) is Output
    assert restored == Output(1, 3)


def test_deleted_field_is_gone():
    output = unread_outputs.read_later(Output(1, 2), {"loss": 1}, {"logits": lambda: 3})
    del output.logits
    assert not hasattr(output, "logits")


def test_refused_write_leaves_the_entry():
    class Constant(dict):
        def __setitem__(self, name, value):
            if value == 4:
                raise TypeError("constant")
            super().__setitem__(name, value)

        def __delitem__(self, name):
            raise TypeError("constant")

    output = unread_outputs.read_later(
        Constant(loss=1, logits=2), {"loss": 1}, {"logits": lambda: 3}
    )
    with pytest.raises(TypeError, match="constant"):
        output["logits"] = 4
    with pytest.raises(TypeError, match="constant"):
        del output["logits"]
    assert output["logits"] == 3


class WithAttributes:
    """A base without slots: objects of its subclasses have a ``__dict__``, too."""


@dataclass(slots=True)
class SlottedOutput(WithAttributes):
    loss: torch.Tensor
    logits: torch.Tensor


def test_field_with_a_slot_is_joined(layout):
    """The slot hid the joined field: it had the rows of replica 0 alone."""
    output, expected, _ = called(SlottedOutput, layout)
    assert type(output) is SlottedOutput
    assert_close(output.logits.detach(), expected.logits.detach(), "logits")


@dataclass
class Cached:
    loss: torch.Tensor
    logits: torch.Tensor

    @functools.cached_property
    def sizes(self):
        return self.logits.abs().sum(1)


def test_computed_property_is_that_of_all_rows(layout):
    """``forward`` has read it: the first replica's rows alone were its value."""

    def forward(self, rows):
        logits = self.net(rows)
        output = Cached(logits.square().mean(), logits)
        assert output.sizes is output.sizes
        return output

    net = build(lambda: Own(forward, net=mlp()))
    with ScatterOnceParallel(net, device_ids=layout, verify=False) as engine:
        output = engine(ROWS)
    assert len(output.sizes) == len(ROWS)
    assert_close(output.sizes, output.logits.abs().sum(1), "sizes")
