"""``engine(…)`` and ``engine.map``: without a graph, on all replicas, in the module's own types."""

from __future__ import annotations

import functools

import pytest
import torch
from harness.models import CLASSES, FEATURES, Of, Returns
from harness.notes import note_of
from harness.oracle import assert_close, build, randint, randn, seeded
from harness.rank_processes import run_on_ranks
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from scatterpar import DataParallelModel, Replicated, Rows, ScatterOnceParallel, gather

pytestmark = pytest.mark.core

INPUTS = randn(11, FEATURES)
HOST = ["cpu"] * 3  # where rows need no copy to arrive


@pytest.mark.contract
def test_positional_and_keyword_inputs(devices):
    def takes(_, first, second, *, scale, mode="plain", extra=None):
        assert mode == "fancy"
        assert extra == {"k": 1}
        return first + scale * second["x"]

    second, scale = {"x": randn(11, FEATURES, seed=4)}, torch.tensor(2.0)
    with ScatterOnceParallel(Of(takes).eval(), 2, devices(3)) as engine:
        output = engine(INPUTS, second, scale=scale, mode="fancy", extra={"k": 1})
    assert_close(output, INPUTS + 2 * second["x"], "output")


@pytest.mark.contract
def test_numbers_without_rows_are_averaged_over_the_rows(devices):
    """Micro-batches have two rows, and one has one."""
    means = Of(lambda _, inputs: {"mean": inputs.mean()}).eval()
    with ScatterOnceParallel(means, 2, devices(3)) as engine:
        assert_close(engine(INPUTS)["mean"], INPUTS.mean(), "mean")


@pytest.mark.contract
def test_in_place_layers_do_not_write_the_caller_s_tensors():
    writes = Of(lambda _, inputs, number: inputs.add_(number.mul_(2)))
    inputs, number = INPUTS.clone(), torch.tensor(1.0).double()
    with ScatterOnceParallel(writes.eval(), 2, HOST) as engine:
        engine(inputs, number)
    DataParallelModel(writes, HOST)(inputs, number)
    assert torch.equal(inputs, INPUTS)
    assert number == 1


class FailsOn(nn.Linear):
    row, error = None, None

    def forward(self, inputs):
        if self.row is not None and (inputs == self.row).all(1).any():
            raise self.error
        return super().forward(inputs)


def test_errors_arrive_as_they_are(devices):
    model = build(lambda: FailsOn(FEATURES, CLASSES)).eval()
    model.row, model.error = INPUTS[10], KeyError("mine")
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        with pytest.raises(KeyError) as caught:
            engine(INPUTS)
        assert caught.value is model.error
        (note,) = caught.value.__notes__
        assert note == note_of(2, devices(3)[2], 1, of=2, rows=(10,))
        model.row = None
        assert_close(engine(INPUTS), model(INPUTS).detach(), "output")


