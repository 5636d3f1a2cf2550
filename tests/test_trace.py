"""engine.trace(): what is recorded, what is said to bound a step, pictures; profilers, too."""

from __future__ import annotations

import json
import re
import time
import warnings
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest
import torch
from helpers.pages import blocks, namespace, read, run
from torch import nn
from torch.profiler import ProfilerActivity, profile

from scatterpar import Rows, ScatterOnceParallel
from scatterpar.bounds import BETWEEN, Bounds
from scatterpar.plan import make_plan
from scatterpar.threads.clock import Event, RecordedStep
from scatterpar.torch_private import PROFILE_ALL_THREADS

pytestmark = pytest.mark.draws
LAYOUTS = [["cpu"] * 2, ["cpu:0", "cpu:1"], ["cpu"]]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(rows=12):
    return torch.randn(rows, 4), torch.arange(rows) % 2


def traced(engine, *given, steps=1, **options):
    with engine.trace() as trace:
        for _ in range(steps):
            engine.forward_backward(*given, **options)
    return trace


def events(trace, tmp_path):
    trace.save(tmp_path / "step.json")
    return json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))["traceEvents"]


def counted(trace, tmp_path):
    """How many complete events of each name each thread has, by the threads' names."""
    found = events(trace, tmp_path)
    threads = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    complete = [e for e in found if e["ph"] == "X"]
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in complete)
    return Counter((threads[e["tid"]], e["name"]) for e in complete)


# --- what is recorded ---------------------------------------------------------------------------


@pytest.mark.parametrize("devices", LAYOUTS)
@pytest.mark.parametrize(
    ("how", "options"),
    [
        ({}, {}),
        ({}, {"whole_batch": True}),
        ({}, {"return_outputs": True}),
        ({"graphs": True}, {}),
        ({"compile": {"backend": "eager"}}, {}),
    ],
)
def test_every_sub_step_has_one_forward_and_one_backward(devices, how, options, tmp_path):
    """What is captured, warmed up or checked is no sub-step of the step."""
    with ScatterOnceParallel(network(), 3, devices, **how) as engine:
        trace = traced(engine, *batch(), nn.CrossEntropyLoss(), steps=2, **options)
    found = counted(trace, tmp_path)
    for replica, device in enumerate(devices):
        thread = f"replica {replica}, {device}"
        assert (found[thread, "forward"], found[thread, "backward"]) == (6, 6)
        again = 4 if options.get("whole_batch") else 0  # all but each replica's last one
        assert found[thread, "recompute"] == again
        assert "graphs" in how or found[thread, "arrival"] == 6 + again
    assert [found["caller", n] for n in ("step", "replicate", "reduce", "commit")] == [2] * 4


def test_a_loss_that_is_pulled_later_is_recorded_where_it_is_computed(tmp_path):
    inputs, targets = batch()
    with ScatterOnceParallel(network(), 3, ["cpu"] * 2) as engine, engine.trace() as trace:
        engine.loss(inputs, targets, nn.CrossEntropyLoss()).backward()
    found = counted(trace, tmp_path)
    assert found["replica 1, cpu", "forward"] == found["replica 1, cpu", "backward"] == 3


def test_rows_that_are_dealt_by_cost_are_recorded(tmp_path):
    costs = [1.0] * 6 + [4.0] * 6
    with ScatterOnceParallel(network(), device_ids=["cpu"] * 2, micro_batch_cost=8.0) as engine:
        trace = traced(engine, *batch(), nn.CrossEntropyLoss(), costs=costs)
        shares = engine.plan(12, costs).shares
    found = counted(trace, tmp_path)
    for share in shares:
        thread, count = f"replica {share.replica}, cpu", len(share.micro_batches)
        assert found[thread, "forward"] == found[thread, "backward"] == count


def test_events_of_a_replica_nest_and_lie_in_their_step():
    with ScatterOnceParallel(network(), 3, ["cpu"] * 2) as engine:
        trace = traced(engine, *batch(), lambda o, t: nn.functional.cross_entropy(o, t), steps=3)
    waits = {(step.number, r, n) for step in trace.steps for r in (0, 1) for n in range(3)}
    for event in trace.events():
        assert -1e-9 <= event.self_seconds <= event.end - event.start
        if event.step is not None and event.name != BETWEEN:
            assert event.step.start <= event.start <= event.end <= event.step.end
            assert event.step.error is None
            assert event.step.rows == {0: 6, 1: 6}
        if event.name == "waiting":  # in the criterion
            waits.remove((event.step.number, event.replica, event.sub_step))
    assert not waits
    assert sum(e.self_seconds for e in trace.events() if e.replica is None) == pytest.approx(
        trace.steps[-1].end - trace._start, rel=0.1
    )


