"""Step functions that write their own modules, which two loops' tests compare with the
stock loop's with gradient accumulation.

``prepare`` is called before the training, ``step`` once per micro-batch with the
owner, such as a Trainer, its network, and the rows. ``read`` returns what is compared
beside the network's ``state_dict``.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from numpy.random import default_rng
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized, register_parametrization
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

IN, HIDDEN, OUT = 5, 7, 3


class Net(nn.Module):
    """A network with state of all kinds."""

    def __init__(self, norm=None):
        super().__init__()
        norm = nn.Identity() if norm is None else norm
        self.body = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh(), norm)
        self.head = nn.Linear(HIDDEN, OUT)
        self.spare = nn.Identity()
        self.register_buffer("centre", torch.zeros(OUT))
        self.register_buffer("bank", torch.zeros(5, OUT))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.calls = 0
        self.losses = []
        self.double()

    def forward(self, x, labels=None):
        return self.head(self.body(x))


class Recomputed(Net):
    """Its body runs again in the backward pass."""

    reentrant = False
    scale = 1.0

    def hidden(self, x):
        return checkpoint(self.body, x, use_reentrant=self.reentrant)

    def forward(self, x, labels=None):
        return self.head(self.hidden(x.requires_grad_(self.reentrant)))


class Reentrant(Recomputed):
    reentrant = True


class Scaled(nn.Module):
    """Reads an attribute that step functions set."""

    scale = 1.0

    def forward(self, x):
        return (x * self.scale).sin() * x


class RecomputedScale(Recomputed):
    def __init__(self):
        super().__init__(Scaled())


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.number = 0

    def forward(self, x):
        self.calls += 1
        self.number += 1
        return x


class RecomputedCounts(Recomputed):
    """Stock: the recomputation counts, too."""

    def __init__(self):
        super().__init__(Counts())


class Recurrent(Net):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(IN, IN, batch_first=True).double()

    def forward(self, x, labels=None):
        outputs, _ = self.lstm(x[:, None])
        return super().forward(outputs[:, 0])


class Program(NamedTuple):
    step: Callable[..., Any]
    net: Callable[[], Net] = Net
    prepare: Callable[[Any, Any], Any] = lambda owner, net: None
    read: Callable[[Any, Any], list[Any]] = lambda owner, net: []


PROGRAMS: dict[str, Program] = {}


def program(name, **options):
    def add(step):
        PROGRAMS[name] = Program(step, **options)
        return step

    return add


def loss_of(scores, labels):
    return functional.cross_entropy(scores, labels)


def attributes(**makers):
    """Prepares attributes of the owner, each made from the network."""

    def prepare(owner, net):
        owner.calls = 0
        for name, make in makers.items():
            setattr(owner, name, make(net))

    return prepare


def number_of(owner):
    """The number of the call, from 1."""
    owner.calls += 1
    return owner.calls


# --- buffers ---


@program("a centre in place")
def _(owner, net, x, y):
    scores = net(x)
    loss = loss_of(scores - net.centre, y)
    with torch.no_grad():
        net.centre.mul_(0.9).add_(0.1 * scores.mean(0))
    return loss


@program("a new centre")
def _(owner, net, x, y):
    scores = net(x)
    loss = loss_of(scores * (1 + net.centre), y)
    net.centre = 0.9 * net.centre + 0.1 * scores.mean(0).detach()
    return loss


@program("a factor that the backward pass needs")
def _(owner, net, x, y):
    scores = net(x)
    loss = loss_of(scores * (1 + net.centre.clone()), y)
    net.centre.data.add_(0.1 * scores.mean(0).detach())  # no version counts it
    return loss


@program("a bank with a place")
def _(owner, net, x, y):
    scores = net(x)
    loss = loss_of(scores, y) + 0.1 * (scores @ net.bank.clone().T).logsumexp(1).mean()
    with torch.no_grad():
        net.bank[int(net.place) % 5] = scores[0]
        net.place.add_(1)
    return loss


@program(
    "averages of a weight",
    prepare=lambda o, net: net.register_buffer(
        "slow", torch.zeros(OUT, HIDDEN).double()
    ),
)
def _(owner, net, x, y):
    loss = loss_of(net(x), y) + (net.head.weight - net.slow).pow(2).sum()
    with torch.no_grad():
        net.slow.lerp_(net.head.weight, 0.1)
    return loss


class Across(nn.Module):
    """Normalises each row, and keeps running statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)

    def forward(self, x):
        return self.norm(x[:, None])[:, 0]