@pytest.mark.parametrize("accum", [1, 2, 5])
def test_lists_of_rows_anywhere_in_an_output(devices, accum):
    """Where the inputs have ``Rows``; a list of tensors that hold the rows is joined as ever."""

    def finds(_, images):
        whole = torch.stack([image.sum() for image in images])
        scores, names = [image.sum() for image in images], [str(len(i)) for i in images]
        found = [{"box": image[: len(image) // 2]} for image in images]
        return {"scores": scores, "more": (names, [whole, whole * 2]), "boxes": images}, found

    images = [randn(1 + n % 4, seed=n) for n in range(11)]
    expected, found = finds(None, images)
    with ScatterOnceParallel(Of(finds).eval(), accum, devices(3)) as engine:
        output, boxes = engine(Rows(images))
    assert [one["box"].tolist() for one in boxes] == [one["box"].tolist() for one in found]
    assert output["more"][0] == expected["more"][0]
    for key in ("scores", "boxes"):
        for mine, its in zip(output[key], expected[key], strict=True):
            assert_close(mine, its, key)
    for mine, its in zip(output["more"][1], expected["more"][1], strict=True):
        assert_close(mine, its, "whole")


def test_outputs_that_know_how_many_rows_they_are_of(devices):
    def packs(output, _):
        return pack_sequence([*output.unsqueeze(1)])

    model = build(lambda: Returns(packs)).eval()
    told = pytest.raises(ValueError, match="return what pad_packed_sequence")
    with ScatterOnceParallel(model, 2, devices(2)) as engine, told:
        engine(INPUTS)
    pair = DataParallelModel(model, devices(2))
    with pytest.raises(ValueError, match="return what pad_packed_sequence"):
        gather(pair(INPUTS), "cpu")
    shapes = build(lambda: Returns(lambda y, _: (y, y.shape, y.shape[1:])))
    with ScatterOnceParallel(shapes.eval(), 1, devices(3)) as engine:
        _, each, same = engine(INPUTS)
    assert each == [(4, CLASSES), (4, CLASSES), (3, CLASSES)]
    assert same == (CLASSES,)


# --- engine.map: what a model does besides its forward pass ---

FOURS = randn(11, 4)
ENDS = [[f"cpu:{i}" for i in range(n)] for n in (1, 2, 3)]


class Writer(nn.Module):
    """Writes as many equal numbers as a row says, as ``generate`` does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(self.linear(x))

    def write(self, x, more=0):
        assert not torch.is_grad_enabled()
        lengths = (x[:, 0].abs() * 5).long() + 1 + more
        text = torch.full((len(x), int(lengths.max())), -1)
        for row, length in zip(text, lengths, strict=True):
            row[:length] = length
        return text

    def who(self, x):
        return [id(self)] * len(x)


@torch.no_grad()
def written(model, more=0):
    return model.write(FOURS, more)


@pytest.fixture
def engine(devices):
    with ScatterOnceParallel(build(Writer), 2, devices(3)) as engine:
        yield engine


def test_each_replica_calls_its_own_method(engine):
    model = engine.module
    assert torch.equal(engine.map(model.write, FOURS, more=2, pad=-1), written(model, 2))
    bound = functools.partial(model.write, more=2)
    assert torch.equal(engine.map(bound, FOURS, pad=-1), written(model, 2))
    assert set(engine.map(model.who, FOURS)) == set(map(id, engine.replicas))
    linear = engine.map(model.linear.forward, FOURS)
    assert_close(linear, model.linear(FOURS).detach(), "a method of a part")
    assert_close(engine.map(model.linear, FOURS), linear, "a part")


def test_a_function_gets_the_replica_first(engine):
    expected = written(engine.module, 1)
    found = engine.map(lambda replica, x, more: replica.write(x, more), FOURS, more=1, pad=-1)
    assert torch.equal(found, expected)
    found = engine.map(functools.partial(Writer.write, more=1), FOURS, pad=-1)
    assert torch.equal(found, expected)


def test_a_method_whose_object_has_the_module_gets_the_replica_first(engine):
    """A trainer holds its model and its engine; that is no reason to refuse its methods."""

    class Trainer:
        def __init__(self):
            self.net = engine.module

        def write(self, replica, rows):
            return replica.write(rows, 1)

    assert torch.equal(engine.map(Trainer().write, FOURS, pad=-1), written(engine.module, 1))


def test_the_forward_pass_is_a_map_of_the_module(engine):
    engine.eval()
    expected = engine.module(FOURS).detach()
    assert_close(engine(FOURS), expected, "engine(…)")
    assert torch.equal(engine.map(engine.module, FOURS), engine(FOURS))


def test_tensors_are_joined_padded_or_refused(engine):
    model, lengths = engine.module, written(engine.module).ne(-1).sum(1)
    words = r"of shapes .* those of 2 and 2 and 2 and 2 and 2 and 1 rows, .* engine\.map\(…, pad="
    with pytest.raises(ValueError, match=words):
        engine.map(model.write, FOURS)

    def several(replica, x):
        text = replica.write(x)
        return {
            "text": text,
            "flags": text > 0,
            "pair": (text.double().T.contiguous().T, text[:, :1]),
            "mean": x.mean(),
            "table": torch.arange(3.0),
            "name": "writer",
        }

    found = engine.map(several, FOURS, pad=0)
    at_end = torch.arange(int(lengths.max())) >= lengths[:, None]
    expected = written(model)
    assert torch.equal(found["flags"], expected > 0)
    assert torch.equal(found["text"] > 0, ~at_end)
    assert torch.equal(found["pair"][1], expected[:, :1])
    assert found["pair"][0].dtype == torch.float64
    assert_close(found["mean"], FOURS.mean(), "weighted by rows")
    assert torch.equal(found["table"], torch.arange(3.0))
    assert found["name"] == "writer"


def test_lists_plain_values_and_the_rest(engine):
    words = [f"word {i}" for i in range(11)]
    upper = engine.map(lambda _, part: [word.upper() for word in part], Rows(words))
    assert upper == [word.upper() for word in words]
    ragged = engine.map(lambda replica, x: {"rows": list(replica.write(x))}, FOURS)["rows"]
    assert [int(row[0]) for row in ragged] == written(engine.module)[:, 0].tolist()
    square = engine.map(lambda _, x: {"rows": [row[: len(x)] for row in x]}, FOURS)["rows"]
    assert torch.equal(torch.stack([row[:1] for row in square]), FOURS[:, :1])  # no list of views
    assert engine.map(lambda _, x: len(x), FOURS) == [2, 2, 2, 2, 2, 1]
    assert engine.map(lambda _, x: 7, FOURS) == 7
    arrays = engine.map(lambda _, x: x.numpy(), FOURS)
    assert [len(array) for array in arrays] == [2, 2, 2, 2, 2, 1]
    scaled = engine.map(lambda _, x, table: x * table, FOURS, Replicated(torch.arange(4.0)))
    assert_close(scaled, FOURS * torch.arange(4.0), "with an argument without rows")


def test_rows_go_by_cost_and_keep_their_order(devices):
    costs, model = [float(i % 4 + 1) for i in range(11)], build(Writer)
    with ScatterOnceParallel(model, device_ids=devices(2), micro_batch_cost=8) as engine:
        found = engine.map(model.write, FOURS, more=2, pad=-1, costs=costs)
        assert torch.equal(found, written(model, 2))
        names = engine.map(lambda _, x: [float(v) for v in x[:, 0]], FOURS, costs=costs)
        assert names == FOURS[:, 0].tolist()
        with pytest.raises(ValueError, match="costs"):
            engine.map(model.write, FOURS)


@pytest.mark.draws
def test_several_entries_per_row(engine):
    def in_order(_, x):
        return x.repeat_interleave(3, 0)

    def drawn(_, x):
        return torch.randn(3 * len(x), 2)

    assert torch.equal(engine.map(in_order, FOURS), FOURS.repeat_interleave(3, 0))
    with pytest.raises(ValueError, match=r"draws random numbers .*\.view\(rows, k, -1\)"):
        engine.map(drawn, FOURS)
    found = engine.map(lambda _, x: torch.randn(3 * len(x), 2).view(len(x), 3, -1), FOURS)
    assert found.shape == (11, 3, 2)
    with pytest.raises(ValueError, match=r"9 entries for 3 rows, .*\.view\(rows, k, -1\)"):
        engine.map(lambda _, x: x.repeat(3, 1), FOURS)


def test_a_function_may_compute_gradients(engine):
    def saliency(replica, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            replica.linear(x).square().sum().backward()
        return x.grad

    x = FOURS.clone().requires_grad_()
    (expected,) = torch.autograd.grad(engine.module.linear(x).square().sum(), x)
    assert_close(engine.map(saliency, FOURS), expected, "gradient of the rows")
    assert engine.module.linear.weight.grad is None


@pytest.mark.parametrize("training", [True, False])
def test_modules_keep_their_mode(engine, training):
    engine.train(training)
    before = engine.module.norm.running_mean.clone()
    assert engine.map(lambda replica, _: replica.norm.training, FOURS) is training
    engine.map(lambda replica, x: replica(x), torch.cat([FOURS, FOURS[:1]]))
    assert engine.module.training is training
    assert torch.equal(engine.module.norm.running_mean, before) is not training


model = None


def test_a_function_that_names_the_user_s_module_is_refused(engine):
    own, other = engine.eval().module, build(Writer)
    functions = [
        lambda _, x: own(x),
        lambda _, x: [own.linear(x) for _ in range(1)],
        lambda _, x, method=own.write: method(x),
        functools.partial(lambda part, _, x: part(x), own),
        lambda _, x: (lambda: model(x))(),
    ]
    globals()["model"] = own
    try:
        for function in functions:
            with pytest.raises(
                ValueError, match=r"refers to the module itself, .* model\.generate"
            ):
                engine.map(function, FOURS)
        replica = engine.map(lambda replica, x: Of(lambda s, x: x, model=replica).model(x), FOURS)
    finally:
        globals()["model"] = None
    assert replica.shape == (11, 2)
    other.eval()
    assert_close(engine.map(lambda _, x: other(x), FOURS), other(FOURS).detach(), "another one")


@pytest.mark.draws
def test_the_same_seed_draws_the_same_on_as_many_replicas(engine):
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn += [engine.map(lambda _, x: torch.randn(len(x), 2), FOURS) for _ in range(2)]
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])


def test_compiled_replicas(devices):
    with ScatterOnceParallel(build(Writer), 2, devices(2), compile={"backend": "eager"}) as engine:
        engine.eval()
        expected = engine.module(FOURS).detach()
        for _ in range(2):
            assert_close(engine.map(lambda replica, x: replica(x), FOURS), expected, "compiled")


@pytest.mark.parametrize("device_ids", ENDS, ids=len)
def test_generated_tokens_are_those_of_one_call(device_ids):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 40}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, pad_token_id=0, eos_token_id=1)
    with seeded():
        model = transformers.LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        model.lm_head.weight[1] *= 4  # texts end after a few words
    ids = randint(38, 11, 6) + 2
    lengths = torch.arange(11) % 5 + 2
    mask = (torch.arange(6) >= 6 - lengths[:, None]).long()
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    how = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**batch, **how)
    with ScatterOnceParallel(model, 2, device_ids) as engine:
        assert torch.equal(engine.map(model.generate, **batch, **how, pad=0), expected)
        texts = engine.map(lambda replica, b: replica.generate(**b, **how).tolist(), batch)
        assert [[t for t in text if t] for text in texts] == [
            [t for t in text if t] for text in expected.tolist()
        ]


def mapped(group):
    rows = FOURS[group.rank() * 4 : group.rank() * 4 + 4]
    with ScatterOnceParallel(build(Writer), 2, process_group=group) as engine:
        return engine.map(engine.module.write, rows, pad=-1)


def test_each_rank_maps_its_own_rows():
    for rank, found in enumerate(run_on_ranks(2, mapped)):
        with torch.no_grad():
            expected = build(Writer).write(FOURS[rank * 4 : rank * 4 + 4])
        assert torch.equal(found, expected)
