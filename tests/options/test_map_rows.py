"""``engine(…)`` and ``engine.map``: without a graph, on all replicas, in the module's
own types.
"""

from __future__ import annotations

import functools

import pytest
import torch
from harness.models import FEATURES, Of, Returns
from harness.notes import note_of
from harness.oracle import assert_alike, assert_close, build, randint, randn, seeded
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from scatterpar import DataParallelModel, Replicated, Rows, ScatterOnceParallel

pytestmark = pytest.mark.core

INPUTS = randn(11, FEATURES)
HOST = ["cpu"] * 3  # where rows need no copy to arrive


@pytest.mark.contract
def test_positional_and_keyword_inputs_work(devices):
    def takes(_, first, second, *, scale, mode="plain", extra=None):
        assert mode == "fancy"
        assert extra == {"k": 1}
        return first + scale * second["x"]

    second, scale = {"x": randn(11, FEATURES, seed=4)}, torch.tensor(2.0)
    with ScatterOnceParallel(Of(takes).eval(), 2, devices(3)) as engine:
        output = engine(INPUTS, second, scale=scale, mode="fancy", extra={"k": 1})
    assert_close(output, INPUTS + 2 * second["x"], "output")


@pytest.mark.contract
def test_rowless_numbers_averaged_by_rows(devices):
    """Micro-batches have two rows, and one has one."""
    means = Of(lambda _, inputs: {"mean": inputs.mean()}).eval()
    with ScatterOnceParallel(means, 2, devices(3)) as engine:
        assert_close(engine(INPUTS)["mean"], INPUTS.mean(), "mean")


@pytest.mark.contract
def test_in_place_layers_spare_the_inputs():
    writes = Of(lambda _, inputs, number: inputs.add_(number.mul_(2)))
    inputs, number = INPUTS.clone(), torch.tensor(1.0).double()
    with ScatterOnceParallel(writes.eval(), 2, HOST) as engine:
        engine(inputs, number)
    DataParallelModel(writes, HOST)(inputs, number)
    assert torch.equal(inputs, INPUTS)
    assert number == 1


class WritesItsOutput(nn.Module):
    """Copies an output into a tensor of its own, as modules with caches do."""

    def __init__(self, is_buffer):
        super().__init__()
        self.weight = nn.Parameter(randn(FEATURES, 2))
        last = torch.zeros(16, 2, dtype=torch.float64)
        if is_buffer:
            self.register_buffer("last", last)
        else:
            self.last = last

    def forward(self, inputs):
        output = inputs @ self.weight
        last = self.last[: len(inputs)]
        last.copy_(output.detach())
        return output, last


def inference(engine, inputs):
    with torch.no_grad():
        return [engine.eval()(inputs)]


def inference_mode(engine, inputs):
    """Also its fresh tensors do not count how often they were written."""
    with torch.inference_mode():
        return [engine.eval()(inputs)]


def mapped(engine, inputs):
    return [engine.map(lambda replica, rows: replica(rows), inputs)]


def first_mean(outputs, _):
    return outputs[0].mean()


def returned(engine, inputs, **options):
    _, outputs = engine.forward_backward(
        inputs, inputs, first_mean, return_outputs=True, **options
    )
    return outputs


OUTPUTS = {
    "inference": inference,
    "inference mode": inference_mode,
    "map": mapped,
    "return_outputs": returned,
    "whole_batch": functools.partial(returned, whole_batch=True),
}


@pytest.mark.parametrize("is_buffer", [True, False], ids=["buffer", "attribute"])
@pytest.mark.parametrize("outputs_of", OUTPUTS.values(), ids=OUTPUTS)
@pytest.mark.filterwarnings("ignore:forward passes move")
def test_outputs_in_tensors_that_calls_write(devices, outputs_of, is_buffer):
    """A second micro-batch is written into the tensor that the first one returned."""
    module = WritesItsOutput(is_buffer)
    inputs = randn(11, FEATURES)
    with ScatterOnceParallel(module, 2, devices(2)) as engine:
        outputs = outputs_of(engine, inputs)
    for fresh, written in outputs:
        assert torch.equal(fresh, written)


def test_errors_arrive_as_they_are(devices):
    def fails(_, inputs):
        if (inputs == INPUTS[10]).all(1).any():
            raise KeyError("mine")
        return inputs

    with ScatterOnceParallel(Of(fails).eval(), 2, devices(3)) as engine:
        with pytest.raises(KeyError, match="mine") as caught:
            engine(INPUTS)
        assert caught.value.__notes__ == [
            note_of(2, devices(3)[2], 1, sub_steps=2, rows=(10,))
        ]
        assert torch.equal(engine(INPUTS[:10]), INPUTS[:10])


