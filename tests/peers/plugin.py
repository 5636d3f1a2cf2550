"""A plugin of pytest for the tests of another library: ``--replicas`` puts two replicas
where the library would train on one CPU, and ``--outcomes`` records what each test did.
"""

import importlib
import json
import os
import weakref

import pytest
from harness.optional import import_torchvision_first

import_torchvision_first()  # before the conftest.py of the library

DEVICES = ["cpu:0", "cpu:1"]

trainings = []  # of the running test, those that replicas take part in, or could
reports = []  # of its setup, call and teardown


def pytest_addoption(parser):
    parser.addoption("--peer", choices=sorted(PEERS))
    parser.addoption("--replicas", action="store_true")
    parser.addoption("--outcomes", help="a file, to which lines of JSON are added")
    parser.addoption("--only", help="a file with the names of tests, one per line")


def pytest_configure(config):
    peer = config.getoption("--peer")
    if peer == "fastai":
        config.pluginmanager.import_plugin("peers.notebooks")
    PEERS[peer](config.getoption("--replicas"))


def pytest_collection_modifyitems(config, items):
    only = config.getoption("--only")
    if only is None:
        return
    with open(only, encoding="utf-8") as file:
        names = set(file.read().splitlines())
    # Cells of a notebook need those before them.
    files = set(map(file_of, names))
    kept = []
    for item in items:
        is_cell_of_one = item.path.suffix == ".ipynb" and file_of(item.nodeid) in files
        if item.nodeid in names or is_cell_of_one:
            kept.append(item)
    items[:] = kept


def file_of(name):
    """The file of the test with this name."""
    return name.split("::")[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    # Cells of a notebook look at what those before them have trained.
    if item.path.suffix != ".ipynb" or item is item.parent.first:
        trainings.clear()
    reports.clear()
    result = yield
    outcome = "passed"
    text = ""
    for report in reports:
        if report.outcome != "passed" and outcome == "passed":
            outcome = report.outcome
            text = str(report.longrepr)
    line = {"name": item.nodeid, "outcome": outcome, "text": text}
    line["trainings"] = len(trainings)
    with open(item.config.getoption("--outcomes"), "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return result


def pytest_runtest_logreport(report):
    reports.append(report)


def _lightning(with_replicas):
    """Trainers that choose the strategy of one CPU."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.connectors import accelerator_connector

    from scatterpar.integrations.lightning import ScatterOnceStrategy

    connector = accelerator_connector._AcceleratorConnector
    stock_choice = connector._choose_strategy
    stock_run = Trainer._run
    chosen = weakref.WeakSet()

    def _choose_strategy(self):
        strategy = stock_choice(self)
        if (
            type(strategy) is SingleDeviceStrategy
            and strategy.root_device.type == "cpu"
        ):
            if with_replicas:
                strategy = ScatterOnceStrategy(DEVICES)
            chosen.add(strategy)
        return strategy

    def _run(self, *args, **kwargs):
        if self.strategy in chosen:
            trainings.append(type(self))
        return stock_run(self, *args, **kwargs)

    connector._choose_strategy = _choose_strategy
    Trainer._run = _run


def _fastai(with_replicas):
    """Learners on one CPU, with the callback that their users add."""
    os.environ.setdefault("MPLBACKEND", "Agg")  # nobody sees what cells draw
    from fastai.learner import Learner

    from scatterpar.integrations.fastai import ScatterOnce

    stock_init = Learner.__init__
    stock_events = Learner._with_events

    def __init__(self, *args, **kwargs):
        stock_init(self, *args, **kwargs)
        if with_replicas:
            self.add_cb(ScatterOnce(DEVICES))

    def _with_events(self, function, event, *args):
        if event == "batch":
            trainings.append(event)
        return stock_events(self, function, event, *args)

    Learner.__init__ = __init__
    Learner._with_events = _with_events


def _trl(with_replicas):
    """All trainers."""
    library = importlib.import_module("trl")
    for name in ("SFT", "DPO", "Reward", "KTO", "GRPO", "RLOO"):
        _replace(library, f"{name}Trainer", with_replicas)


def _transformers(with_replicas):
    """The trainers, with arguments of two devices, by which tests count steps."""
    library = importlib.import_module("transformers")
    for name in ("Trainer", "Seq2SeqTrainer"):
        _replace(library, name, with_replicas)
    if with_replicas:
        # 1 of a Trainer with replicas; otherwise 0, as there is no GPU.
        library.TrainingArguments.n_gpu = property(
            lambda self: vars(self).get("_n_gpu") or len(DEVICES)
        )


def _sentence_transformers(with_replicas):
    """The trainers of embeddings and of pairs."""
    library = importlib.import_module("sentence_transformers")
    _replace(library, "SentenceTransformerTrainer", with_replicas)
    _replace(library.cross_encoder, "CrossEncoderTrainer", with_replicas)


def _replace(module, name, with_replicas):
    """Put a subclass in the place of a trainer."""
    from scatterpar.integrations.transformers import ScatterOnceMixin

    bases = (getattr(module, name),)
    if with_replicas:
        bases = (ScatterOnceMixin, *bases)
    setattr(module, name, _counted(name, bases, with_replicas))


def _counted(name, bases, with_replicas):
    """A subclass with the library's name, whose objects are counted, and train on
    replicas.
    """
    devices = {"device_ids": DEVICES} if with_replicas else {}

    class Counted(*bases):
        def __init__(self, *args, **kwargs):
            trainings.append(name)
            super().__init__(*args, **devices, **kwargs)

    Counted.__name__ = Counted.__qualname__ = name
    return Counted


PEERS = {
    "fastai": _fastai,
    "lightning": _lightning,
    "sentence-transformers": _sentence_transformers,
    "transformers": _transformers,
    "trl": _trl,
}
