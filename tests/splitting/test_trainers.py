"""Samples of data sets in the place of rows, and what is no trainer."""

from __future__ import annotations

import pytest
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
    assert columns["text"].flatten().tolist() == [2, 3]
