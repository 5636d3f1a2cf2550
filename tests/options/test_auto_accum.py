"""``accum="auto"``: out of memory is a fault that the step gets over by itself."""

from __future__ import annotations

import copy
import functools
import gc
import math
import pickle
import warnings

import pytest
import torch
from faults.state import nothing_changes, values_differ
from harness.looks import calls
from harness.models import Of
from harness.notes import beginning_of_note
from harness.oracle import build, randint, randn
from harness.pairwise import few_of
from torch import Tensor, nn

from scatterpar import ScatterOnceParallel
from scatterpar.options import map_rows

pytestmark = [pytest.mark.core, pytest.mark.draws]

FEATURES, CLASSES = 5, 4
CE = nn.CrossEntropyLoss()

FORMS = {
    "torch": lambda: torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB"
    ),
    "CUDA": lambda: RuntimeError("CUDA error: out of memory"),
    "cuDNN": lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cuDNN 9": lambda: RuntimeError(
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
    ),
    "cuBLAS": lambda: RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublas"
    ),
    "host": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory"
    ),
    "Python": MemoryError,
}


def within_budget(model, inputs):
    def require_memory(rows):
        if len(rows) > model.rows:
            raise FORMS[model.form]()

    hidden = model.dropout(model.norm(model.enter(inputs)))
    if model.where == "forward":
        require_memory(inputs)
    elif model.where == "backward" and hidden.requires_grad:
        hidden.register_hook(require_memory)
    return model.leave(hidden)


def budget(rows=10**9, form="torch", where="forward"):
    """Has memory for so many rows; draws random numbers and keeps
    running statistics.
    """
    return build(
        lambda: Of(
            within_budget,
            enter=nn.Linear(FEATURES, 6),
            norm=nn.BatchNorm1d(6),
            dropout=nn.Dropout(0.2),
            leave=nn.Linear(6, CLASSES),
            rows=rows,
            form=form,
            where=where,
        )
    )


def step(engine, rows=24, criterion=CE, **options):
    torch.manual_seed(1)
    return engine.forward_backward(
        randn(rows, FEATURES), randint(CLASSES, rows), criterion, **options
    )


def substeps(engine):
    return len(engine.last_step.plan.shares[0].micro_batches)


def of_pairs(outputs, _):
    return (outputs @ outputs.T).sigmoid().mean()


@pytest.mark.contract
@pytest.mark.parametrize(
    ("form", "where", "rows", "accum", "whole_batch"),
    [
        ("cuDNN", "forward", 24, 4, False),
        ("torch", "backward", 24, 4, True),
        # The search tries eight, one of them of a single row: batch normalisation
        # raised.
        ("torch", "forward", 29, 5, False),
        *(
            pytest.param(form, "forward", 24, 4, False, marks=pytest.mark.slow)
            for form in FORMS
            if form != "cuDNN"
        ),
        pytest.param("torch", "backward", 24, 4, False, marks=pytest.mark.slow),
        pytest.param("torch", "forward", 29, 5, True, marks=pytest.mark.slow),
    ],
)
def test_auto_has_the_bits_of_fixed_accum(
    devices, form, where, rows, accum, whole_batch
):
    criterion, found = of_pairs if whole_batch else CE, []
    model = budget(3, form, where)
    with ScatterOnceParallel(model, 1, devices(2)) as engine:
        torch.manual_seed(1)
        with nothing_changes(model), pytest.raises(type(FORMS[form]())):
            step(engine, rows, criterion, whole_batch=whole_batch)
    for room, given in ((10**9, accum), (3, "auto")):
        model = budget(room, form, where)
        with (
            ScatterOnceParallel(model, given, devices(2)) as engine,
            warnings.catch_warnings(record=True) as caught,
        ):
            loss = step(engine, rows, criterion, whole_batch=whole_batch)
        found.append((loss, torch.get_rng_state(), model))
        assert (engine.last_step.retries > 0) == (given == "auto")
        assert substeps(engine) == accum
    assert [str(one.message) for one in caught] == [
        f'accum="auto": {rows} rows with accum=1 ran out of memory, and accum={accum} '
        "is the smallest that fits. It is kept"
    ]
    (*expected, plain), (*results, model) = found
    assert all(map(torch.equal, results, expected))
    assert values_differ(plain, model) == []


