"""The same programs with the engine and with the pair: a table of two answers.

``EXACT``: losses and gradients as in plain torch. ``REFUSED``: an error, and
parameters, gradients and buffers as before. ``TOLD``: a warning by name. Each row is
run in one memory and in two. What is refused or told names its remedies: rows that
follow the words, and are exact.
"""

from __future__ import annotations

import functools
import re
import types
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from harness.oracle import assert_gradients, build, gradients, randint, randn, seeded
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scatterpar import (
    DataParallelCriterion,
    DataParallelModel,
    Rows,
    ScatterOnceParallel,
    count_labels,
    gather,
)

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread_an_operation")]
EXACT, REFUSED, TOLD = "exact", "refused", "told"
STEPS = 2
INPUTS, TARGETS, LABELS = randn(13, 6), randn(13, 3, seed=1), randint(3, 13)
TOKENS, FOLLOWING = randint(9, 13, 4), randint(9, 13, 4, seed=1)


@dataclass
class Program:
    """A model, its criterion, and what the engine and the pair answer.

    Attributes:
        words: in the errors and warnings.
        remedies: the rows that do what these words say.
        inputs: of each step; a function makes them for each way.
        prepare: makes the criterion of a model; it may register hooks.
        after: is called with the model, the inputs and the output of the whole batch,
            after each update.
        options: of ``forward_backward``, and of the pair's criterion.
        accum: of the engine.
    """

    make: Any
    engine: str = EXACT
    pair: str = EXACT
    words: str = ""
    remedies: tuple[str, ...] = ()
    inputs: Any = INPUTS
    targets: Any = TARGETS
    prepare: Any = lambda model: nn.MSELoss()
    after: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    accum: int = 2


def net(*last):
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), *last)


