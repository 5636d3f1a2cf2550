"""What ``nn.DataParallel``'s own tests ask: one line exchanged."""

import pytest
import torch
from calls.programs import Own, mlp
from harness.oracle import assert_close, build, randn
from torch import nn

from scatterpar import ScatterOnceParallel

LAYOUTS = [["cpu"], ["cpu"] * 2, ["cpu:0", "cpu:1", "cpu:0"]]
ROWS = randn(10, 6)


@pytest.fixture(params=LAYOUTS, ids="+".join)
def layout(request):
    return request.param


def parallel(module, layout):
    return ScatterOnceParallel(module, device_ids=layout, verify=False)


def of(forward):
    return build(lambda: Own(forward, net=mlp()))


@pytest.mark.parametrize("rows", [1, 2, 10])
def test_few_rows_use_few_replicas(layout, rows):
    net = of(lambda self, x: self.net(x))
    with parallel(net, layout) as engine:
        output = engine(ROWS[:rows])
        assert_close(output.detach(), net(ROWS[:rows]).detach(), "output")
        assert len(engine.last_step.plan.shares) == min(rows, len(layout))


def test_module_without_inputs_runs_as_it_is(layout):
    net = of(lambda self: self.net(ROWS))
    with parallel(net, layout) as engine:
        if len(layout) == 1:
            output = engine()
        else:
            with pytest.warns(UserWarning, match="on the first device alone"):
                output = engine()
        assert_close(output.detach(), net().detach(), "output")


def test_nested_inputs_and_outputs(layout):
    def forward(self, pair, extra=None):
        first, second = pair
        output = self.net(first + second["b"][0])
        return output, {"both": [output + extra, None], "name": "a"}

    net = of(forward)
    pair = (ROWS, {"b": [ROWS.sin()]})
    with parallel(net, layout) as engine:
        found = engine(pair, extra=ROWS[:, :3])
    expected = net(pair, extra=ROWS[:, :3])
    assert_close(found[0].detach(), expected[0].detach(), "first")
    both = found[1]["both"], expected[1]["both"]
    assert_close(both[0][0].detach(), both[1][0].detach(), "both")
    assert (both[0][1], found[1]["name"]) == (None, "a")


def test_inputs_that_require_grad_get_theirs(layout):
    net = of(lambda self, x: self.net(x))
    rows, twin = ROWS.clone().requires_grad_(), ROWS.clone().requires_grad_()
    with parallel(net, layout) as engine:
        engine(rows).square().sum().backward()
    net(twin).square().sum().backward()
    assert_close(rows.grad, twin.grad, "gradient of the inputs")


def test_buffers_are_those_of_the_first_replica(layout):
    def forward(self, x):
        self.seen.add_(len(x))
        return self.net(x)

    net = of(forward)
    net.register_buffer("seen", torch.zeros(()))
    with parallel(net, layout) as engine:
        engine(ROWS)
        first = engine.last_step.plan.shares[0].rows
        engine(ROWS)
    assert net.seen == 2 * first


def test_module_hooks_of_the_whole_run_on_each_replica(layout):
    net = of(lambda self, x: self.net(x))
    net.register_forward_hook(lambda module, args, output: 2 * output)
    with parallel(net, layout) as engine:
        assert_close(engine(ROWS).detach(), net(ROWS).detach(), "output")


def test_another_dimension_and_unequal_shares():
    net = of(lambda self, x: self.net(x.T).T)
    options = {"dim": 1, "shares": [3, 1], "verify": False}
    with ScatterOnceParallel(net, device_ids=["cpu:0", "cpu:1"], **options) as engine:
        output = engine(ROWS.T)
        assert [share.rows for share in engine.last_step.plan.shares] == [8, 2]
    assert_close(output.detach(), net(ROWS.T).detach(), "output")


def test_pooled_statistics_are_refused():
    net = build(lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))
    with ScatterOnceParallel(net, device_ids=["cpu"] * 2, buffers="batch") as engine:
        with pytest.raises(ValueError, match=r"do not work with engine\(x\)"):
            engine(ROWS)
        with torch.no_grad():
            engine(ROWS)


def test_synchronised_statistics_are_refused():
    net = build(lambda: nn.Sequential(nn.Linear(6, 3), nn.SyncBatchNorm(3)))
    with parallel(net, ["cpu"] * 2) as engine:
        with pytest.raises(ValueError, match=r"SyncBatchNorm.*a call"):
            engine(ROWS)
        assert torch.isfinite(engine.eval()(ROWS)).all()


def test_call_inside_of_a_call_is_refused():
    net = of(lambda self, x: self.net(x) if self.engine is None else self.engine(x))
    vars(net)["engine"] = None
    with parallel(net, ["cpu"] * 2) as engine:
        vars(net)["engine"] = engine
        with pytest.raises(RuntimeError, match="in the middle of a step"):
            engine(ROWS)
        vars(net)["engine"] = None
        engine(ROWS)


def test_dtype_of_autocast_reaches_all_replicas(layout):
    net = of(lambda self, x: self.net(x)).float()
    with parallel(net, layout) as engine, torch.autocast("cpu", torch.bfloat16):
        assert engine(ROWS.float()).dtype == torch.bfloat16
