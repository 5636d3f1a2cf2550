"""Parts of a Trainer's steps: pairs as rows, what is recorded, whose class it is."""

from __future__ import annotations

import inspect

import pytest
import torch
from harness.optional import needed

needed("transformers", "'.[trainer]'")

import transformers  # noqa: E402
from harness.trainers import arguments, quietly, sequence_classifier  # noqa: E402

from scatterpar.batch.markers import Rows  # noqa: E402
from scatterpar.integrations import trainer_loop  # noqa: E402
from scatterpar.integrations.trainer_loop import loss_class  # noqa: E402
from scatterpar.integrations.transformers import (  # noqa: E402
    ScatterOnceTrainer,
)
from scatterpar.objects.references import names_in  # noqa: E402
from scatterpar.objects.walk import function_of  # noqa: E402

pytestmark = [pytest.mark.trainers, pytest.mark.draws]


def test_rows_of_pairs_are_divided_and_joined():
    """The chosen rows of some pairs come first, then the rejected ones."""
    ids = torch.arange(12).reshape(6, 2)
    batch = {"input_ids": ids, "beta": torch.tensor(0.1), "texts": ["a"] * 6}
    divided = trainer_loop._divided_by_pairs(batch)
    assert isinstance(divided["input_ids"], Rows)
    assert divided["beta"] is batch["beta"]
    assert divided["texts"] is batch["texts"]
    pairs = divided["input_ids"].entries
    assert len(pairs) == 3
    assert torch.equal(trainer_loop._joined_pairs(pairs), ids)
    assert torch.equal(trainer_loop._joined_pairs(pairs[1:2]), ids[[1, 4]])


def test_margins_are_those_of_all_rows():
    metrics = {"rewards/chosen": 3.0, "rewards/rejected": 1.0, "rewards/margins": 9.0}
    trainer_loop._replace_margins(metrics)
    assert metrics["rewards/margins"] == 2.0
    of_one_kind = {"rewards/chosen": 3.0}
    trainer_loop._replace_margins(of_one_kind)
    assert of_one_kind == {"rewards/chosen": 3.0}


class Accelerator:
    """As accelerate's: it gathers from one process."""

    process_index = 0

    def gather(self, tensor):
        return tensor

    gather_for_metrics = gather

    def log(self, values):
        raise AssertionError("a call's logs wait for the end of the step")


def test_logs_of_a_call_wait_with_their_values():
    accelerator = Accelerator()
    logs = []
    placed = trainer_loop._Recording(
        accelerator, torch.device("cpu"), logs, lambda value: ("gathered", value)
    )
    loss = torch.tensor(2.0, requires_grad=True)
    placed.log({"loss": loss})
    assert placed.gather(1) == placed.gather_for_metrics(1) == ("gathered", 1)
    assert placed.process_index == 0
    (log, values) = logs[0][:2]
    assert log == accelerator.log
    assert not values[0]["loss"].requires_grad


class OfLibrary:
    def compute_loss(self):
        """Its own."""


OfLibrary.__module__ = "trl.trainer"


class OfUser(OfLibrary):
    def compute_loss(self):
        """Another one."""


def test_class_of_the_loss_is_the_first():
    assert loss_class(OfUser()) is OfUser
    assert loss_class(OfUser(), "trl") is OfLibrary
    assert loss_class(object()) is None


class Counts:
    """A smoother of labels, or a function of a loss, of the user's."""

    def __call__(self, *args, **kwargs):
        raise NotImplementedError


def of_user(self, *args, **kwargs):
    raise NotImplementedError


