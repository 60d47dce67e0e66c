"""Test how torch's checkpoint files are read and written; most is tested by test_checkpoints.py."""

import pytest

from training.dcp import reason


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("wrong\nand more"), "wrong"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_the_reason_of_an_error_is_never_empty(error, expected):
    assert reason(error) == expected