NORMS = {"batch": partial(nn.BatchNorm1d, HIDDEN), "instance": Across}
for name, norm in NORMS.items():

    @program(f"{name} normalisation", net=lambda norm=norm: Net(norm()))
    def _(owner, net, x, y):
        return loss_of(net.head(net.body(x)), y)


@program(
    "spectral normalisation",
    prepare=lambda o, net: nn.utils.parametrizations.spectral_norm(net.head),
)
def _(owner, net, x, y):
    return loss_of(net(x), y)


# --- modules and what they hold ---


@program("an activation in a container", prepare=attributes())
def _(owner, net, x, y):
    if number_of(owner) == 6:
        net.body[1] = nn.ReLU()
    return loss_of(net(x), y)


@program("a module on first use", prepare=attributes())
def _(owner, net, x, y):
    if not hasattr(net, "act"):
        net.act = nn.Softplus()
    return loss_of(net.act(net(x)), y)


@program("a teacher on first use", prepare=attributes(teachers=lambda net: []))
def _(owner, net, x, y):
    if not owner.teachers:
        owner.teachers.append(copy.deepcopy(net).requires_grad_(False))
    scores = net(x)
    return loss_of(scores, y) + (scores - owner.teachers[0](x)).pow(2).mean()


@program(
    "attributes of parts",
    read=lambda o, net: [net.calls, net.head.last, net.losses, net.mean.tolist()],
)
def _(owner, net, x, y):
    scores = net(x)
    loss = loss_of(scores, y) * (1 + 0.01 * len(net.losses) + 0.01 * net.calls)
    if hasattr(net, "mean"):
        loss = loss + (scores.mean() - net.mean).pow(2) * 0.0
    net.calls += 1
    net.head.last = float(loss.detach())
    net.losses.append(net.head.last)
    net.mean = scores.mean().detach()
    return loss


@program("a list that is made again", read=lambda o, net: [net.losses])
def _(owner, net, x, y):
    loss = loss_of(net(x), y) * (1 + 0.01 * len(net.losses))
    net.losses = [*net.losses, float(loss.detach())]
    return loss


@program("forward replaced", prepare=attributes())
def _(owner, net, x, y):
    if number_of(owner) == 2:
        forward = net.head.forward
        net.head.forward = lambda hidden: forward(hidden) * 2
    return loss_of(net(x), y)


@program(
    "parts swapped",
    prepare=lambda o, net: net.add_module("other", nn.Linear(HIDDEN, OUT).double()),
)
def _(owner, net, x, y):
    net.head, net.other = net.other, net.head
    return loss_of(net(x), y)


@program(
    "a layer in evaluation",
    net=lambda: Net(nn.BatchNorm1d(HIDDEN)),
    prepare=attributes(),
    read=lambda o, net: [net.body[2].training],
)
def _(owner, net, x, y):
    if number_of(owner) >= 5:
        net.body[2].eval()
    return loss_of(net(x), y)


@program(
    "a layer in evaluation for a part of a step",
    net=lambda: Net(nn.BatchNorm1d(HIDDEN)),
    prepare=attributes(),
    read=lambda o, net: [net.body[2].training],
)
def _(owner, net, x, y):
    """The stock Trainer calls ``train()`` before each micro-batch."""
    if number_of(owner) % 4 == 2:
        net.body[2].eval()
    return loss_of(net(x), y)


# --- functions in backward passes ---


@program(
    "a hook on a tensor that reads a number",
    prepare=attributes(norms=lambda net: []),
    read=lambda o, net: [o.norms],
)
def _(owner, net, x, y):
    """The next call writes the number."""
    scores = net(x)
    number_of(owner)
    scores.register_hook(lambda gradient: owner.norms.append(float(gradient.norm())))
    scores.register_hook(lambda gradient: gradient * (1 + 0.1 * owner.calls))
    return loss_of(scores, y)


def scale_gradients(owner, module, gradients, _):
    return (gradients[0] * (1 + 0.1 * owner.calls),)