def test_failed_function_leaves_generators(devices):
    """And the statistics of a network that it refers to; no try of ``accum="auto"``."""
    generator = torch.Generator().manual_seed(3)
    teacher = build(lambda: nn.BatchNorm1d(FEATURES))
    before = [generator.get_state(), *map(torch.clone, teacher.buffers())]

    def fails(replica, inputs):
        noise = torch.rand(len(inputs), 1, generator=generator)
        outputs = replica(teacher(inputs)) + noise
        if (inputs == INPUTS[10]).all(1).any():
            raise KeyError("mine")
        return outputs

    model = build(lambda: nn.Linear(FEATURES, 3)).eval()
    with ScatterOnceParallel(model, 1, devices(3)) as engine:
        with pytest.raises(KeyError, match="mine"):
            engine.map(fails, INPUTS)
        assert all(
            map(torch.equal, before, [generator.get_state(), *teacher.buffers()])
        )
        engine.map(fails, INPUTS[:10])
    assert not torch.equal(before[0], generator.get_state())


@pytest.mark.parametrize("accum", [2, 5])
def test_lists_of_rows_in_outputs_joined(devices, accum):
    """Where the inputs have ``Rows``; a list of tensors that hold the rows is joined as
    ever.
    """

    def finds(_, images):
        whole = torch.stack([image.sum() for image in images])
        scores, names = [image.sum() for image in images], [str(len(i)) for i in images]
        found = [{"box": image[: len(image) // 2]} for image in images]
        return {
            "scores": scores,
            "more": (names, [whole, whole * 2]),
            "boxes": images,
        }, found

    images = [randn(1 + n % 4, seed=n) for n in range(11)]
    with ScatterOnceParallel(Of(finds).eval(), accum, devices(3)) as engine:
        assert_alike(engine(Rows(images)), finds(None, images))


def test_packed_sequence_outputs_refused(devices):
    def packs(output, _):
        return pack_sequence([*output.unsqueeze(1)])

    model = build(lambda: Returns(packs)).eval()
    with (
        ScatterOnceParallel(model, 2, devices(2)) as engine,
        pytest.raises(ValueError, match="return pad_packed_sequence"),
    ):
        engine(INPUTS)


# --- engine.map: what a model does besides its forward pass ---

FOURS = randn(11, 4)


class Writer(nn.Sequential):
    """Writes as many equal numbers as a row says, as ``generate`` does."""

    def __init__(self):
        super().__init__(nn.Linear(4, 2), nn.BatchNorm1d(2))

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


def test_replicas_call_their_own_method(engine):
    model = engine.module
    assert torch.equal(
        engine.map(model.write, FOURS, more=2, pad=-1), written(model, 2)
    )
    bound = functools.partial(model.write, more=2)
    assert torch.equal(engine.map(bound, FOURS, pad=-1), written(model, 2))
    assert set(engine.map(model.who, FOURS)) == set(map(id, engine.replicas))
    linear = engine.map(model[0].forward, FOURS)
    assert_close(linear, model[0](FOURS).detach(), "a method of a part")
    assert_close(engine.map(model[0], FOURS), linear, "a part")
    engine.eval()
    assert_close(engine(FOURS), model(FOURS).detach(), "engine(…)")
    outputs = engine(FOURS).detach()
    assert_close(engine.map(model, FOURS), outputs, "the module by map")


def test_function_gets_the_replica_first(engine):
    """So does a trainer's method, though the trainer holds the model."""

    class Trainer:
        net = engine.module

        def write(self, replica, rows):
            return replica.write(rows, 1)

    by_partial = functools.partial(Writer.write, more=1)
    for function in (
        lambda replica, x: replica.write(x, 1),
        by_partial,
        Trainer().write,
    ):
        found = engine.map(function, FOURS, pad=-1)
        assert torch.equal(found, written(engine.module, 1))


def test_tensors_joined_padded_or_refused(engine):
    model = engine.module
    words = r"of shape .* for 2 rows and .* for 1 row .*engine\.map\(…, pad="
    with pytest.raises(ValueError, match=words):
        engine.map(model.write, FOURS)

    def several(replica, x):
        text = replica.write(x).clamp(min=0)
        return {
            "text": text,
            "flags": text > 0,
            "pair": (text.double().T.contiguous().T, text[:, :1]),
            "mean": x.mean(),  # weighted by rows
            "table": torch.arange(3.0),
            "name": "writer",
        }

    with torch.no_grad():
        expected = several(model, FOURS)
    assert_alike(engine.map(several, FOURS, pad=0), expected)


@pytest.mark.parametrize("function", [torch.ones(4, 2), "forward"])
def test_function_is_missing(function):
    """A batch in its place was said to have no rows."""
    words = r"must be callable.*map\(function, inputs\)"
    with (
        ScatterOnceParallel(build(lambda: nn.Linear(2, 2)), 1, ["cpu"]) as engine,
        pytest.raises(TypeError, match=words),
    ):
        engine.map(function)


def test_lists_joined_plain_values_kept(engine):
    words = [f"word {i}" for i in range(11)]
    upper = engine.map(lambda _, part: [word.upper() for word in part], Rows(words))
    assert upper == [word.upper() for word in words]
    ragged = engine.map(lambda replica, x: {"rows": list(replica.write(x))}, FOURS)[
        "rows"
    ]
    assert [int(row[0]) for row in ragged] == written(engine.module)[:, 0].tolist()
    square = engine.map(lambda _, x: {"rows": [row[: len(x)] for row in x]}, FOURS)[
        "rows"
    ]
    # no list of views
    assert torch.equal(torch.stack([row[:1] for row in square]), FOURS[:, :1])
    assert engine.map(lambda _, x: len(x), FOURS) == [2, 2, 2, 2, 2, 1]
    assert engine.map(lambda _, x: 7, FOURS) == 7
    arrays = engine.map(lambda _, x: x.numpy(), FOURS)
    assert [len(array) for array in arrays] == [2, 2, 2, 2, 2, 1]
    scaled = engine.map(
        lambda _, x, table: x * table, FOURS, Replicated(torch.arange(4.0))
    )
    assert_close(scaled, FOURS * torch.arange(4.0), "with an argument without rows")


@pytest.mark.draws
def test_several_entries_per_row_have_a_dimension(engine):
    for function in (
        lambda _, x: x.repeat_interleave(3, 0),
        lambda _, x: torch.randn(3 * len(x), 2),
    ):
        with pytest.raises(ValueError, match=r"each row has 3 entries.*\(rows, 3, …\)"):
            engine.map(function, FOURS)
    found = engine.map(lambda _, x: torch.stack([x] * 3, 1), FOURS)
    assert torch.equal(found, torch.stack([FOURS] * 3, 1))


def test_entries_of_fixed_number_are_no_rows():
    """With one row per micro-batch the states of two layers were taken for two entries
    per row.
    """
    model = build(lambda: nn.LSTM(4, 2, num_layers=2, batch_first=True)).eval()
    with (
        ScatterOnceParallel(
            model, device_ids=["cpu"] * 2, micro_batch_size=1
        ) as engine,
        pytest.raises(ValueError, match=r"for 1 row cannot be joined"),
        torch.no_grad(),
    ):
        engine(FOURS[:, None])


def test_function_naming_user_module_refused(engine, monkeypatch):
    own, other = engine.eval().module, build(Writer).eval()
    monkeypatch.setitem(globals(), "model", own)
    for function in (
        lambda _, x: own(x),
        lambda _, x: [own[0](x) for _ in range(1)],
        lambda _, x, method=own.write: method(x),
        functools.partial(lambda part, _, x: part(x), own),
        lambda _, x: (lambda: model(x))(),  # noqa: F821
    ):
        with pytest.raises(
            ValueError, match=r"refers to the module itself, .* model\.generate"
        ):
            engine.map(function, FOURS)
    replica = engine.map(
        lambda replica, x: Of(lambda s, x: x, model=replica).model(x), FOURS
    )
    assert replica.shape == (11, 2)
    assert_close(
        engine.map(lambda _, x: other(x), FOURS), other(FOURS).detach(), "another one"
    )


def test_generated_tokens_equal_one_call(devices):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 40,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, pad_token_id=0, eos_token_id=1)
    with seeded():
        model = transformers.LlamaForCausalLM(config).double().eval()
    model.lm_head.weight.data[1] *= 4  # texts end after a few words
    mask = (torch.arange(6) >= 6 - (torch.arange(11) % 5 + 2)[:, None]).long()
    batch = {"input_ids": (randint(38, 11, 6) + 2) * mask, "attention_mask": mask}
    how = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**batch, **how)
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        assert torch.equal(engine.map(model.generate, **batch, **how, pad=0), expected)
        texts = engine.map(
            lambda replica, b: replica.generate(**b, **how).tolist(), (batch,)
        )
    assert [[t for t in text if t] for text in texts] == [
        [t for t in text if t] for text in expected.tolist()
    ]
