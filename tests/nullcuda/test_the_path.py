"""What only torch's own CUDA path can show: waits, launches and memory.

Counted by the null runtime, in steps after the first. The bounds hold for any model;
the figures themselves are on the page (README.md).
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from devices.cards.test_accelerator import LOSS
from faults.processes import finish, run, start
from harness.models import Of
from harness.oracle import build, randn
from torch import nn

from nullcuda import card
from scatterpar import Replicated, ScatterOnceParallel

pytestmark = [pytest.mark.nullcuda, pytest.mark.draws]


def needing(count, *values):
    """A case of a test that needs so many cards: ``NULLCUDA_DEVICES=1`` leaves it out."""
    has_few = torch.cuda.device_count() < count
    skip = pytest.mark.skipif(has_few, reason=f"needs {count} cards")
    return pytest.param(*values, marks=skip)


CARDS = [needing(count, count) for count in (1, 2, 4)]
ACCUM = 4
KERNELS = ("launch", "library")
WAITS = ("stream_sync", "device_sync", "event_sync")


def network():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64, 256),
        nn.ReLU(),
        nn.Linear(256, 4),
    )
    return net.cuda(0)


def batch(rows=64, place="pinned"):
    inputs = torch.randn(rows, 3, 8, 8)
    targets = torch.arange(rows) % 4
    if place == "pinned":
        return inputs.pin_memory(), targets.pin_memory()
    return inputs.to(place), targets.to(place)


def settled(engine, rows=64, place="pinned"):
    """The counts of each card in a later step, after an optimizer's step."""
    optimizer = torch.optim.SGD(engine.module.parameters(), 0.1)
    inputs, targets = batch(rows, place)
    devices = range(torch.cuda.device_count())
    for _ in range(3):
        optimizer.zero_grad()
        card.reset()
        engine.forward_backward(inputs, targets, LOSS)
        counts = [card.counts(device) for device in devices]
        optimizer.step()
    return counts


def plain_loop(model):
    """The counts of the same sub-steps on one card, without an engine."""
    inputs, targets = batch()
    for _ in range(2):
        card.reset()
        model.zero_grad()
        for x, y in zip(inputs.chunk(ACCUM), targets.chunk(ACCUM), strict=True):
            x = x.to("cuda:0", non_blocking=True)
            y = y.to("cuda:0", non_blocking=True)
            (LOSS(model(x), y) / ACCUM).backward()
    return card.counts(0)


def total(counts, kinds):
    return sum(counts[kind] for kind in kinds)


@pytest.mark.parametrize("cards", CARDS)
def test_waits_do_not_grow_with_sub_steps(cards):
    """A step waits for each card's losses, and for little else; none in a sub-step."""
    waits = []
    for accum in (ACCUM, 4 * ACCUM):
        with ScatterOnceParallel(network(), accum, list(range(cards))) as engine:
            by_card = settled(engine)
        waits.append({kind: total_of_cards(by_card, kind) for kind in WAITS})
    few, many = waits
    assert few == many
    assert sum(few.values()) <= 3 * cards + 2


def total_of_cards(by_card, kind):
    return sum(counts[kind] for counts in by_card)


@pytest.mark.parametrize("cards", CARDS)
def test_launches_equal_plain_loop(cards):
    plain = plain_loop(network())
    with ScatterOnceParallel(network(), ACCUM, list(range(cards))) as engine:
        by_card = settled(engine, rows=64 * cards)
        crossed = engine.last_step.bytes
    bound = total(plain, KERNELS)
    for counts in by_card[1:cards]:
        assert total(counts, KERNELS) <= 1.05 * bound
    master = by_card[0]
    assert master["library"] == plain["library"]
    extra = total(master, KERNELS) - bound
    parameters = len(list(engine.module.parameters()))
    assert extra <= 12 + parameters + 4 * cards, extra
    devices = range(torch.cuda.device_count())
    between_cards = sum(card.moved(device)["copy_peer"] for device in devices)
    assert between_cards == crossed["replicate"] + crossed["reduce"]