@program(
    "a backward hook that reads a number",
    prepare=lambda o, net: (
        attributes()(o, net),
        net.head.register_full_backward_hook(partial(scale_gradients, o)),
    ),
)
def _(owner, net, x, y):
    number_of(owner)
    return loss_of(net(x), y)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, net):
        ctx.net = net
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -0.1 * ctx.net.calls * gradient, None


@program("a reversal that reads a number", read=lambda o, net: [net.calls])
def _(owner, net, x, y):
    net.calls += 1
    return loss_of(net(x), y) + loss_of(Reversed.apply(net(2 * x), net), y)


def keep(kept, module, args, output):
    kept["output"] = output


@program(
    "a hook that fills a dict",
    prepare=lambda o, net: (
        attributes(kept=lambda net: {})(o, net),
        net.body[0].register_forward_hook(partial(keep, o.kept)),
    ),
)
def _(owner, net, x, y):
    scores = net(x)
    return loss_of(scores, y) + 0.1 * owner.kept["output"].pow(2).mean()


@program(
    "a hook on first use",
    prepare=attributes(seen=lambda net: []),
    read=lambda o, net: [len(o.seen)],
)
def _(owner, net, x, y):
    if number_of(owner) == 1:
        net.body[0].register_forward_hook(
            lambda module, args, output: (owner.seen.append(1), output * 1.5)[1]
        )
    return loss_of(net(x), y)


@program("recurrent", net=Recurrent)
def _(owner, net, x, y):
    return loss_of(net(x), y)


# --- identities ---


@program(
    "parts and parameters as keys",
    prepare=attributes(
        of_parts=lambda net: {net.head: 0.3},
        of_parameters=lambda net: dict.fromkeys(net.body.parameters(), 0.2),
        of_ids=lambda net: {id(net.head.weight): 0.1, id(net.head): 0.2},
        decayed=lambda net: {*net.head.parameters()},
    ),
)
def _(owner, net, x, y):
    loss = loss_of(net(x), y)
    for module in net.modules():
        rate = owner.of_parts.get(module, 0.0) + owner.of_ids.get(id(module), 0.0)
        loss = loss + sum(rate * p.pow(2).sum() for p in module.parameters())
    for parameter in net.parameters():
        rate = owner.of_parameters.get(parameter, 0.0)
        rate += owner.of_ids.get(id(parameter), 0.0)
        rate += 0.05 * (parameter in owner.decayed)
        loss = loss + rate * parameter.pow(2).sum()
    for parameter, rate in owner.of_parameters.items():
        loss = loss + rate * parameter.sum()
    return loss


# --- requires_grad ---


@program(
    "frozen in the fifth call",
    prepare=attributes(),
    read=lambda o, net: [net.head.weight.requires_grad],
)
def _(owner, net, x, y):
    if number_of(owner) == 5:
        net.head.requires_grad_(False)
    return loss_of(net(x), y)


@program(
    "frozen in the sixth call",
    prepare=attributes(),
    read=lambda o, net: [net.head.weight.requires_grad],
)
def _(owner, net, x, y):
    if number_of(owner) == 6:
        net.head.requires_grad_(False)
    return loss_of(net(x), y)


@program(
    "trained from the seventh call on",
    prepare=lambda o, net: (attributes()(o, net), net.head.requires_grad_(False)),
    read=lambda o, net: [net.head.weight.requires_grad],
)
def _(owner, net, x, y):
    if number_of(owner) == 7:
        net.head.requires_grad_(True)
    return loss_of(net(x), y)


@program(
    "frozen in every other step",
    prepare=attributes(),
    read=lambda o, net: [net.head.weight.requires_grad],
)
def _(owner, net, x, y):
    step = (number_of(owner) - 1) // 4
    net.head.requires_grad_(step % 2 == 1)
    return loss_of(net(x), y)


@program("frozen for a part of a call")
def _(owner, net, x, y):
    net.head.requires_grad_(False)
    loss = loss_of(net(x), y)
    net.head.requires_grad_(True)
    return loss + 0.5 * loss_of(net(2 * x), y)


# --- frozen parameters that calls write ---


class Taught(Net):
    """A frozen teacher, whose parameters calls write."""

    def __init__(self):
        super().__init__()
        teacher = nn.Sequential(
            nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUT)
        )
        self.keep(teacher.double().requires_grad_(False))

    def keep(self, teacher):
        self.teacher = teacher

    def pairs(self):
        """The parameters of the teacher, and those that it averages."""
        averaged = [*self.body.parameters(), *self.head.parameters()]
        return [*zip(self.taught().parameters(), averaged, strict=True)]

    def taught(self):
        return self.teacher