@pytest.mark.parametrize("rows", few_of([1, 2, 3, 4, 5, 7, 11, 12], [1, 5, 12]))
@pytest.mark.parametrize("replicas", few_of([1, 2, 3], [1, 3]))
def test_fewest_fitting_sub_steps_are_kept(replicas, rows):
    model = budget(rows)
    model.norm.eval()
    fewest = math.ceil(math.ceil(24 / replicas) / rows)
    with ScatterOnceParallel(model, "auto", ["cpu"] * replicas) as engine:
        for is_first in (True, False):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step(engine)
            assert len(caught) == (is_first and fewest > 1)
            assert (engine.last_step.retries > 0) == (is_first and fewest > 1)
            assert substeps(engine) == fewest
        assert len(engine.plan(24).shares[0].micro_batches) == fewest


@pytest.mark.parametrize("where", ["forward", "backward", "criterion"])
def test_never_fitting_raises_leaves_no_trace(devices, where):
    model, twin = budget(0, where=where), budget()
    model.norm.eval()
    options = {"whole_batch": where == "criterion"}

    def criterion(outputs, targets):
        if where == "criterion" and not model.rows:
            assert len(outputs) == 24, "all outputs, however many sub-steps there are"
            raise FORMS["torch"]()
        return CE(outputs, targets)

    with ScatterOnceParallel(model, "auto", devices(2)) as engine:
        torch.manual_seed(1)
        wanted = pytest.raises(torch.OutOfMemoryError, match="Tried to allocate")
        with nothing_changes(model), wanted as caught:
            step(engine, criterion=criterion, **options)
        notes = "\n".join(caught.value.__notes__)
        assert "with 12 sub-steps a sub-step is one row, and that does not fit" in notes
        begins = [beginning_of_note(i, devices(2)[i]) for i in (0, 1)]
        if where == "criterion":
            begins = ["in the criterion, with the outputs of all 24 rows"]
        assert any(words in notes for words in begins)
        del caught
        model.rows = 10**9
        model.norm.train()
        loss = step(engine, criterion=criterion, **options)
    with ScatterOnceParallel(twin, 1, devices(2)) as engine:
        assert torch.equal(step(engine, criterion=criterion, **options), loss)
    assert values_differ(twin, model) == []


@pytest.mark.parametrize("room", [10**9, 3], ids=["at once", "after memory ran out"])
def test_other_errors_end_the_search(room):
    def fails(*_):
        raise RuntimeError("CUDA error: device-side assert triggered")

    model = budget(room)
    torch.manual_seed(1)
    wanted = pytest.raises(RuntimeError, match="device-side assert")
    with (
        ScatterOnceParallel(model, "auto", ["cpu"] * 2) as engine,
        nothing_changes(model),
        wanted,
    ):
        step(engine, 29, fails)


def test_trial_gradients_freed_before_retry(devices):
    """The search exists because memory is short."""
    alive = calls().seen  # tensors of a weight's size at the start of each try
    alive.clear()

    def forward(model, inputs):
        weight = model.enter.weight
        if not model.norm.num_batches_tracked:  # the first sub-step of a try
            tensors = [each for each in gc.get_objects() if type(each) is Tensor]
            number = sum(tensor.shape == weight.shape for tensor in tensors)
            calls().seen.append(number)
        return within_budget(model, inputs)

    model = budget(3)
    # No other test has a tensor of this size, which may be freed between two tries.
    model.enter = nn.Linear(FEATURES, 509)
    model.norm = nn.BatchNorm1d(509)
    model.leave = nn.Linear(509, CLASSES)
    model.double().function = forward
    options = {"device_ids": devices(1), "verify": False}
    with ScatterOnceParallel(model, "auto", **options) as engine:
        with pytest.warns(UserWarning, match="is the smallest that fits"):
            step(engine)
        assert engine.last_step.retries == 5
    assert len(alive) == 7  # tries: a trial of 8 sub-steps has fitted between others
    assert len(set(alive)) == 1, alive


