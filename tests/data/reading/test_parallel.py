"""Test work on several cores: results are in order, the first error ends all threads."""

import threading

import pytest

from data.reading.parallel import Overlapped, in_parallel


class Ended(BaseException):
    """An error that is not an Exception, such as an interrupt."""


def test_results_have_the_order_of_the_items():
    barrier = threading.Barrier(2)  # both threads run work at the same time

    def work(number):
        if number < 2:
            barrier.wait()
        return number * number

    assert in_parallel(work, range(50), 2) == [number * number for number in range(50)]
    assert in_parallel(work, [], 2) == []


@pytest.mark.parametrize("error", [ValueError, Ended])
def test_the_first_error_ends_the_work(error):
    done = []

    def work(number):
        if number == 3:
            raise error
        done.append(number)

    with pytest.raises(error):
        in_parallel(work, range(1000), 1)
    assert done == [0, 1, 2]

    def items():
        yield 1
        raise error

    with pytest.raises(error):
        in_parallel(done.append, items(), 2)


def test_overlapped():
    order, gate = [], threading.Event()
    with Overlapped() as writer:
        writer.start(lambda: (gate.wait(), order.append("first")))
        order.append("meanwhile")
        gate.set()
        writer.start(lambda: order.append("second"))
    assert order == ["meanwhile", "first", "second"]

    def fails():
        raise Ended

    with pytest.raises(Ended), Overlapped() as writer:
        writer.start(fails)
        writer.start(lambda: order.append("never"))
    assert len(order) == 3