class TaughtInList(Taught):
    """The teacher is no submodule."""

    def keep(self, teacher):
        self.teachers = [teacher]

    def taught(self):
        return self.teachers[0]


class TaughtTied(Taught):
    """The teacher's first layer is the student's."""

    def keep(self, teacher):
        teacher[0] = self.body[0]
        super().keep(teacher)

    def pairs(self):
        return super().pairs()[2:]


class TaughtInOneMemory(Taught):
    """The teacher's parameters are views of one tensor."""

    def keep(self, teacher):
        flat = nn.utils.parameters_to_vector(teacher.parameters()).detach()
        nn.utils.vector_to_parameters(flat, teacher.parameters())
        super().keep(teacher)


class Averaged(Net):
    """torch's own average of the head."""

    def __init__(self):
        super().__init__()
        averaging = get_ema_multi_avg_fn(0.9)
        self.average = AveragedModel(self.head, multi_avg_fn=averaging)
        self.average.requires_grad_(False)


@torch.no_grad()
def average_in_place(net):
    for mean, value in net.pairs():
        mean.mul_(0.9).add_(value, alpha=0.1)


def average_data(net):
    for mean, value in net.pairs():
        mean.data.mul_(0.9).add_(value.data, alpha=0.1)


def average_new_data(net):
    for mean, value in net.pairs():
        mean.data = 0.9 * mean.data + 0.1 * value.data


@torch.no_grad()
def average_copied(net):
    for mean, value in net.pairs():
        mean.copy_(0.9 * mean + 0.1 * value)


@torch.no_grad()
def average_together(net):
    means, values = zip(*net.pairs(), strict=True)
    torch._foreach_lerp_(means, [value.detach() for value in values], 0.1)


def taught_by(owner, net, x, y):
    """A loss that compares the outputs with those of the teacher."""
    scores = net(x)
    with torch.no_grad():
        goal = net.taught()(x)
    return loss_of(scores, y) + functional.mse_loss(scores, goal)


def through_teacher(owner, net, x, y):
    """A loss whose gradient passes through the teacher."""
    hidden = net.taught()[0](x * net(x).sum(1, keepdim=True))
    return loss_of(net(x), y) + loss_of(net.taught()[1:](hidden), y)


def values_of_teacher(owner, net):
    return [parameter.tolist() for parameter in net.taught().parameters()]


def teach(name, average, *, net=Taught, loss=taught_by, calls=None, freezes=None):
    """A program whose calls average the teacher.

    ``calls`` says in which, by their numbers; ``freezes`` is the call that freezes a
    teacher, which is trained until then.
    """

    def prepare(owner, net):
        owner.calls = 0
        net.taught().requires_grad_(freezes is not None)

    def step(owner, net, x, y):
        call = number_of(owner)
        if call == freezes:
            net.taught().requires_grad_(False)
        if calls is None or calls(call):
            average(net)
        return loss(owner, net, x, y)

    program(name, net=net, prepare=prepare, read=values_of_teacher)(step)


teach("a teacher in place", average_in_place)
teach("a teacher through .data", average_data)
teach("a teacher with new .data", average_new_data)
teach("a teacher copied", average_copied)
teach("a teacher in one kernel", average_together)
teach("a teacher in a list", average_in_place, net=TaughtInList)
teach("a teacher in a list through .data", average_data, net=TaughtInList)
teach("a teacher in one memory", average_in_place, net=TaughtInOneMemory)
teach("a teacher in the gradient's path", average_in_place, loss=through_teacher)
teach("a teacher from the sixth call on", average_in_place, calls=lambda n: n >= 6)
teach("a teacher's .data from the eighth call", average_data, calls=lambda n: n >= 8)
teach("a teacher in every third call", average_in_place, calls=lambda n: not n % 3)
teach(
    "a teacher frozen in the second step",
    average_in_place,
    calls=lambda n: n >= 5,
    loss=lambda *call: taught_by(*call) + loss_of(call[1].taught()(call[2]), call[3]),
    freezes=5,
)