def test_trials_skip_functions_of_outputs(devices):
    sizes = []

    def number_of_rows(output):
        sizes.append(len(output))
        return output

    warns = pytest.warns(UserWarning, match="is the smallest that fits")
    with ScatterOnceParallel(budget(3), "auto", devices(2)) as engine, warns:
        _, outputs = step(engine, return_outputs=number_of_rows)
    assert sizes == [3] * 8
    assert [len(output) for output in outputs] == [12, 12]


# --- without gradients ---

ROWS = 64


class Budgets(nn.Module):
    """Has memory for so many rows with gradients, and for so many without."""

    def __init__(self, training=10**9, evaluation=10**9, error=None):
        super().__init__()
        self.body = build(
            lambda: nn.Sequential(
                nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)
            )
        )
        self.head = build(lambda: nn.Linear(6, CLASSES), seed=1)
        self.training_rows, self.evaluation_rows = training, evaluation
        self.error = error or FORMS["torch"]
        self.sizes.clear()

    @property
    def sizes(self):
        """Of the micro-batches that replicas have begun, where no try restores them."""
        return calls().seen

    def forward(self, inputs):
        room = self.training_rows if torch.is_grad_enabled() else self.evaluation_rows
        self.sizes.append(len(inputs))
        if len(inputs) > room:
            raise self.error()
        return self.head(self.body(inputs))

    @torch.no_grad()
    def write(self, inputs):
        return self(inputs).argmax(1)

    @torch.no_grad()
    def score(self, inputs):
        return self(inputs).amax(1)


def batch(rows=ROWS):
    return randn(rows, FEATURES), randint(CLASSES, rows)


@torch.no_grad()
def evaluate(engine, how, rows=ROWS):
    """The results, and the rows of all micro-batches so far."""
    inputs, targets = batch(rows)
    sizes = engine.module.sizes
    match how:
        case "engine(…)":
            # In training mode a call has no sub-steps, and ``map`` has.
            results = engine.map(engine.module, inputs)
        case "a method":
            results = engine.map(engine.module.write, inputs)
        case "a function":
            results = engine.map(lambda replica, x: replica(x).square(), inputs)
        case "loss":
            results = engine.loss(inputs, targets, CE)
        case "loss of all rows":
            results = engine.loss(inputs, targets, CE, whole_batch=True)
    return results, sorted(sizes, reverse=True)


WAYS = ["engine(…)", "a method", "a function", "loss", "loss of all rows"]