def test_a_step_that_fails_is_in_it(tmp_path):
    def criterion(output, targets):
        raise ValueError("no such loss")

    inputs, targets = batch()
    with ScatterOnceParallel(network(), 3, ["cpu"] * 2, verify=False) as engine:
        with engine.trace() as trace, pytest.raises(ValueError, match="no such loss"):
            engine.forward_backward(inputs, targets, criterion)
        engine.forward_backward(inputs, targets, nn.CrossEntropyLoss())
    assert [step.error for step in trace.steps] == ["ValueError: no such loss"]
    assert counted(trace, tmp_path)["replica 0, cpu", "forward"] == 1
    assert "step 0 failed: ValueError: no such loss" in str(trace)
    assert "failed" in trace._repr_svg_()


def test_a_step_that_fails_before_it_has_a_plan_is_in_it():
    inputs, targets = batch()
    engine, refused = ScatterOnceParallel(network(), 3, ["cpu"] * 2), " rows"
    with engine, engine.trace() as trace, pytest.raises(ValueError, match=refused):
        engine.forward_backward(inputs, targets[:5], nn.CrossEntropyLoss())
    assert "step 0 failed: ValueError" in str(trace)
    assert "0 rows" in trace._repr_svg_()


def test_nothing_is_recorded_outside_of_it():
    inputs, targets = batch()
    with ScatterOnceParallel(network(), 3, ["cpu"] * 2) as engine:
        trace = traced(engine, inputs, targets, nn.CrossEntropyLoss())
        engine.forward_backward(inputs, targets, nn.CrossEntropyLoss())
        with engine.trace() as other:
            engine.check(inputs, targets, nn.CrossEntropyLoss())
            engine.eval()(inputs)
    assert (len(trace.steps), len(other.steps)) == (1, 0)
    assert str(other) == "No step was recorded."
    with pytest.raises(ValueError, match="no step was recorded: call forward_backward inside"):
        other._repr_svg_()


def test_one_trace_at_a_time():
    refused = pytest.raises(RuntimeError, match="traced already")
    engine = ScatterOnceParallel(network(), 3, ["cpu"] * 2)
    with engine, engine.trace(), refused, engine.trace():
        pass


def test_gradients_are_the_same_bits_with_it():
    inputs, targets = batch()
    plain, seen = network(), network()
    for model in (plain, seen):
        with ScatterOnceParallel(model, 3, ["cpu"] * 2) as engine:
            if model is seen:
                traced(engine, inputs, targets, nn.CrossEntropyLoss())
            else:
                engine.forward_backward(inputs, targets, nn.CrossEntropyLoss())
    gradients = [[parameter.grad for parameter in model.parameters()] for model in (plain, seen)]
    assert all(map(torch.equal, *gradients))


# --- what bounds a step -------------------------------------------------------------------------

STEPS = 4


def told(spans_of_replica, *, devices=("cpu", "cpu"), wait=0.0, computing=1.0, options=(), first=1):
    """The sentence on steps of a second (the first: of ``first``).

    Their replicas have events (name, share, sub-step, start, seconds, elements, lag of the device).
    """
    devices = [torch.device(device) for device in devices]
    steps, events = [], []

    def add(event, start, seconds):
        event.start, event.end, event.self_seconds = start, start + seconds, seconds
        events.append(event)

    for number in range(STEPS):
        step = RecordedStep(number)
        steps.append(step)
        step.plan = make_plan(64, devices, 2)
        seconds_of_step = 1 if number else first
        add(Event(step, BETWEEN), 0.0, wait)
        add(step, 0.0, seconds_of_step)
        add(Event(step, "compute"), 0.0, computing * seconds_of_step)
        spans = [span for share in step.plan.shares for span in spans_of_replica(share, number)]
        for name, share, sub_step, start, seconds, *more in spans:
            event = Event(step, name, share, sub_step)
            add(event, start, seconds)
            event.elements = more[0] if more else 64
            if more[1:]:
                event.on_device = event.start, event.end + more[1]
    return Bounds(events, steps, devices, frozenset(options)).sentence()


def busy(seconds, name="forward", *more):
    return lambda share, _: [(name, share, 0, 0.0, seconds, *more)]


def slow_second(share, _):
    return [("forward", share, 0, 0.0, 0.9 if share.replica else 0.3)]


def slow_in_turn(share, number):
    return [("forward", share, 0, 0.0, 0.9 if share.replica == number % 2 else 0.3)]


def long_rows(share, _):
    longer = 3 if share.replica else 1
    arrival = "arrival", share, 0, 0.0, 0.001, 64 * longer
    return [arrival, ("forward", share, 0, 0.1, 0.3 * longer, 0)]


def tiny(share, _):
    return [("forward", share, n, n / 100, 0.0005) for n in range(32)]


def once_a_step(share, _):
    return [("replicate", None, None, 0.0, 0.5)] if share.replica == 0 else []


