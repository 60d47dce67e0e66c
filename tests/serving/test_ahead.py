"""Test the encoding of next windows before users' windows slide."""

import threading

import numpy as np
import pytest

from serving.http.requests import Events
from serving.http.worker import Worker
from tests.serving.plain import DENSE, item_ids, make_config, make_model, serve
from tests.serving.random_operations import Campaign
from tests.serving.test_random_operations import BSA

N, SLIDE = 64, 16  # events of a window, events that leave it at a time; the next window is encoded from 61 events on


@pytest.fixture(scope="module")
def small():
    config = make_config(max_seq_len=N)
    return config, make_model(config)


def append(recommender, begin, end, user="ann"):
    """Append events begin .. end - 1 of a user, one at a time."""
    rng = np.random.default_rng(3)
    items, times = rng.choice(item_ids(), 3 * N), np.cumsum(rng.integers(1, 9_000, 3 * N))
    for event in range(begin, end):
        recommender.append([user], items[event : event + 1], times[event : event + 1])


def same_scores(served, fresh):
    one, other = (recommender.score(["ann"], [item_ids()], 10**7) for recommender in (served, fresh))
    np.testing.assert_allclose(one, other, atol=2e-6)


def encoded(recommender, begin, end):
    before = recommender.statistics["tokens_encoded"]
    append(recommender, begin, end)
    return recommender.statistics["tokens_encoded"] - before


def test_a_slide_encodes_only_new_events(small):
    served, fresh = serve(*small, cache_bytes=2**23), serve(*small, cache_bytes=2**23)
    append(served, 0, 60)
    assert served.encode_ahead() == 0 and served.statistics["windows_ahead"] == 0
    append(served, 60, 62)
    before = served.statistics["pages_in_use"]
    assert [served.encode_ahead(20) for _ in range(4)] == [20, 20, 5, 0]
    facts = served.statistics
    assert (facts["windows_ahead"], facts["tokens_encoded_ahead"]) == (1, 45) and facts["pages_in_use"] > before
    append(served, 62, 64)
    assert encoded(served, 64, 65) == 3  # two new events, and the last one before
    assert served.statistics["windows_ahead"] == 0 and served.statistics["pages_in_use"] == before
    append(fresh, 0, 64)
    assert encoded(fresh, 64, 65) == N - SLIDE
    same_scores(served, fresh)


def test_late_events_evictions_and_deletions_free_next_windows(small):
    served, fresh = serve(*small, cache_bytes=2**23), serve(*small, cache_bytes=2**23)
    for recommender in (served, fresh):
        append(recommender, 0, 63)
        assert recommender is fresh or recommender.encode_ahead(30) == 30
        recommender.append(["ann"], item_ids()[:1], [int(recommender.history("ann").timestamps[40])])
        assert recommender is fresh or recommender.encode_ahead(10**3) > 0
        append(recommender, 63, 70)
    same_scores(served, fresh)
    append(served, 70, 78)
    assert served.encode_ahead(10) == 10 and served.evict(["ann"]) == 1
    assert served.statistics["pages_in_use"] == served.encode_ahead() == 0
    append(served, 78, 79)
    assert served.recommend(["ann"], at=10**7)[0].shape == (1, 10)
    assert served.encode_ahead(10) == 10 and served.forget("ann")
    assert served.statistics["pages_in_use"] == served.encode_ahead() == 0


def test_next_windows_take_no_pages_of_other_users(small):
    """Next windows only take free pages, and are freed as soon as other users need the pages."""
    config, model = small
    whole = serve(*small, cache_bytes=2**23).description["bytes_per_user"]
    served = serve(config, model, cache_bytes=2 * whole)
    append(served, 0, 62, "ann")
    append(served, 0, 62, "bob")
    assert served.encode_ahead() == 0  # both windows fill the pages
    served.evict(["bob"])
    append(served, 62, 63, "ann")
    assert served.encode_ahead(10**3) > 0 and served.statistics["windows_ahead"] == 1
    served.recommend(["bob"], at=10**7)
    facts = served.statistics
    assert (facts["windows_ahead"], facts["users_with_pages"], facts["evictions"]) == (0, 2, 0)


@pytest.mark.parametrize(("attention", "task"), [(BSA, "retrieval"), (DENSE, "ranking")])
def test_random_operations_on_a_user(attention, task, tmp_path):
    """Compare with a model that recomputes everything, with late events, evictions and deletions."""
    campaign = Campaign(make_config(attention, task=task), 2, 1, 3, tmp_path)
    campaign.run(30)
    assert campaign.ahead > 0 and campaign.worst > 0


def test_the_service_encodes_next_windows_while_idle(small):
    served, done = serve(*small, lambda: 10**7, cache_bytes=2**23), threading.Event()

    class Idle(Worker):
        def _encode_ahead(self):
            count = super()._encode_ahead()
            if served.statistics["tokens_encoded_ahead"] == 62 - SLIDE - 1 and not count:
                done.set()
            return count

    worker = Idle(served, None)
    worker.start()
    events = Events(["ann"] * 62, item_ids()[[5] * 62].tolist(), list(range(62)), None)
    assert worker.put(events).result()
    assert done.wait(300) and served.statistics["windows_ahead"] == 1
    worker.stop()
