"""What is done with mappings: each way on its own, and what it gives."""

import copy
import json
import operator
import pickle
from collections import ChainMap, OrderedDict
from dataclasses import make_dataclass

import pytest
import torch
from torch import Tensor

from scatterpar.calls.unread_outputs import read_later

# One entry has the name of a method.
JOINED = {"logits": torch.arange(6.0).view(3, 2), "values": torch.ones(3)}
REPLACED = torch.zeros(2)
ANOTHER = {"loss": 1}


def transformers_kind():
    generic = pytest.importorskip("transformers.utils.generic")
    names = ("loss", "logits", "values", "name")
    fields = [(name, object, None) for name in names]
    kind = make_dataclass("Output", fields, bases=(generic.ModelOutput,))
    return lambda entries: kind(**entries)


class Attributes(dict):
    """Entries are attributes, past the class's own methods."""

    __setattr__ = dict.__setitem__

    def __getattr__(self, name):
        if name in self:
            return dict.__getitem__(self, name)
        raise AttributeError(name)

    def __delattr__(self, name):
        dict.__delitem__(self, name)


KINDS = {
    "dict": lambda: dict,
    "OrderedDict": lambda: OrderedDict,
    "ModelOutput": transformers_kind,
    "attributes": lambda: Attributes,
}


def both(kind):
    """An output with unread entries, and the plain one."""
    make = KINDS[kind]()
    rest = {"loss": torch.tensor(2.0), "name": "a"}
    of_a_replica = {name: value[:1] for name, value in JOINED.items()}
    order = ("loss", "logits", "values", "name")
    first = {**rest, **of_a_replica}
    first = make({name: first[name] for name in order})
    joins = {name: lambda name=name: JOINED[name] for name in JOINED}
    unread = read_later(first, rest, joins)
    entries = {**rest, **JOINED}
    return unread, make({name: entries[name] for name in order})


def in_place(function):
    """``function``, whose result is the mapping."""

    def done(output):
        function(output)
        return output

    return done


def joined(output):
    """What the output is equal to, without a read of it."""
    return {"loss": output["loss"], **JOINED, "name": "a"}


def keywords(**entries):
    return entries


def matched(output):
    match output:
        case {"logits": logits, **rest}:
            return logits, rest


def joined_in_place(output):
    before = output
    output |= {"logits": REPLACED, "more": 1}
    assert output is before
    return output["logits"] is REPLACED


def as_json(output, **options):
    return json.dumps(output, default=Tensor.tolist, **options)


def deleted_attribute(output):
    del output.logits


def as_attribute(output):
    if isinstance(output, (OrderedDict, Attributes)):  # a dict has none
        output.logits = REPLACED


def assigned(output):
    output["logits"] = REPLACED


def assigned_unhashable(output):
    output[["logits"]] = 1


def deleted(output, name="logits"):
    del output[name]


READS = {
    "item": lambda output: output["logits"],
    "item of a method's name": lambda output: output["values"],
    "missing item": lambda output: output["more"],
    "itemgetter": operator.itemgetter("values", "logits"),
    "get": lambda output: (output.get("logits"), output.get("more", 3)),
    "items": lambda output: list(output.items()),
    "reversed items": lambda output: list(reversed(output.items())),
    "values": lambda output: list(output.values()),
    "keys": lambda output: list(output.keys()),
    "iteration": lambda output: [(name, output[name]) for name in output],
    "reversed": lambda output: [output[name] for name in reversed(output)],
    "len": len,
    "bool": bool,
    "in": lambda output: ("logits" in output, "more" in output),
    "repr": lambda output: f"{output!r} {output}",
    "eq": lambda output: (output == joined(output), joined(output) == output),
    "eq of another": lambda output: (output == ANOTHER, operator.eq(ANOTHER, output)),
    "ne": lambda output: output != joined(output),
    "ne from the right": lambda output: joined(output) != output,
    "ne of another": lambda output: (output != ANOTHER, operator.ne(ANOTHER, output)),
    "eq of itself": lambda output: (output == output, output != output),
    "or": lambda output: output | {"logits": REPLACED, "more": 1},
    "or of others": lambda output: output | {"more": 1},
    "ror": lambda output: {"logits": REPLACED, "more": 1} | output,
    "or of itself": lambda output: output | output,
    "or of pairs": lambda output: output | [("more", 1)],
    "dict": dict,
    "dict and keywords": lambda output: dict(output, more=1),
    "OrderedDict": OrderedDict,
    "stars": lambda output: {"more": 1, **output},
    "stars of a call": lambda output: keywords(**output),
    "update of another": lambda output: in_place(lambda d: d.update(output))({"a": 1}),
    "chain": lambda output: dict(ChainMap({"more": 1}, output)),
    "match": matched,
    "format": lambda output: ("{logits}".format_map(output), "%(values)s" % output),  # noqa: UP031
    "copy": lambda output: output.copy(),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda output: pickle.loads(pickle.dumps(output)),
    "json": as_json,
    "json with spaces": lambda output: as_json(output, indent=1, sort_keys=True),
    "fromkeys": lambda output: output.fromkeys(["a"], 1),
    "to_tuple": lambda output: output.to_tuple(),
    "position": lambda output: (output[1], output[:2]),
    "attribute": lambda output: output.logits,
}
WRITES = {
    "setdefault": lambda output: output.setdefault("logits"),
    "setdefault to another": lambda output: output.setdefault("logits", REPLACED),
    "setdefault of another": lambda output: output.setdefault("more", 3),
    "setitem": assigned,
    "setitem refused": assigned_unhashable,
    "setattr": as_attribute,
    "delattr": deleted_attribute,
    "ior": joined_in_place,
    "ior of pairs": in_place(lambda output: operator.ior(output, [("logits", 1)])),
    "ior of itself": in_place(lambda output: operator.ior(output, output)),
    "ior refused": lambda output: operator.ior(output, 3),
    "update": lambda output: output.update({"logits": REPLACED}),
    "update by keywords": lambda output: output.update(logits=REPLACED, more=1),
    "pop": lambda output: output.pop("logits"),
    "pop twice": lambda output: (output.pop("logits"), output.pop("logits", 3)),
    "pop of another": lambda output: output.pop("more"),
    "popitem": lambda output: [output.popitem(), output.popitem()],
    "popitem of the first": lambda output: output.popitem(last=False),
    "move_to_end": lambda output: output.move_to_end("logits"),
    "del": deleted,
    "del twice": lambda output: (deleted(output), deleted(output)),
    "del of another": lambda output: deleted(output, "more"),
    "clear": lambda output: output.clear(),
}
CASES = {**READS, **WRITES}


def plainly(value):
    """What a value is, with numbers for tensors, which have no ``==``."""
    if isinstance(value, Tensor):
        return "tensor", value.tolist()
    if isinstance(value, dict):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        attributes = {
            name: plainly(attribute)
            for name, attribute in getattr(value, "__dict__", {}).items()
            if not name.startswith("_")
        }
        return kind, [(name, plainly(value[name])) for name in value], attributes
    if isinstance(value, (list, tuple)):
        return type(value), [*map(plainly, value)]
    return value


def told(function, output):
    """What ``function`` returns or raises, and what the output is afterwards."""
    try:
        result = plainly(function(output))
    except Exception as error:  # whose text may name the class
        result = type(error), isinstance(error, KeyError) and str(error)
    afterwards = [(name, output.get(name)) for name in (*JOINED, "more")]
    afterwards.append(("attribute", getattr(output, "logits", "none")))
    return result, plainly(afterwards), plainly(output), plainly([*output.items()])