def checked(share, _):
    own = [("forward", share, 0, 0.5, 0.9 if share.replica else 0.3)]
    return own if share.replica else [*own, ("verify", None, None, 0.0, 0.5)]


CARDS = {"devices": ["cpu:0", "cpu:1"]}  # of which the test says when they were done
DONE, BEHIND = busy(0.4, "forward", 64, 0.001), busy(0.4, "forward", 64, 0.4)
SLOW = "^Replica 1, cpu, takes 3.0 times as long as the others"
FEWER = "for fewer and larger sub-steps.$"
WAIT = ", who wait for it 30 % of the time. "
SENTENCES = [
    (SLOW + WAIT + 'Pass shares="auto".$', slow_second, {}),
    (
        f'{SLOW}{WAIT}shares="auto" is set, and learns that from step to step.$',
        slow_second,
        {"options": ["shares"]},
    ),
    (
        SLOW + ".* Its rows are longer: put rows of like length together, or pass "
        "micro_batch_cost=, and costs= to the step.$",
        long_rows,
        {},
    ),
    ("In other steps it is another one.*micro_batch_cost=", slow_in_turn, {}),
    ("^The engine waited 60 % of the time for its caller.*num_workers=", busy(0.9), {"wait": 1.5}),
    # A device that is done when the host is was waiting for it; one that is behind was not.
    (
        f"^Launching .*, 100 % of the time.* Pass graphs=True, or a smaller accum=, {FEWER}",
        DONE,
        CARDS,
    ),
    (f"Pass a smaller accum=, {FEWER}", DONE, CARDS | {"options": ["graphs"]}),
    ("^Computing bounds the steps", BEHIND, CARDS),
    (
        f"^Sub-steps are many and tiny: 64 a step, of 0.5 ms each. Pass a smaller accum=, {FEWER}",
        tiny,
        {},
    ),
    ("^Rows take 50 % of the time to arrive", busy(0.5, "arrival"), {}),
    ("^Replicas wait 50 % of the time for their turn in the criterion", busy(0.5, "waiting"), {}),
    (
        "^What is done once a step takes 60 % of the time, replicate most",
        once_a_step,
        {"computing": 0.4},
    ),
    # The rest of the time is what the sentence is about.
    (
        SLOW + ".*60 % of the time.* Checks, which first steps have, took 2,000 ms more.$",
        checked,
        {},
    ),
    ("^Starting took 9,000 ms of the first step: trace later steps.$", busy(0.9), {"first": 10}),
    ("^Computing bounds the steps: it takes 100 % of the time.$", busy(0.9), {}),
]


@pytest.mark.parametrize(("words", "spans", "options"), SENTENCES)
def test_what_bounds_a_step_is_said(words, spans, options):
    assert re.search(words, said := told(spans, **options)), said


def test_a_loader_that_is_waited_for():
    inputs, targets = batch()
    with ScatterOnceParallel(network(), 2, ["cpu"] * 2) as engine:
        start = time.perf_counter()
        engine.forward_backward(inputs, targets, nn.CrossEntropyLoss())
        seconds = time.perf_counter() - start
        with engine.trace() as trace:
            for _ in range(3):
                time.sleep(3 * seconds + 0.2)
                engine.forward_backward(inputs, targets, nn.CrossEntropyLoss())
    assert re.search(r"The engine waited \d+ % of the time for its caller", str(trace)), str(trace)
    assert engine.last_step.waited >= 0.2


# --- what is shown ------------------------------------------------------------------------------


def test_the_table_has_a_row_per_replica():
    with ScatterOnceParallel(network(), 3, ["cpu:0", "cpu:1"]) as engine:
        title, head, *rows = str(traced(engine, *batch(), nn.CrossEntropyLoss())).splitlines()
    assert title.startswith("1 step of ")
    assert head.split()[2:] == ["rows", "sub-steps", "arrival", "forward", "backward", "idle"]
    assert [row.split()[:4] for row in rows[:2]] == [
        ["0", "cpu:0", "6", "3"],
        ["1", "cpu:1", "6", "3"],
    ]
    assert rows[2].startswith("for all: scatter ")


def test_the_picture_is_svg_with_a_bar_for_each_event():
    with ScatterOnceParallel(network(), 3, ["cpu:0", "cpu:1"]) as engine:
        trace = traced(engine, *batch(), nn.CrossEntropyLoss())
    root = ElementTree.fromstring(trace._repr_svg_())
    words = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"caller", "replica 0, cpu:0", "replica 1, cpu:1", "forward"} <= set(words)
    shown = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}title")]
    titles = Counter(text.split(":")[0] for text in shown if ":" in text)
    assert [titles[f"forward {n}"] for n in range(4)] == [2, 2, 2, 0]
    assert titles["between steps"] == titles["reduce"] == 1