class Net(nn.Module):
    """``forward`` is a function of the module and its inputs."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.net, self.function = net(), forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def of(forward, **parts):
    """A class whose objects are ``Net``s: a new part each time."""
    return lambda: Net(forward, **{name: make() for name, make in parts.items()})


def zeros():
    return torch.zeros(3, dtype=INPUTS.dtype)


# ---- forward passes ----


def makes_heads(module, rows):
    hidden = module.body(rows)
    if "a" not in module.heads:
        module.heads["a"] = nn.Linear(8, 3).to(hidden)
    return module.heads["a"](hidden)


def appends_heads(module, rows):
    if not len(module.heads):
        module.heads.append(nn.Linear(6, 3).to(rows))
    return sum(head(rows) for head in module.heads)


def makes_a_parameter(module, rows):
    if not hasattr(module, "scale"):
        module.scale = nn.Parameter(torch.ones(3).to(rows))
    return module.net(rows) * module.scale


def writes_through_data(module, rows):
    module.net[0].weight.data.mul_(0.9)
    return module.net(rows)


def trains_aside(module, rows):
    hidden = module.net[0](rows)
    module.aside(hidden.detach()).square().mean().backward()
    return module.net(rows)


def trains_itself(module, rows):
    module.net(rows).square().mean().backward()
    return module.net(rows)


def caches_gradients(module, rows):
    leaf = rows.detach().requires_grad_()
    (leaf**2).sum().backward()
    return module.net(rows + leaf.grad)


def counts(module, rows):
    module.calls += 1
    return module.net(rows) * (1 + 0.1 * module.calls)


def switches(module, rows):
    factor = 1.0 if module.is_warm else 0.5
    module.is_warm = True
    return module.net(rows) * factor


def centres(module, rows):
    """The centre is there from the first pass on."""
    if module.centre is None:
        module.centre = rows.mean(0)
    module.centre = 0.9 * module.centre + 0.1 * rows.mean(0)
    return module.net(rows) + module.centre[:3]


def fills_a_table(module, rows):
    module.table.setdefault("scale", 1.0)
    module.table["scale"] *= 0.9
    return module.net(rows) * module.table["scale"]


def carries_a_state(module, rows, state):
    output = module.net(rows) + state
    state.copy_(output.detach())
    return output


def sets_an_attribute(module, rows):
    """To other memory, by ``set_``; assignments have rows of their own."""
    output = module.net(rows) + module.memory
    with torch.no_grad():
        module.memory.set_(0.5 * module.memory + output.mean(0))
    return output


def sets_an_entry(module, rows):
    output = module.net(rows) + module.memory[0].clone()
    with torch.no_grad():
        module.memory[0].set_(0.5 * module.memory[0] + output.mean(0))
    return output


def sets_its_input(module, rows, state):
    output = module.net(rows) + state.clone()
    state.set_(output.detach())
    return output


def sets_a_parameter(module, rows):
    weight = module.net[0].weight
    with torch.no_grad():
        weight.set_(0.9 * weight)
    return module.net(rows)


def keeps_a_mask(module, rows):
    if module.mask is None:
        module.mask = torch.arange(3).to(rows) > 0
    return module.net(rows) * module.mask


def keeps_its_output(module, rows):
    output = module.net(rows)
    module.aux = output.square().mean()
    return output


def checkpointed(module, rows):
    return checkpoint(module.net, rows, use_reentrant=False)


def with_metas(module, rows, metas):
    scales = [
        meta["scale"] if isinstance(meta, dict) else meta.scale
        for meta, _ in zip(metas, rows, strict=False)
    ]
    return module.net(rows) * torch.tensor(scales).to(rows)[:, None]


def with_texts(module, rows, texts):
    lengths = [len(text) for text, _ in zip(texts, rows, strict=False)]
    return module.net(rows) * torch.tensor(lengths).to(rows)[:, None]


def time_first(module, rows):
    return torch.stack([module.net(rows), module.net(2 * rows)])


def selected(module, rows):
    return module.net(rows)[rows[:, 0] > 0]


# ---- the same programs, as the words of errors and warnings say ----


def reads_a_count(module, rows):
    return module.net(rows) * (1 + 0.1 * module.calls)


def counts_once(module, *_):
    module.calls += 1


def reads_a_switch(module, rows):
    return module.net(rows) * (1.0 if module.is_warm else 0.5)


def switches_once(module, *_):
    module.is_warm = True


def reads_a_centre(module, rows):
    return module.net(rows) + module.centre


def moves_the_centre(module, rows, _):
    module.centre = 0.9 * module.centre + 0.1 * rows.mean(0)[:3]


def reads_a_table(module, rows):
    return module.net(rows) * module.table["scale"]


def fills_the_table(module, *_):
    module.table["scale"] *= 0.9


def reads_a_memory(module, rows):
    return module.net(rows) + module.memory


def sets_the_memory(module, _, output):
    module.memory.set_(0.5 * module.memory + output.detach().mean(0))


def reads_an_entry(module, rows):
    return module.net(rows) + module.memory[0]


def sets_the_entry(module, _, output):
    module.memory[0].set_(0.5 * module.memory[0] + output.detach().mean(0))


def writes_afterwards(module, *_):
    module.net[0].weight.mul_(0.9)


def returns_a_loss_aside(module, rows):
    hidden = module.net[0](rows)
    aside = module.aside(hidden.detach()).square().mean(1)
    return module.net[1:](hidden), aside


def returns_its_loss(module, rows):
    output = module.net(rows)
    return output, output.square().mean(1)


def returns_what_a_hook_has(module, rows):
    """The hook is removed at the end of the call."""
    hidden = []
    hook = module.net[0].register_forward_hook(lambda *of: hidden.append(of[2]))
    with hook:
        output = module.net(rows)
    return output, hidden[0].square().mean(1)


def carries_what_it_returns(module, rows, state):
    output = module.net(rows) + state
    return output, output.detach()


def writes_the_state(_, inputs, outputs):
    inputs[1].copy_(outputs[1])


def returns_both_times(module, rows):
    return time_first(module, rows).transpose(0, 1)


def returns_which(module, rows):
    return module.net(rows), rows[:, 0] > 0


class Words(nn.Module):
    """One row per token, as pytorch/examples' language model has it."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 5), nn.Linear(5, 9)

    def forward(self, tokens):
        return self.head(self.embed(tokens)).flatten(0, 1)