def test_convolution_by_channel_has_values():
    """The CPU has no operator of that name: values were what was in the memory."""
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=4).double()
    rows = torch.randn(3, 4, 9, 9, dtype=torch.float64)
    results = []
    for device in ("cpu", "cuda:0"):
        layer.to(device).zero_grad()
        output = layer(rows.to(device))
        output.square().sum().backward()
        gradients = [p.grad.cpu().clone() for p in layer.parameters()]
        results.append([output.detach().cpu(), *gradients])
    torch.testing.assert_close(*results, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bias", [True, False])
def test_lstm_has_values(bias):
    """Their lack made the card's page fail, as a difference above what is allowed."""
    layer = build(lambda: nn.LSTM(4, 5, 2, batch_first=True, bias=bias))
    results = []
    for device in ("cpu", "cuda:0"):
        twin = deepcopy(layer).to(device)
        rows = randn(3, 7, 4).to(device).requires_grad_()
        output, (_, cells) = twin(rows)
        (output.sin().sum() + cells.cos().sum()).backward()
        of_weights = [weight.grad for weight in twin.parameters()]
        tensors = [output.detach(), rows.grad, *of_weights]
        results.append([tensor.cpu() for tensor in tensors])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "where",
    [needing(2, "cuda:0"), needing(2, "cuda:1"), needing(4, "cuda:3")],
)
def test_batch_being_computed_is_waited_for(where):
    """On a card of a replica, and on one that has none: the sender waits for it.

    The loss of such targets needs no look at them, which would wait for the card.
    """
    model = nn.Linear(8, 4).cuda(0)
    inputs = torch.randn(64, 8)
    targets = torch.randn(64, 4)
    with ScatterOnceParallel(model, 2, [0, 1], verify=False) as engine:
        for _ in range(2):
            doubled = [tensor.to(where) * 2 for tensor in (inputs, targets)]
            loss = engine.forward_backward(*doubled, nn.MSELoss())
        expected = engine.forward_backward(2 * inputs, 2 * targets, nn.MSELoss())
    assert loss == expected


def test_pinned_memory_free_after_inference():
    """What has no rows does not come with them: these are on the card already.

    The first time, the host waits for other reasons.
    """
    model = Of(lambda m, x, scale: m.linear(x) * scale, linear=nn.Linear(8, 4)).cuda(0)
    inputs = torch.randn(64, 8, device="cuda:0")
    scale = torch.randn(4).pin_memory()
    with ScatterOnceParallel(model, 2, [0]) as engine:
        for _ in range(2):
            engine.eval()(inputs, Replicated(scale))
            # A race, if a copy still reads it.
            card.host_writes(scale)


def test_host_waits_before_staging_more():
    """Rows that are not pinned are staged: two micro-batches, however many there are.

    The host, which is faster than a card, waits for the copy of the last but one.
    """
    with ScatterOnceParallel(network(), 8, [0], verify=False) as engine:
        counts = settled(engine, place="cpu")[0]
    assert counts["event_sync"] >= 8 - 2, "more than two micro-batches may be staged"


def test_host_sleeps_until_losses_arrive():
    """A copy to the host waits, too, but awake: that keeps a core from launching."""
    ids = list(range(min(2, torch.cuda.device_count())))
    with ScatterOnceParallel(network(), 2, ids, verify=False) as engine:
        by_card = settled(engine)[: len(ids)]
    assert all(counts["event_sync"] >= 2 for counts in by_card), "the host waits awake"


def test_second_pass_waits_for_each_card():
    """No loss is read after it: an error of a kernel would come after the commit."""
    ids = list(range(min(2, torch.cuda.device_count())))
    model = network()
    inputs, targets = batch()
    with ScatterOnceParallel(model, 1, ids, verify=False) as engine:
        for _ in range(3):
            card.reset()
            engine.forward_backward(inputs, targets, LOSS, whole_batch=True)
        counts = [card.counts(number)["event_sync"] for number in ids]
    # Each card's rows are waited for, too.
    assert min(counts) >= 2, counts


def script(code, **variables):
    """Run ``code`` in a process of its own, whose cards ``variables`` describe.

    It ends without the interpreter's shutdown. Torch's CUDA build may abort there
    ("terminate called without an active exception") right after a backward pass, in
    plain programs, too.
    """
    variables = {"NULLCUDA_DEVICES": "4"} | variables
    program = START + code + END
    outcome = run("-W", "ignore", "-c", program, silence=1800.0, **variables)
    assert outcome.code == 0, outcome.err[-3000:]
    return outcome.out.split()


START = """
import torch
from torch import nn
from nullcuda import card, values
values.install()
"""
END = """
import os, sys
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("layout", [["cpu"], ["cpu:0", "cpu:1"]])
def test_engine_on_the_cpu_leaves_cuda_alone(layout):
    """A forked child can use CUDA only if its parent has not even asked for it."""
    code = f"""
import os
from scatterpar import DataParallelCriterion, DataParallelModel, ScatterOnceParallel
batch = torch.randn(8, 4), torch.randn(8, 2), nn.MSELoss()
net = nn.Linear(4, 2)
with ScatterOnceParallel(net, 2, {layout}) as engine:
    engine.forward_backward(*batch)
    engine.check(*batch)
    engine.eval()(batch[0])
