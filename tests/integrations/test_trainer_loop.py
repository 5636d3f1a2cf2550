"""Parts of a Trainer's steps: pairs as rows, what is recorded, whose class it is."""

from __future__ import annotations

import pytest
import torch
from harness.optional import needed

needed("transformers", "'.[trainer]'")

from scatterpar.batch.markers import Rows  # noqa: E402
from scatterpar.integrations import trainer_loop  # noqa: E402
from scatterpar.integrations.trainer_loop import loss_class  # noqa: E402

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