@pytest.mark.contract
@pytest.mark.filterwarnings('ignore:accum="auto"')
@pytest.mark.parametrize("how", few_of(WAYS, ["loss", "a method"]))
def test_training_and_evaluation_numbers_apart(devices, how):
    """Training fits with 4 sub-steps, evaluation with 16; both are found, and stay."""
    model, twin = Budgets(8, 2).eval(), Budgets().eval()
    with (
        ScatterOnceParallel(model, "auto", devices(2), verify=False) as engine,
        ScatterOnceParallel(twin, 16, devices(2), verify=False) as fixed,
    ):
        for is_first in (True, False, False):
            for _ in range(2):
                engine.forward_backward(*batch(), CE)
                assert substeps(engine) == 4
            model.sizes.clear()
            results, sizes = evaluate(engine, how)
            model.sizes.clear()
            assert torch.equal(results, evaluate(fixed, how)[0])
            tried = len(sizes) > 32
            assert tried == is_first
            assert is_first or sizes == [2] * 32
            assert len(engine.plan(ROWS).shares[0].micro_batches) == 4


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("form", few_of(["torch", "cuDNN"], ["torch"]))
def test_undone_inference_tries_leave_no_trace(devices, how, form):
    """In training mode, where a forward pass draws and moves statistics."""
    found = []
    for given, room in (("auto", 3), (4, 10**9)):
        model = Budgets(0, room, FORMS[form])
        with (
            ScatterOnceParallel(model, given, devices(2)) as engine,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            torch.manual_seed(1)
            results, _ = evaluate(engine, how, 24)
            found.append((results, torch.get_rng_state(), model))
            # The next call draws on.
            found[-1] += (evaluate(engine, how, 24)[0],)
        told = [str(one.message) for one in caught if "accum=" in str(one.message)]
        if given == "auto":
            (text,) = told
            assert text.startswith(
                'accum="auto": 24 rows with accum=1 ran out of memory, and accum=4 is '
                "the smallest that fits. It is kept for "
            )
            assert text.endswith(" with 24 rows and without gradients")
        else:
            assert told == []
    (results, state, model, later), (expected, plain_state, twin, plain_later) = found
    assert torch.equal(results, expected)
    assert torch.equal(state, plain_state)
    assert torch.equal(later, plain_later)
    assert values_differ(twin, model) == []


@pytest.mark.parametrize("where", ["closure", "argument"])
def test_undone_tries_restore_user_generators(where):
    """A generator of the user's, and the statistics of a network beside the model."""
    found = []
    for given, room in (("auto", 3), (8, 10**9)):
        generator = torch.Generator().manual_seed(3)
        teacher = build(lambda: nn.BatchNorm1d(FEATURES))
        model = Budgets(evaluation=room).eval()

        def noisy(replica, x, generator=generator, teacher=teacher):
            noise = torch.rand(len(x), 1, generator=generator)
            return replica(teacher(x)) + noise

        with (
            ScatterOnceParallel(model, given, ["cpu"]) as engine,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            inputs, _ = batch(24)
            options = {"generator": generator} if where == "argument" else {}
            results = engine.map(noisy, inputs, **options)
        found.append((results, generator.get_state(), *teacher.buffers()))
    assert all(map(torch.equal, *found))


@pytest.mark.filterwarnings('ignore:accum="auto"')
def test_functions_known_by_code_and_rows(devices):
    model = Budgets(evaluation=3).eval()
    inputs, _ = batch(24)
    few = inputs[:11]
    with ScatterOnceParallel(model, "auto", devices(2)) as engine:

        def tries(function, rows):
            """Whether the call of a function tried several numbers."""
            model.sizes.clear()
            engine.map(function, rows)
            return max(model.sizes) > 3

        def scaled(factor):
            return lambda replica, x: replica(x) * factor

        assert tries(scaled(1), inputs)
        assert not tries(scaled(2), inputs)
        # What ran out of memory with more rows is not tried again with fewer.
        assert not tries(scaled(3), few)
        assert sorted(model.sizes) == [2, 3, 3, 3]
        # Methods with one decorator share its code, not theirs.
        assert tries(model.write, inputs)
        assert tries(model.score, inputs)
        assert not tries(functools.partial(model.write), inputs)
        assert tries(model, inputs)
        assert not tries(model.forward, inputs)
        model.sizes.clear()
        torch.no_grad()(engine.forward)(inputs)
        assert model.sizes == [3] * 8
        # A larger number of rows begins with what fitted, and may need more.
        assert not tries(model.write, torch.cat([inputs, inputs]))
        assert len(engine.plan(24).shares[0].micro_batches) == 1


def test_one_warning_for_all_batches(devices):
    model = Budgets(evaluation=3).eval()
    with (
        ScatterOnceParallel(model, "auto", devices(2)) as engine,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for rows in (24, 24, 24, 7):
            assert len(torch.no_grad()(engine.forward)(batch(rows)[0])) == rows
    (only,) = caught
    assert "It is kept for Budgets.forward with 24 rows and without gradients" in str(
        only.message
    )


@pytest.mark.parametrize("how", WAYS)
def test_never_fitting_inference_no_trace(devices, how):
    model = Budgets(evaluation=0)
    model.body[1].eval()  # micro-batches of one row
    with ScatterOnceParallel(model, "auto", devices(2), verify=False) as engine:
        with (
            nothing_changes(model),
            pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught,
        ):
            evaluate(engine, how, 24)
        notes = "\n".join(caught.value.__notes__)
        assert "with 12 sub-steps a sub-step is one row, and that does not fit" in notes
        assert "(5 tries ran out of memory)" in notes
        del caught
        model.evaluation_rows = 10**9
        model.sizes.clear()
        _, sizes = evaluate(engine, how, 24)
        assert sizes == [12, 12], "what never fitted is not remembered"


def test_other_inference_errors_are_the_users(devices):
    """Also those that only a small micro-batch meets, and Ctrl-C in a later try."""
    inputs, _ = batch(24)
    for error in (ValueError, KeyboardInterrupt):

        def fails(replica, x, error=error):
            if len(x) == 3:
                raise error("mine")
            return replica(x)

        model = Budgets(evaluation=3)
        with (
            ScatterOnceParallel(model, "auto", devices(2)) as engine,
            nothing_changes(model),
            pytest.raises(error, match="mine"),
        ):
            engine.map(fails, inputs)


def test_results_too_large_end_the_search(devices, monkeypatch):
    """More sub-steps do not make them smaller."""
    model = Budgets().eval()

    def runs_out(*_, **__):
        raise FORMS["torch"]()

    monkeypatch.setattr(map_rows, "join_on_master", runs_out)
    with ScatterOnceParallel(model, "auto", devices(2)) as engine:
        with pytest.raises(torch.OutOfMemoryError) as caught, torch.no_grad():
            engine(batch(24)[0])
        assert "return less per row, or pass fewer rows" in caught.value.__notes__[-1]
        # Before them a few rows may be computed, to find which outputs have rows.
        assert [size for size in model.sizes if size > 3] == [12, 12]
        del caught


def test_copied_engine_knows_its_accum():
    model = Budgets(3, 2).eval()
    engine = ScatterOnceParallel(model, "auto", ["cpu"] * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.forward_backward(*batch(24), CE)
        evaluate(engine, "a function", 24)
        model.error = None
        for twin in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
            assert len(twin.plan(24).shares[0].micro_batches) == 4
            twin.module.error = FORMS["torch"]
            twin.module.sizes.clear()
            evaluate(twin, "a function", 24)
            assert max(twin.module.sizes) == 12
            twin.close()
    engine.close()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_trial_results_freed_before_retry(devices, mode):
    alive = calls().seen
    alive.clear()

    def wide(replica, x):
        if len(calls().seen) < 7 and not torch.is_grad_enabled():
            tensors = [each for each in gc.get_objects() if type(each) is Tensor]
            calls().seen.append(sum(tensor.shape[1:] == (77,) for tensor in tensors))
        if len(x) > 3:
            raise FORMS["torch"]()
        return torch.zeros(len(x), 77)

    with (
        mode(),
        ScatterOnceParallel(Budgets().eval(), "auto", devices(1)) as engine,
        pytest.warns(UserWarning, match="is the smallest that fits"),
    ):
        assert engine.map(wide, batch(24)[0]).shape == (24, 77)
    # 24, 12 and 6 rows do not fit; a trial of 8 sub-steps does, with two of them; then
    # 4 and 4 rows do not.
    assert alive == [0, 0, 0, 0, 1, 0, 0]