def test_the_plot_is_matplotlibs():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    with ScatterOnceParallel(network(), 3, ["cpu"] * 2) as engine:
        trace = traced(engine, *batch(), nn.CrossEntropyLoss())
    axes = trace.plot()
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "caller",
        "replica 0, cpu",
        "replica 1, cpu",
    ]
    assert len(axes.patches) >= 2 * 3 * 3
    assert trace.plot(axes) is axes
    pyplot.close(axes.figure)


def test_the_last_step_is_a_table_in_a_notebook():
    with ScatterOnceParallel(network(), 3, ["cpu:0", "cpu:1"]) as engine:
        engine.forward_backward(*batch(), nn.CrossEntropyLoss())
        assert engine.last_step.waited == 0.0
        engine.forward_backward(*batch(), nn.CrossEntropyLoss())
    report = engine.last_step
    assert report.waited > 0
    assert len(report.replica_seconds) == 2
    assert min(report.replica_seconds) > 0
    shown = ElementTree.fromstring(f"<div>{report._repr_html_()}</div>")
    cells = [cell.text for cell in shown.iter("td")]
    assert {"scatter", "replicate", "compute", "reduce", "cpu:0", "cpu:1"} <= set(cells)


# --- profilers ----------------------------------------------------------------------------------


def profiled(engine, **options):
    with profile(activities=[ProfilerActivity.CPU], **options) as found:
        engine.forward_backward(*batch(), nn.CrossEntropyLoss())
    return Counter({entry.key: entry.count for entry in found.key_averages()})


def test_a_profiler_of_all_threads_sees_the_operators_of_replicas():
    config = eval(PROFILE_ALL_THREADS.partition("=")[2])  # what the page and the warning say
    with ScatterOnceParallel(network(), 3, ["cpu"] * 2, verify=False) as engine:
        engine.forward_backward(*batch(), nn.CrossEntropyLoss())
        found = profiled(engine, experimental_config=config)
    assert found["aten::addmm"] == 2 * 3 * 2  # layers, sub-steps, replicas
    assert found["AddmmBackward0"] == 2 * 3 * 2
    for number in range(3):
        assert found[f"scatterpar forward {number}"] == found[f"scatterpar backward {number}"] == 2
    assert found["scatterpar replicate"] == found["scatterpar reduce"] == 1


def test_a_profiler_of_one_thread_is_told():
    told = pytest.warns(UserWarning, match=re.escape(PROFILE_ALL_THREADS))
    with ScatterOnceParallel(network(), 3, ["cpu"] * 2) as engine, told:
        found = profiled(engine)
    assert found["scatterpar compute"] == 1


def test_one_replica_is_in_the_callers_thread():
    engine = ScatterOnceParallel(network(), 3, ["cpu"], verify=False)
    with engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        found = profiled(engine)
    assert found["aten::addmm"] == 2 * 3


# --- the user's error, with a way out -----------------------------------------------------------


def test_batch_normalisation_of_one_row_says_what_to_pass():
    """torch's own error stays; a note has the way out."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    with ScatterOnceParallel(model, 4, ["cpu"] * 2) as engine:
        with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
            engine.forward_backward(*batch(7), nn.CrossEntropyLoss())
        notes = "\n".join(caught.value.__notes__)
        assert "a micro-batch of one row: use a smaller accum=, or micro_batch_size=" in notes
        assert "in replica 1 on cpu, sub-step 0 of 3" in notes or "replica 0" in notes


def test_elements_that_arrive_are_those_of_the_inputs():
    inputs = [torch.randn(3 if n < 6 else 9, 4) for n in range(12)]

    def collate(entries):
        return (
            torch.stack([entry.mean(0) for entry in entries])
            if isinstance(entries, list)
            else entries
        )

    with ScatterOnceParallel(network(), 2, ["cpu"] * 2, verify=False) as engine:
        trace = traced(engine, Rows(inputs, collate), batch()[1], nn.CrossEntropyLoss())
    arrived = Counter()
    for event in trace.steps[0].events:
        arrived[event.replica] += event.elements
    assert arrived[0] == arrived[1] == 6 * 4


def test_the_page_runs_and_quotes_what_is_said():
    page = read("docs/why-is-my-step-slow.md")
    names = namespace() | {"ScatterOnceParallel": ScatterOnceParallel, "device_ids": ["cpu"] * 2}
    for code in blocks(page, "python"):
        run(code, names)
    assert names["trace"].steps
    assert PROFILE_ALL_THREADS.partition("=")[2] in page
    source = read("scatterpar/bounds.py")
    quoted = re.findall(r"`([A-Z][^`=]*)`", page.partition("| sentence |")[2].partition("\n\n")[0])
    assert len(quoted) > 10
    for part in (part.strip() for text in quoted for part in text.split("…")):
        assert part in source, part
