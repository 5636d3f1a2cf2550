"""Samples of data sets in the place of rows, and what is no trainer."""

from __future__ import annotations

import pytest
import torch
from splitting.loop_models import Net, images, new

from scatterpar.splitting import of_trainer
from scatterpar.splitting.trainers import as_tensors


def test_other_trainer_refused():
    with pytest.raises(TypeError, match="make must return a trainer"):
        of_trainer(lambda model, steps: object(), new(Net), images())


def test_samples_count_by_their_columns():
    columns = as_tensors(
        [{"labels": [1, -100, 2], "text": "ab"}, {"labels": [3], "text": "abc"}]
    )
    assert columns["labels"].tolist() == [[1, -100, 2], [3, -100, -100]]
    assert columns["text"].tolist() == [2, 3]
    assert columns["len(labels)"].tolist() == [3, 1]
    assert "len(text)" not in columns


def test_samples_may_be_tuples():
    columns = as_tensors([(torch.ones(2, 2), 1), (torch.ones(2, 2), 0)])
    assert columns[0].shape == (2, 4)
    assert columns[1].tolist() == [1, 0]
    assert as_tensors([object()])["sample"].tolist() == [1]
    assert as_tensors([{}, {}]) == {}