class Rowwise(Words):
    """The remedy."""

    def forward(self, tokens):
        return super().forward(tokens).unflatten(0, (len(tokens), -1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, rows):
        return self.second(self.first(rows))[:, :3]


# ---- criteria ----


def called_once(model):
    """It makes what the first forward pass makes."""
    with seeded():
        model(INPUTS[:1])
    return nn.MSELoss()


def of_both(weight):
    """Adds a mean of what forward returns beside its output."""

    def prepare(_):
        return lambda outputs, targets: (
            F.mse_loss(outputs[0], targets) + weight * outputs[1].mean()
        )

    return prepare


def adds_its_loss(_):
    return lambda output, targets: F.mse_loss(output, targets) + output.square().mean()


def of_the_output(_):
    return lambda outputs, targets: F.mse_loss(outputs[0], targets)


def of_chosen_rows(_):
    return lambda outputs, _: outputs[0][outputs[1]].square().sum()


def reads_a_dict(model):
    features = {}
    model.net[0].register_forward_hook(lambda *of: features.update(hidden=of[2]))
    return lambda output, targets: (
        F.mse_loss(output, targets) + 0.1 * features["hidden"].square().mean()
    )


def reads_a_list(model):
    features = []
    model.net[0].register_forward_hook(lambda *of: features.append(of[2]))
    return lambda output, targets: (
        F.mse_loss(output, targets) + 0.1 * features[-1].square().mean()
    )


def reads_an_object(model):
    store = types.SimpleNamespace(hidden=None)
    model.net[0].register_forward_hook(lambda *of: setattr(store, "hidden", of[2]))
    return lambda output, targets: (
        F.mse_loss(output, targets) + 0.1 * store.hidden.square().mean()
    )


def reads_the_module(model):
    model.aux = torch.zeros(())
    return lambda output, targets: F.mse_loss(output, targets) + 0.1 * model.aux


def trains_in_the_criterion(_):
    def criterion(output, targets):
        output.square().mean().backward(retain_graph=True)
        return F.mse_loss(output, targets)

    return criterion


def writes_targets(_):
    def criterion(output, targets):
        targets["seen"].add_(1)
        return F.mse_loss(output, targets["y"])

    return criterion


class Forgets(nn.Module):
    """A criterion that sets its own weights, of which its graph has a copy."""

    def __init__(self, *, forgets=True):
        super().__init__()
        self.weights, self.forgets = zeros() + 1, forgets

    def forget(self):
        self.weights.set_(0.9 * self.weights)

    def forward(self, output, targets):
        error = (output - targets).square() * self.weights.clone()
        if self.forgets:
            self.forget()
        return error.mean()


class Head(nn.Module):
    """A criterion with a network."""

    def __init__(self, *, backward=False, adds=False):
        super().__init__()
        self.head = nn.Linear(3, 3).double()
        self.backward, self.adds = backward, adds

    def forward(self, output, targets):
        loss = F.mse_loss(self.head(output), targets)
        if self.adds or self.backward:
            aside = self.head(output.detach()).square().mean()
        if self.backward:
            aside.backward()
        return loss + aside if self.adds else loss


def keeps_its_criterion(model):
    """Its weights are set after each step."""
    criterion = Forgets(forgets=False)
    model.of = (criterion,)
    return criterion


def with_head(_, **options):
    torch.manual_seed(4)
    return Head(**options)


class Picks(nn.CrossEntropyLoss):
    def forward(self, output, targets):
        return super().forward(output, targets["labels"])


def of_tokens(_):
    return lambda output, targets: F.cross_entropy(
        output.flatten(0, -2), targets.flatten()
    )


GRAPHS = [randn(count, 6, seed=count) for count in (3, 5, 2, 7, 1, 4, 4)]
OF_NODES = [randint(3, len(graph), seed=9) for graph in GRAPHS]
METAS = [{"scale": 1 + 0.1 * row, "name": "a"} for row in range(13)]
TEXTS = ["ab"[: 1 + row % 2] for row in range(13)]
OBJECTS = [types.SimpleNamespace(**meta) for meta in METAS]
IGNORED = LABELS.clone().masked_fill_(torch.arange(13) % 3 == 0, -100)
CREATES, WRITES, BACKWARD = "creates the parameter", "writes the parameter", "backward"
PICKS = {"targets": {"labels": IGNORED}, "prepare": lambda _: Picks()}
RETURNED = ("returned from a hook",)
SUM = {"prepare": lambda _: nn.MSELoss(reduction="sum")}

TABLE = {
    "plain": Program(net),
    "a loss that is a sum": Program(net, **SUM),
    "labels that are ignored": Program(
        net, targets=IGNORED, prepare=lambda _: nn.CrossEntropyLoss()
    ),
    "tied weights": Program(Tied),
    "checkpointed": Program(of(checkpointed)),
    "frozen": Program(lambda: net(nn.Linear(3, 3).requires_grad_(False))),
    "a criterion with a network": Program(net, prepare=with_head),
    "heads made in forward": Program(
        of(makes_heads, body=lambda: nn.Linear(6, 8), heads=nn.ModuleDict),
        *(REFUSED, REFUSED, CREATES, ("heads made in a first call",)),
    ),
    "heads made in a first call": Program(
        of(makes_heads, body=lambda: nn.Linear(6, 8), heads=nn.ModuleDict),
        prepare=called_once,
    ),
    "heads appended in forward": Program(
        of(appends_heads, heads=nn.ModuleList),
        *(REFUSED, REFUSED, CREATES, ("heads appended in a first call",)),
    ),
    "heads appended in a first call": Program(
        of(appends_heads, heads=nn.ModuleList), prepare=called_once
    ),
    "a parameter made in forward": Program(
        of(makes_a_parameter),
        *(REFUSED, REFUSED, CREATES, ("a parameter made in a first call",)),
    ),
    "a parameter made in a first call": Program(
        of(makes_a_parameter), prepare=called_once
    ),
    "a lazy module": Program(
        lambda: nn.Sequential(nn.LazyLinear(3)),
        *(REFUSED, REFUSED, "lazy", ("a lazy module after a first call",)),
    ),
    "a lazy module after a first call": Program(
        lambda: nn.Sequential(nn.LazyLinear(3)), prepare=called_once
    ),
    "writes through data": Program(
        of(writes_through_data),
        *(REFUSED, REFUSED, WRITES, ("written after the step",)),
    ),
    "written after the step": Program(
        of(lambda m, x: m.net(x)), after=writes_afterwards
    ),
    "synchronised statistics": Program(
        lambda: net(nn.SyncBatchNorm(3)),
        *(EXACT, REFUSED, "SyncBatchNorm.*ScatterOnceParallel.forward_backward"),
        accum=1,
    ),
    "synchronised, evaluated": Program(lambda: net(nn.SyncBatchNorm(3)).eval()),
    "backward of a head in forward": Program(
        of(trains_aside, aside=lambda: nn.Linear(8, 2)),
        *(REFUSED, REFUSED, BACKWARD, ("the head's loss is returned",)),
    ),
    "the head's loss is returned": Program(
        of(returns_a_loss_aside, aside=lambda: nn.Linear(8, 2)), prepare=of_both(1)
    ),
    "backward of itself in forward": Program(
        of(trains_itself), *(REFUSED, REFUSED, BACKWARD, ("its loss is returned",))
    ),
    "its loss is returned": Program(of(returns_its_loss), prepare=of_both(1)),
    "backward in the criterion": Program(
        net,
        *(REFUSED, REFUSED, BACKWARD, ("added in the criterion",)),
        prepare=trains_in_the_criterion,
    ),
    "added in the criterion": Program(net, prepare=adds_its_loss),
    "backward of the criterion's head": Program(
        net,
        *(REFUSED, REFUSED, BACKWARD, ("added in the criterion with a network",)),
        prepare=functools.partial(with_head, backward=True),
    ),
    "added in the criterion with a network": Program(
        net, prepare=functools.partial(with_head, adds=True)
    ),
    "backward to a detached leaf": Program(of(caches_gradients)),
    "a hook fills a dict": Program(
        of(lambda m, x: m.net(x)), TOLD, EXACT, "hook", RETURNED, prepare=reads_a_dict
    ),
    "a hook fills a list": Program(
        of(lambda m, x: m.net(x)), TOLD, EXACT, "hook", RETURNED, prepare=reads_a_list
    ),
    "a hook fills an object": Program(
        of(lambda m, x: m.net(x)), TOLD, TOLD, "hook", RETURNED, prepare=reads_an_object
    ),
    "an attribute that the criterion reads": Program(
        of(keeps_its_output),
        *(REFUSED, TOLD, "aux", ("its loss is returned",)),
        prepare=reads_the_module,
    ),
    "returned from a hook": Program(of(returns_what_a_hook_has), prepare=of_both(0.1)),
    "a counter": Program(
        of(counts, calls=int),
        *(TOLD, EXACT, "calls", ("counted after the step", "a counter in a buffer")),
    ),
    "counted after the step": Program(of(reads_a_count, calls=int), after=counts_once),
    "a counter in a buffer": Program(
        of(counts, calls=lambda: nn.Buffer(torch.zeros(()))), accum=1
    ),
    "a switch": Program(
        of(switches, is_warm=bool),
        *(TOLD, EXACT, "is_warm|another result", ("switched after the step",)),
    ),
    "switched after the step": Program(
        of(reads_a_switch, is_warm=bool), after=switches_once
    ),
    "a centre that begins late": Program(
        of(centres, centre=lambda: None),
        *(TOLD, TOLD, "centre", ("a centre that moves after the step",)),
    ),
    "a centre that moves after the step": Program(
        of(reads_a_centre, centre=zeros), after=moves_the_centre
    ),
    "a table of numbers": Program(
        of(fills_a_table, table=dict),
        *(TOLD, EXACT, "table|another result", ("a table filled after the step",)),
    ),
    "a table filled after the step": Program(
        of(reads_a_table, table=lambda: {"scale": 1.0}), after=fills_the_table
    ),
    "a state among the inputs": Program(
        of(carries_a_state),
        *(TOLD, TOLD, r"inputs\[1\]", ("a state that is returned",)),
        inputs=lambda: (INPUTS, TARGETS.clone()),
    ),
    "a state that is returned": Program(
        of(carries_what_it_returns),
        inputs=lambda: (INPUTS, TARGETS.clone()),
        prepare=of_the_output,
        after=writes_the_state,
    ),
    "a criterion that writes targets": Program(
        net,
        *(TOLD, TOLD, r"the criterion writes targets\['seen'\]", ("plain",)),
        targets={"y": TARGETS, "seen": torch.zeros(13)},
        prepare=writes_targets,
    ),
    "an attribute that is set": Program(
        of(sets_an_attribute, memory=zeros),
        *(TOLD, TOLD, "memory", ("set after the step",)),
    ),
    "set after the step": Program(
        of(reads_a_memory, memory=zeros), after=sets_the_memory
    ),
    "an entry of a list that is set": Program(
        of(sets_an_entry, memory=lambda: [zeros()]),
        *(TOLD, TOLD, "memory|another result", ("an entry set after the step",)),
    ),
    "an entry set after the step": Program(
        of(reads_an_entry, memory=lambda: [zeros()]), after=sets_the_entry
    ),
    "an input that is set": Program(
        of(sets_its_input),
        *(TOLD, TOLD, r"inputs\[1\]", ("a state that is returned",)),
        inputs=lambda: (INPUTS, TARGETS.clone()),
    ),
    "a parameter that is set": Program(
        of(sets_a_parameter), REFUSED, REFUSED, WRITES, ("written after the step",)
    ),
    "a criterion that sets its weights": Program(
        net,
        *(TOLD, TOLD, "weights", ("weights that are set once per step",)),
        prepare=lambda _: Forgets(),
    ),
    "weights that are set once per step": Program(
        of(lambda m, x: m.net(x)),
        prepare=keeps_its_criterion,
        after=lambda module, *_: module.of[0].forget(),
    ),
    "a mask that is kept": Program(of(keeps_a_mask, mask=lambda: None)),
    "a dict per row": Program(
        of(with_metas),
        *(REFUSED, REFUSED, r"Rows\(dicts\)", ("rows of dicts",)),
        inputs=(INPUTS, METAS),
    ),
    "an object per row": Program(
        of(with_metas),
        *(REFUSED, REFUSED, r"Rows\(entries\)", ("rows of objects",)),
        inputs=(INPUTS, OBJECTS),
    ),
    "rows of objects": Program(of(with_metas), inputs=(INPUTS, Rows(OBJECTS))),
    "a text per row": Program(
        of(with_texts),
        *(REFUSED, REFUSED, r"Rows\(texts\)", ("rows of texts",)),
        inputs=(INPUTS, TEXTS),
    ),
    "rows of texts": Program(of(with_texts), inputs=(INPUTS, Rows(TEXTS))),
    "rows of dicts": Program(of(with_metas), inputs=(INPUTS, Rows(METAS))),
    "a row per token": Program(
        Words,
        *(EXACT, REFUSED, "reshape.*ScatterOnceParallel", ("tokens by row",)),
        inputs=TOKENS,
        targets=FOLLOWING,
        prepare=of_tokens,
    ),
    "tokens by row": Program(
        Rowwise, inputs=TOKENS, targets=FOLLOWING, prepare=of_tokens
    ),
    "time first": Program(
        of(time_first),
        *(EXACT, REFUSED, "transpose", ("rows first",)),
        prepare=lambda _: lambda output, y: F.mse_loss(output[1], y),
    ),
    "rows first": Program(
        of(returns_both_times),
        prepare=lambda _: lambda output, y: F.mse_loss(output.transpose(0, 1)[1], y),
    ),
    "nodes of graphs": Program(
        net,
        *(EXACT, REFUSED, "ScatterOnceParallel"),
        inputs=Rows(GRAPHS, torch.cat),
        targets=Rows(OF_NODES, torch.cat),
        prepare=lambda _: nn.CrossEntropyLoss(),
    ),
    "selected rows": Program(
        of(selected),
        *(EXACT, REFUSED, "its share of the targets", ("selected by the criterion",)),
        prepare=lambda _: lambda output, _: output.square().sum(),
        options={"reduction": "sum"},
    ),
    "selected by the criterion": Program(
        of(returns_which), prepare=of_chosen_rows, options={"reduction": "sum"}
    ),
    "labels in a dict": Program(
        net, REFUSED, REFUSED, "count=", ("labels in a dict, counted",), **PICKS
    ),
    "labels in a dict, counted": Program(
        net, **PICKS, options={"count": count_labels()}
    ),
    "a scripted module": Program(
        lambda: torch.jit.script(nn.Linear(6, 3)),
        *(REFUSED, REFUSED, "TorchScript", ("plain",)),
    ),
    "inputs with gradients": Program(
        net,
        *(REFUSED, EXACT, "requires grad", ("plain",)),
        inputs=INPUTS.clone().requires_grad_(),
    ),
}


def plain_inputs(values):
    """What plain torch gets: rows joined, as ``collate`` does."""
    if isinstance(values, tuple):
        return tuple(value for each in values for value in plain_inputs(each))
    if isinstance(values, Rows):
        contents = values.contents
        return (torch.cat(contents) if torch.is_tensor(contents[0]) else contents,)
    return (values,)


def trained(program, how, devices):
    """The state, gradients and losses after some steps; and the model, for errors."""
    model = build(program.make)
    criterion = program.prepare(model)
    modules = [m for m in (model, criterion) if isinstance(m, nn.Module)]
    before = [
        None if isinstance(p, nn.UninitializedParameter) else p.detach().clone()
        for module in modules
        for p in (*module.parameters(), *module.buffers())
    ]
    losses = []
    inputs = program.inputs() if callable(program.inputs) else program.inputs
    try:
        step = steps_of(program, how, model, criterion, inputs, devices)
        for _ in range(STEPS):
            for module in modules:
                module.zero_grad()
            loss, outputs = step()
            losses.append(loss.detach())
            with torch.no_grad():
                for module in modules:
                    for parameter in module.parameters():
                        if parameter.grad is not None:
                            parameter.sub_(parameter.grad, alpha=0.05)
                if program.after is not None:
                    program.after(model, inputs, outputs)
    except (TypeError, ValueError, RuntimeError) as error:
        if how == "plain":
            raise
        after = [p for m in modules for p in (*m.parameters(), *m.buffers())]
        for value, earlier in zip(after, before, strict=True):
            is_written = program.words == WRITES  # the one value that is lost
            assert earlier is None or is_written or torch.equal(value, earlier)
        assert all(p.grad is None for m in modules for p in m.parameters())
        return str(error)
    named = {str(n): module for n, module in enumerate(modules)}
    return nn.ModuleDict(named), torch.stack(losses)


def steps_of(program, how, model, criterion, inputs, devices):
    """A function that returns the loss and, if ``after`` asks, the whole output."""
    targets, options, asks = program.targets, program.options, program.after
    if how == "engine":
        engine = ScatterOnceParallel(model, program.accum, devices)

        def step():
            got = engine.forward_backward(
                inputs, targets, criterion, return_outputs=bool(asks), **options
            )
            return (got[0], gather(got[1], "cpu")) if asks else (got, None)

        return step
    call, loss_of = model, criterion
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    if how == "pair":
        call, loss_of = (
            DataParallelModel(model, devices),
            DataParallelCriterion(criterion),
        )
    else:
        arguments, (targets,) = plain_inputs(inputs), plain_inputs(targets)
        options = {}

    def step():
        outputs = call(*arguments)
        loss = loss_of(outputs, targets, **options)
        loss.backward()
        if asks and how == "pair":
            outputs = gather(outputs, "cpu")
        return loss, outputs

    return step


def answer_of(name, how, devices):
    """What became of a program, and the words."""
    program = TABLE[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trained(program, how, devices)
    if isinstance(found, str):
        return REFUSED, found
    texts = [
        str(warning.message)
        for warning in caught
        if re.search("docs/|replicas", str(warning.message), re.IGNORECASE)
    ]
    if texts:
        return TOLD, "\n".join(texts)
    module, losses = found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, expected_losses = trained(program, "plain", None)
    assert torch.allclose(losses, expected_losses, rtol=1e-9)
    assert_gradients(module, gradients(expected))
    return EXACT, ""


LAYOUTS = {"shared": ["cpu"] * 2, "apart": ["cpu:0", "cpu:1"]}
# In one memory, only what is said of parameters, which all replicas read there, is quick.
OF_PARAMETERS = {
    name for name, program in TABLE.items() if "parameter" in program.words
}
CASES = [
    pytest.param(
        *(name, layout),
        marks=[] if layout == "apart" or name in OF_PARAMETERS else [pytest.mark.slow],
    )
    for name in TABLE
    for layout in LAYOUTS
]


@pytest.mark.draws
@pytest.mark.parametrize("how", ["engine", "pair"])
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_engine_and_pair_answer(name, layout, how):
    program = TABLE[name]
    answer, words = answer_of(name, how, LAYOUTS[layout])
    assert answer == getattr(program, how), words
    if answer != EXACT:
        assert re.search(program.words, words, re.DOTALL), words


@pytest.mark.parametrize("name", [n for n, p in TABLE.items() if p.words])
def test_refused_and_told_have_a_remedy(name):
    """Rows that are exact both ways; or the words name the engine, which is exact."""
    program = TABLE[name]
    remedies = [TABLE[remedy] for remedy in program.remedies]
    assert all((row.engine, row.pair) == (EXACT, EXACT) for row in remedies)
    if not remedies:
        assert program.engine == EXACT
        assert "ScatterOnceParallel" in program.words
