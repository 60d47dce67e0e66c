"""Helpers of tests of raw files and their cache."""

import numpy as np
import pytest

from data.datasets import DataError

GOOD = "7\t900\t5\t200\n" * 16
CSV = "user,item,timestamp,how\nu,i,1,0\n"


def events(dataset):
    """Return [(user id, item id, timestamp, action)] in the order of the columns."""
    users = np.repeat(np.arange(dataset.num_users), np.diff(dataset.user_offsets))
    actions = [None] * dataset.num_events if dataset.actions is None else dataset.actions.tolist()
    return list(
        zip(
            dataset.user_ids[users].tolist(),
            dataset.item_ids[dataset.items].tolist(),
            dataset.timestamps.tolist(),
            actions,
        )
    )


def error_of(load, *args, lines=1, **kwargs):
    """Return the message of the DataError, and check its number of lines: one, unless several rows are bad."""
    with pytest.raises(DataError) as caught:
        load(*args, **kwargs)
    message = str(caught.value)
    assert message and len(message.split("\n")) == lines
    return message