@program(
    "a teacher tied to the student",
    net=TaughtTied,
    prepare=lambda o, net: net.teacher[2].requires_grad_(False),
    read=values_of_teacher,
)
def _(owner, net, x, y):
    net.body.requires_grad_(True)
    average_in_place(net)
    return taught_by(owner, net, x, y)


@program(
    "an averaged model",
    net=Averaged,
    read=lambda o, net: [int(net.average.n_averaged)],
)
def _(owner, net, x, y):
    net.average.update_parameters(net.head)
    hidden = net.body(x)
    with torch.no_grad():
        goal = net.average(hidden)
    return loss_of(net(x), y) + functional.mse_loss(net.head(hidden), goal)


# --- what a look puts back ---


class Bounded(nn.Module):
    def forward(self, weight):
        return weight.tanh()


@program("a parametrization on first use")
def _(owner, net, x, y):
    if not is_parametrized(net.head):
        register_parametrization(net.head, "weight", Bounded())
    return loss_of(net(x), y)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@program("another class from the first call on")
def _(owner, net, x, y):
    net.head.__class__ = Doubled
    return loss_of(net(x), y)


class DoubledTwice(Doubled):
    scale = 2.0

    def forward(self, x):
        return self.scale * super().forward(x)


@program("another class in each call", read=lambda o, net: [type(net.head).__name__])
def _(owner, net, x, y):
    is_twice = type(net.head) is DoubledTwice
    net.head.__class__ = nn.Linear if is_twice else DoubledTwice
    return loss_of(net(x), y)


# --- random numbers of the owner's own ---


def drawing(make):
    return attributes(generator=lambda net: make())


@program(
    "noise of torch's generator",
    prepare=drawing(lambda: torch.Generator().manual_seed(1)),
)
def _(owner, net, x, y):
    noise = torch.randn(x.shape, generator=owner.generator, dtype=x.dtype)
    return loss_of(net(x + noise.to(x.device)), y)


@program("noise of NumPy's generator", prepare=drawing(lambda: default_rng(1)))
def _(owner, net, x, y):
    noise = torch.from_numpy(owner.generator.standard_normal(tuple(x.shape)))
    return loss_of(net(x + noise.to(x)), y)


@program("layers by Python's generator", prepare=drawing(lambda: random.Random(1)))
def _(owner, net, x, y):
    kept = [owner.generator.random() < 0.7 for _ in x]
    return loss_of(net(x) * torch.tensor(kept, device=x.device)[:, None], y)


# --- calls in backward passes ---


@program("a checkpoint", net=Recomputed)
def _(owner, net, x, y):
    return loss_of(net(x), y)


@program("a reentrant checkpoint", net=Reentrant)
def _(owner, net, x, y):
    return loss_of(net(x), y)


@program("an activation under a checkpoint", net=Recomputed, prepare=attributes())
def _(owner, net, x, y):
    if number_of(owner) == 6:
        net.body[1] = nn.SiLU()
    return loss_of(net(x), y)


@program("an attribute under a checkpoint", net=RecomputedScale, prepare=attributes())
def _(owner, net, x, y):
    net.body[2].scale = 1 + 0.1 * number_of(owner)
    return loss_of(net(x), y)


@program(
    "counts under a checkpoint",
    net=RecomputedCounts,
    read=lambda o, net: [net.body[2].number],
)
def _(owner, net, x, y):
    return loss_of(net(x), y)


@program(
    "batch normalisation under a checkpoint",
    net=lambda: Recomputed(nn.BatchNorm1d(HIDDEN)),
)
def _(owner, net, x, y):
    return loss_of(net(x), y)


def assert_same_net(net, expected, values, expected_values):
    """Assert that two trainings have left the same."""
    assert plain(values) == plain(expected_values)
    state, expected_state = net.state_dict(), expected.state_dict()
    assert list(state) == list(expected_state)
    for name, value in expected_state.items():
        torch.testing.assert_close(
            state[name], value, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: n + text
        )


def plain(value):
    """Values with rounded numbers."""
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return round(value, 9) if isinstance(value, float) else value


# A call of replicas does these otherwise than one device, and warns of them.
TOLD = ("normalisation", "hook", "State in modules")


def told_of(recorded):
    """Whether a warning names what is otherwise on several devices."""
    texts = [str(warning.message) for warning in recorded]
    return any(words in text for text in texts for words in TOLD)