model, criterion = DataParallelModel(net, {layout}), DataParallelCriterion(batch[2])
criterion(model(batch[0]), batch[1]).backward()
child = os.fork()
if not child:
    print(torch.zeros(2, device="cuda").device, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    assert script(code) == ["cuda:0"]


def test_no_context_on_other_gpus():
    """A context costs some hundred megabytes, and shows in every list of processes.

    torch itself enters every visible card at the first copy between two of them.
    """
    code = """
from scatterpar import ScatterOnceParallel
batch = torch.randn(8, 4), torch.randn(8, 2)
pinned = [tensor.pin_memory() for tensor in batch]
with ScatterOnceParallel(nn.Linear(4, 2).to("cuda:1"), 2, [1], graphs=True) as engine:
    for rows in (batch, *[pinned] * 6):
        engine.forward_backward(*rows, nn.MSELoss())
assert engine.last_step.graphs.replayed
print(*[card.has_context(device) for device in range(4)])
"""
    assert script(code) == ["False", "True", "False", "False"]


def test_fewest_sub_steps_that_fit_a_gpu():
    """Under torch's own allocator memory runs out with one sub-step fewer."""
    code = """
from scatterpar import ScatterOnceParallel


def steps(accum):
    model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 8)).to("cuda:0")
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = torch.randn(32768, 64), torch.arange(32768) % 8
    with ScatterOnceParallel(model, accum, [0, 1]) as engine:
        for _ in range(3):
            optimizer.zero_grad()
            loss = engine.forward_backward(inputs, targets, nn.CrossEntropyLoss())
            optimizer.step()
        assert loss.isfinite() and not engine.last_step.retries  # found by the third step
        return len(engine.plan(32768).shares[0].micro_batches)


fewest = steps("auto")
torch.cuda.empty_cache()
print(fewest)
try:
    steps(fewest - 1)
except torch.OutOfMemoryError:
    print("ran out")
"""
    fewest, *words = script(code, NULLCUDA_MEMORY=str(700 << 20))
    assert (int(fewest) > 1, words) == (True, ["ran", "out"])


ROWS_OF_LAYERS = {
    "rows": (nn.BatchNorm1d, (), torch.contiguous_format),
    "texts": (nn.BatchNorm1d, (5,), torch.contiguous_format),
    "images": (nn.BatchNorm2d, (3, 3), torch.contiguous_format),
    "channels last": (nn.BatchNorm2d, (3, 3), torch.channels_last),
}


@pytest.mark.parametrize("affine", [needing(2, True), needing(2, False)])
@pytest.mark.parametrize("kind", ROWS_OF_LAYERS)
def test_synchronised_layers_equal_plain_ones(kind, affine):
    """Torch's kernels for GPUs ask for arguments that the CPU's do not need."""
    make, sizes, layout = ROWS_OF_LAYERS[kind]
    plain = nn.Sequential(make(4, affine=affine), nn.Flatten(1), nn.LazyLinear(2))
    inputs = torch.randn(12, 4, *sizes).to(memory_format=layout)
    targets = torch.randn(12, 2)
    plain(inputs)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(deepcopy(plain)).cuda(0)
    nn.MSELoss()(plain(inputs), targets).backward()
    with ScatterOnceParallel(model, 1, [0, 1], verify=False) as engine:
        engine.forward_backward(inputs, targets, nn.MSELoss())
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), expected.grad)


def test_gpus_without_peer_access():
    """Copies between them go through the host, in torch: same bits, same bytes."""
    code = """
from scatterpar import ScatterOnceParallel
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.SyncBatchNorm(16), nn.Linear(16, 4))
model = model.to("cuda:0")
inputs, targets = torch.randn(32, 8), torch.arange(32) % 4
with ScatterOnceParallel(model, 2, [0, 1, 2]) as engine:
    for _ in range(2):
        loss = engine.forward_backward(inputs, targets, nn.CrossEntropyLoss())
gradients = [parameter.grad.double().sum().item() for parameter in model.parameters()]
print(loss.item(), sum(engine.last_step.bytes.values()), *gradients)
print(sum(card.moved(device)["copy_peer"] for device in range(3)) > 0)
"""
    outcomes = [script(code, NULLCUDA_PEERS=peers) for peers in "01"]
    assert outcomes[0] == outcomes[1]


