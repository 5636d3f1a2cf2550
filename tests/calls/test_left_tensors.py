"""What a call leaves in its module: tensors with rows are joined, others told."""

import pytest
import torch
from harness.oracle import assert_close, assert_gradients, build, gradients, randn
from torch.nn.utils import prune

from calls.programs import Own, mlp
from scatterpar import ScatterOnceParallel

ROWS = randn(7, 6)


def called(forward, layout=("cpu:0", "cpu:1"), **parts):
    net = build(lambda: Own(forward, net=mlp(), **parts))
    with ScatterOnceParallel(net, device_ids=list(layout), verify=False) as engine:
        engine(ROWS)
    return net


def test_nested_tensors_with_rows_are_joined():
    def forward(self, rows):
        self.kept = {"a": [self.net[0](rows)], "b": 3}
        return self.net(rows)

    net = called(forward)
    assert_close(net.kept["a"][0].detach(), net.net[0](ROWS).detach(), "kept")
    assert net.kept["b"] == 3


def test_number_with_a_graph_is_told():
    def forward(self, rows):
        self.balance = self.net(rows).mean()
        return self.net(rows)

    with pytest.warns(UserWarning, match="'balance'.*first replica only"):
        called(forward)


def _pruned(layer):
    return prune.l1_unstructured(layer, "weight", amount=0.2)


# With four rows each of two replicas has as many as the weight has.
@pytest.mark.filterwarnings("error:forward, or a hook, leaves a tensor")
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("rows", [4, 7])
@pytest.mark.parametrize(
    "computed", [torch.nn.utils.spectral_norm, torch.nn.utils.weight_norm, _pruned]
)
def test_weights_computed_by_hooks_are_no_rows(computed, rows):
    net, plain = [build(lambda: computed(torch.nn.Linear(6, 2))) for _ in range(2)]
    for module, layout in ((net, ["cpu:0", "cpu:1"]), (plain, ["cpu"])):
        with ScatterOnceParallel(module, device_ids=layout, verify=False) as engine:
            for _ in range(2):
                output = engine(ROWS[:rows])
                # Such as a penalty on the weight that was used.
                (output.square().mean() + module.weight.square().sum()).backward()
    assert_gradients(net, gradients(plain))
    assert_close(net.weight.detach(), plain.weight.detach(), "weight")


def test_plain_values_are_those_of_the_first_replica():
    def forward(self, rows):
        self.calls += 1
        self.sizes.append(len(rows))
        return self.net(rows)

    net = called(forward, calls=0, sizes=[])
    assert (net.calls, net.sizes) == (1, [4])


def test_created_module_is_refused_and_gone():
    def forward(self, rows):
        if not hasattr(self, "head"):
            self.head = build(lambda: torch.nn.Linear(3, 3))
        return self.head(self.net(rows))

    net = build(lambda: Own(forward, net=mlp()))
    with ScatterOnceParallel(net, device_ids=["cpu"] * 2, verify=False) as engine:
        with pytest.raises(ValueError, match=r"creates the parameter 'head\.weight'"):
            engine(ROWS)
        assert not hasattr(net, "head")
        net(ROWS)
        engine(ROWS)


def test_buffers_are_those_of_the_first_replica():
    """Also where they have as many entries as there are rows."""

    def forward(self, rows):
        self.flags = ~self.flags
        self.last = rows.clone()
        return self.net(rows)

    flags = torch.tensor([True, False, True, False])
    net = build(lambda: Own(forward, net=mlp()))
    net.register_buffer("flags", flags)
    net.register_buffer("last", None)
    with ScatterOnceParallel(net, device_ids=["cpu:0", "cpu:1"]) as engine:
        engine(ROWS[:6])
        assert torch.equal(net.last, ROWS[:3])
        engine(ROWS)
    assert torch.equal(net.flags, flags)
    assert torch.equal(net.last, ROWS[:4])


def test_buffer_with_a_graph_is_joined():
    def forward(self, rows):
        self.hidden = self.net[0](rows)
        return self.net(rows)

    net = build(lambda: Own(forward, net=mlp()))
    net.register_buffer("hidden", None)
    with ScatterOnceParallel(net, device_ids=["cpu:0", "cpu:1"]) as engine:
        engine(ROWS)
    assert net.hidden.requires_grad
    assert_close(net.hidden.detach(), net.net[0](ROWS).detach(), "hidden")


def into_dict(kept):
    return lambda module, inputs, output: kept.__setitem__("a", output.detach())


def into_list(kept):
    return lambda module, inputs, output: kept.append(output.detach())


def with_shift(shift):
    """What it adds is trained, and no parameter of the module."""
    return lambda module, inputs, output: output + shift


@pytest.mark.filterwarnings("ignore:hooks inside of the module")
@pytest.mark.parametrize("micro_batch_size", [None, 1])
@pytest.mark.parametrize("layout", [["cpu"] * 2, ["cpu:0", "cpu:1", "cpu:0"]])
def test_hooks_in_evaluation_keep_all_rows(layout, micro_batch_size):
    """They got the rows of one replica, or of each in the order of arrival."""
    net = build(mlp).eval()
    first, several = {}, []
    expected = net[:2](ROWS).detach()
    net[1].register_forward_hook(into_dict(first))
    net[1].register_forward_hook(into_list(several))
    engine = ScatterOnceParallel(
        net, device_ids=layout, micro_batch_size=micro_batch_size
    )
    with engine, torch.no_grad():
        engine(ROWS)
        engine(ROWS[:5])
    assert_close(first["a"], expected[:5], "of the last call")
    assert_close(torch.cat(several), torch.cat([expected, expected[:5]]), "of both")


@pytest.mark.parametrize("register", ["full_backward_hook", "full_backward_pre_hook"])
def test_backward_hooks_leave_micro_batches(register):
    """No backward pass comes: memory for all rows at once was needed for nothing."""
    sizes = []

    class Seen(torch.nn.Linear):
        def forward(self, x):
            sizes.append(len(x))
            return super().forward(x)

    net = build(lambda: Seen(4, 2)).eval()
    getattr(net, f"register_{register}")(lambda *_: None)
    engine = ScatterOnceParallel(net, device_ids=["cpu"] * 2, micro_batch_size=2)
    with engine, torch.no_grad():
        engine(torch.ones(8, 4, dtype=ROWS.dtype))
    assert max(sizes[-4:]) == 2


@pytest.mark.filterwarnings("ignore:hooks inside of the module")
@pytest.mark.parametrize("layout", [["cpu"] * 2, ["cpu:0", "cpu:1", "cpu:0"]])
def test_frozen_module_in_evaluation_trains_a_hook(layout):
    """Steering vectors: no parameter of the module required grad."""
    shifts = []
    for is_engine in (True, False):
        net = build(mlp).eval().requires_grad_(False)
        shift = torch.nn.Parameter(torch.zeros(8, dtype=ROWS.dtype))
        net[0].register_forward_hook(with_shift(shift))
        call = ScatterOnceParallel(net, device_ids=layout) if is_engine else net
        call(ROWS).square().sum().backward()
        shifts.append(shift.grad)
    assert_close(*shifts, "gradient")