STOCK = transformers.Trainer.compute_loss
# What is the user's: a method, an attribute, a hook, or a function in a library's
# class. Whether replicas take turns in a step, and in an evaluation.
TURNS = {
    "nothing": (None, False, False),
    "compute_loss": ("method", True, True),
    "_prepare_inputs": ("method", True, True),
    "_prepare_input": ("method", True, True),
    "_get_num_items_in_batch": ("method", True, True),
    "compute_loss_context_manager": ("method", False, True),
    "get_tp_size": ("method below the library's", True, True),
    "prediction_step": ("method", False, True),
    "training_step": ("method", False, False),
    "evaluation_loop": ("method", False, False),
    "get_train_dataloader": ("method", False, False),
    "create_optimizer": ("method", False, False),
    "log": ("method", False, False),
    "of_its_own": ("method", False, False),
    "compute_loss_func": ("attribute", True, True),
    "label_smoother": ("attribute", True, True),
    "autocast_smart_context_manager": ("attribute", False, True),
    "compute_metrics": ("attribute", False, False),
    "data_collator": ("attribute", False, False),
    "forward hook": ("hook", True, True),
    "full_backward_hook": ("hook on gradients", True, True),
    "full_backward_pre_hook": ("hook on gradients", True, True),
    "compute_loss of the library": ("replaced", True, True),
    "_save_rng_state": ("method", False, False),
    "compute_loss by its name": ("library's own", False, False),
}


def trainer_with(monkeypatch, folder, name, how):
    methods = {name: of_user} if how == "method" else {}
    if how == "library's own":
        methods = {"compute_loss": STOCK}
    bases = [ScatterOnceTrainer]
    if how == "method below the library's":
        bases.append(type("Below", (), {name: of_user}))
    if how == "replaced":
        monkeypatch.setattr(transformers.Trainer, "compute_loss", of_user)
    cls = type("Own", tuple(bases), methods)
    trainer = cls(
        sequence_classifier(), arguments(folder), device_ids=["cpu:0", "cpu:1"]
    )
    if how == "attribute":
        setattr(trainer, name, Counts())
    if how == "hook":
        trainer.model.register_forward_hook(lambda *_: None)
    if how == "hook on gradients":
        getattr(trainer.model, f"register_{name}")(lambda *_: None)
    return trainer


@pytest.mark.parametrize("name", TURNS)
def test_all_but_librarys_functions_take_turns(monkeypatch, tmp_path, name):
    how, in_steps, in_evaluations = TURNS[name]
    trainer = trainer_with(monkeypatch, tmp_path, name, how)
    loop = trainer._loop
    quietly(loop.engine_of_the_model)
    loop._choose_turns(trainer_loop.OF_LOOP | trainer_loop.OF_PREDICTIONS)
    assert loop.takes_turns == in_steps
    loop._choose_turns(trainer_loop.OF_LOOP)
    assert loop.takes_turns == in_evaluations
    loop.close()


LIBRARIES = {
    "transformers": ["Trainer", "Seq2SeqTrainer"],
    "trl": ["SFTTrainer", "DPOTrainer", "RewardTrainer"],
    "trl.experimental.kto": ["KTOTrainer"],
    "sentence_transformers": ["SentenceTransformerTrainer", "CrossEncoderTrainer"],
}


def called_by(cls, names):
    """The methods whose names are in the code of methods, from some on."""
    names = [*names]
    for name in names:  # which grow
        for base in cls.__mro__ if name != "log" else ():
            function = function_of(vars(base).get(name))
            if function is not None:
                names += names_in(inspect.unwrap(function).__code__) - {*names}
    return {*names}


@pytest.mark.parametrize("library", LIBRARIES)
def test_calls_run_no_function_of_the_loop(library):
    """Else one of the user's would be called on copies of the Trainer."""
    module = pytest.importorskip(library)
    for name in LIBRARIES[library]:
        cls = getattr(module, name)
        losses = called_by(cls, ["_prepare_inputs", "compute_loss"])
        predictions = called_by(cls, ["prediction_step", "compute_loss"])
        # In a call its log waits for the end of the step; of the other only the
        # number of a token is read.
        of_loop = trainer_loop.OF_LOOP - {"log", "processing_class"}
        assert not losses & (of_loop | trainer_loop.OF_PREDICTIONS)
        assert not predictions & of_loop