def test_tensors_of_half_a_memory_are_seen():
    code = """
from scatterpar.devices.memory import is_half_full
for mib in (190, 220):
    _ = torch.empty(mib << 20, dtype=torch.uint8, device="cuda:1")
    del _
    print(is_half_full(torch.device("cuda:1")), is_half_full(torch.device("cuda:0")))
"""
    words = script(code, NULLCUDA_MEMORY=str(400 << 20))
    assert words == ["False", "False", "True", "False"]


def test_gpus_of_unequal_memory():
    """One limit of rows per GPU; with ``accum="auto"`` the smallest GPU decides."""
    code = """
import warnings
from scatterpar import ScatterOnceParallel
warnings.simplefilter("ignore")


def substeps(accum, **options):
    model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 8)).to("cuda:0")
    inputs, targets = torch.randn(16384, 64), torch.arange(16384) % 8
    with ScatterOnceParallel(model, accum, [0, 1], verify=False, **options) as engine:
        for _ in range(2):
            model.zero_grad()
            engine.forward_backward(inputs, targets, nn.CrossEntropyLoss())
        shares = engine.last_step.plan.shares
        return [len(share.micro_batches) for share in shares]


print(*substeps(1, micro_batch_size=[8192, 1024]))
print(*substeps("auto"))
"""
    memories = f"{4 << 30},{150 << 20}"  # bytes
    large, small, *found = map(int, script(code, NULLCUDA_MEMORY=memories))
    assert (large, small) == (1, 8)
    assert found[0] == found[1] > 1


def test_more_devices_than_streams_work():
    """Torch has 32 streams per device: copies to 33 others cannot all have their own."""
    code = """
from scatterpar import ScatterOnceParallel
model = nn.Linear(4, 2, dtype=torch.float64).to("cuda:0")
inputs, targets = torch.randn(2, 68, 4, dtype=torch.float64, device="cuda:0")
targets = targets[:, :2]
with ScatterOnceParallel(model, 2, range(34), verify=False) as engine:
    engine.forward_backward(inputs, targets, nn.MSELoss())
gradient, model.weight.grad = model.weight.grad, None
nn.MSELoss()(model(inputs), targets).backward()
torch.testing.assert_close(gradient, model.weight.grad)
print("exact")
"""
    assert script(code, NULLCUDA_DEVICES="34") == ["exact"]


RANK = """
import os, sys
import torch.distributed as dist
from scatterpar import ScatterOnceParallel
rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("gloo", init_method="file://FILE", rank=rank, world_size=2)
torch.manual_seed(3)
net = nn.Linear(4, 2)
rows, targets = torch.randn(24, 4), torch.randn(24, 2)
nn.MSELoss()(net(rows), targets).backward()
expected = net.weight.grad.clone()
net = net.to("cuda:" + os.environ["MASTER"])
net.zero_grad()
half = slice(12 * rank, 12 * rank + 12)
engine = ScatterOnceParallel(net, 2, process_group=dist.group.WORLD)
engine.forward_backward(rows[half], targets[half], nn.MSELoss())
assert torch.allclose(net.weight.grad.cpu(), expected, atol=1e-6)
names = [f"{d.index}:{torch.cuda.get_device_properties(d).uuid}" for d in engine.device_ids]
print("found", len(names), *names)  # a line of ours: gloo may print others
engine.close()
"""


@pytest.mark.parametrize(
    ("visible", "counts"),
    [(["0,1", "2,3"], [2, 2]), (["1", "3"], [1, 1]), ([None, None], [2, 2])],
)
def test_ranks_take_all_cards_that_they_alone_see(tmp_path, visible, counts):
    """Half of them were idle, or a single one was refused. Nobody has another's."""
    code = RANK.replace("FILE", str(tmp_path / "store"))
    ranks = []
    for rank, cards in enumerate(visible):
        variables = {"NULLCUDA_DEVICES": "4", "LOCAL_WORLD_SIZE": "2"}
        # Both see all cards: the second process has the second half.
        variables |= {"LOCAL_RANK": str(rank), "MASTER": str(0 if cards else 2 * rank)}
        if cards:
            variables["CUDA_VISIBLE_DEVICES"] = cards
        ranks.append(start("-W", "ignore", "-c", START + code + END, **variables))
    outcomes = [finish(rank, 1800.0) for rank in ranks]
    for outcome in outcomes:
        assert outcome.code == 0, outcome.err[-3000:]
    found = []
    for outcome in outcomes:
        (line,) = (line for line in outcome.out.splitlines() if line[:6] == "found ")
        found.append(line.split()[1:])
    assert [int(count) for count, *_ in found] == counts
    cards = [name.split(":")[1] for _, *names in found for name in names]
    assert len(set(cards)) == sum(counts)
