"""The arguments of a Trainer: its own numbers inside, the user's outside."""

from __future__ import annotations

import copy
import pickle

import pytest
from harness.optional import needed

transformers = needed("transformers", "'.[trainer]'")

from scatterpar.integrations.trainer_arguments import (  # noqa: E402
    ChangedNumber,
    changed_class,
    own_arguments,
    with_user_values,
)

pytestmark = [pytest.mark.trainers, pytest.mark.draws]
ROWS = "per_device_train_batch_size"


def changed(folder):
    """Arguments of 3 rows, of which a Trainer has made 12."""
    given = transformers.TrainingArguments(folder, **{ROWS: 3, "report_to": "none"})
    arguments = own_arguments(given)
    vars(arguments)[ROWS] = ChangedNumber(12)
    vars(arguments)[ROWS].user_value = 3
    arguments.__class__ = changed_class(type(arguments))
    return given, arguments


def test_users_arguments_stay(tmp_path):
    given, arguments = changed(tmp_path)
    assert (vars(given)[ROWS], vars(arguments)[ROWS]) == (3, 12)
    assert type(given) is transformers.TrainingArguments
    assert own_arguments("no arguments") == "no arguments"


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))],
)
def test_copies_and_files_have_the_users_numbers(tmp_path, copied):
    given, arguments = changed(tmp_path)
    assert type(copied(arguments)) is type(given)
    assert vars(copied(arguments))[ROWS] == 3
    assert arguments.to_dict()[ROWS] == 3


def test_number_that_a_search_has_made_is_the_users():
    """Its class is that of the number that it replaces."""
    assert with_user_values({ROWS: ChangedNumber(5)}) == {ROWS: 5}


def test_changed_class_is_made_once():
    kind = changed_class(transformers.TrainingArguments)
    assert changed_class(kind) is kind
    assert kind.__name__ == "TrainingArguments"
