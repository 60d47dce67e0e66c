"""Test `Recommender`: portions, windows, candidates, ids, errors, pages, threads, the saved store."""

import itertools
import json
import resource
import threading

import numpy as np
import pytest

from data.vocabulary import Vocabulary
from serving import (
    CacheFull,
    InvalidRequest,
    LimitReached,
    MissingActions,
    NoHistory,
    Recommender,
    ServingError,
    ServingOptions,
    StoreError,
    TooEarly,
    UnknownItem,
)
from serving.histories import Window
from tests.serving.plain import DENSE, NUM_ACTIONS, NUM_ITEMS, Plain, item_ids, make_config, make_model, serve

SOFTMAX = {"kind": "softmax", "position_bias": True, "time_bias": True}
BSA = {"kind": "bsa", "block_size": 8, "block_counts": 3, "selection_group": 4, "window_size": 5}
WINDOW = DENSE | {"window_size": 5}
SMALL = 2**22  # bytes of pages


def events(count, seed=0):
    rng = np.random.default_rng(seed)
    items, times = item_ids()[rng.integers(0, NUM_ITEMS, count)], np.cumsum(rng.integers(0, 40_000, count))
    return items, times, rng.integers(0, NUM_ACTIONS, count)


def portions(count, how):
    if how == "at once":
        return [count]
    rng, sizes = np.random.default_rng(count), []
    while count:
        sizes.append(1 if how == "one by one" else int(rng.integers(1, count + 1)))
        count -= sizes[-1]
    return sizes


N = 66


@pytest.mark.parametrize(
    ("attention", "cache"),
    [*itertools.product([DENSE, SOFTMAX, BSA], ["fp32", "bf16", "2bit"]), (WINDOW, "fp32"), (WINDOW, "2bit")],
)
def test_portions_do_not_matter(attention, cache):
    """With every format, answers do not depend on the calls that added events, for lengths around 64, N and 3 N."""
    if attention is BSA and cache == "2bit":
        with pytest.raises(ServingError, match="bsa needs unquantised pages"):
            serve(make_config(BSA), make_model(make_config(BSA)), cache="2bit")
        return
    config = make_config(attention, max_seq_len=N)
    model = make_model(config)
    lengths = [63, 64, 65, N + 1, 3 * N] if cache == "fp32" else [65, N + 1]
    answers = {}
    for how in ("at once", "in portions", "one by one"):
        served = serve(config, model, cache=cache, cache_bytes=SMALL)
        for user, count in enumerate(lengths):
            items, times, _ = events(count, user)
            # The last events one by one: the state before them is the same in each case.
            parts = portions(count, how) if how != "one by one" else [count - 6, *[1] * 6]
            for begin, part in zip(np.cumsum([0, *parts]), parts):
                portion = slice(begin, begin + part)
                served.append([user] * part, items[portion], times[portion])
        every = np.tile(item_ids(), (len(lengths), 1))
        answers[how] = served.score(range(len(lengths)), every, 10**9)
    for how in ("in portions", "one by one"):
        close = dict(atol=2e-6) if cache == "fp32" else dict(atol=3e-2 if cache == "2bit" else 3e-3)
        np.testing.assert_allclose(answers[how], answers["at once"], **close)
    if cache == "fp32":
        plain = Plain(config, model)
        for user, count in enumerate(lengths):
            items, times, _ = events(count, user)
            plain.append([user] * count, items, times)
            expected = plain.score(user, item_ids(), 10**9)
            np.testing.assert_allclose(answers["at once"][user], expected, atol=2e-6)


@pytest.mark.parametrize("count", [0, 1, 22, 23, 24, 25, 26, 27, 50, 1000])
@pytest.mark.parametrize("slide", [1, 3, 24])
def test_the_window_depends_only_on_the_number_of_events(count, slide):
    begin = Window(24, slide).begin(count)
    assert begin % slide == 0 and count - begin <= 24 and (begin == 0 or count - begin > 24 - slide)
    assert slide > 1 or begin == max(0, count - 24)


def test_candidates_never_see_one_another():
    for task in ("ranking", "targets", "retrieval"):
        config = make_config(task=task)
        served = serve(config, make_model(config), cache_bytes=SMALL)
        items, times, actions = events(30)
        served.append([1] * 30, items, times, None if task == "retrieval" else actions)
        candidates = item_ids()[np.random.default_rng(1).permutation(NUM_ITEMS)]
        candidates = np.append(candidates, candidates[:9])  # some items twice
        order = np.random.default_rng(2).permutation(len(candidates))
        at = int(times[-1]) + 60
        scores = served.score([1], candidates[None], at)[0]
        assert len(set(scores.tolist())) > NUM_ITEMS // 2
        assert (served.score([1], candidates[None, order], at)[0] == scores[order]).all()
        alone = np.concatenate([served.score([1], [[candidate]], at)[0] for candidate in candidates[:5]])
        np.testing.assert_allclose(alone, scores[:5], atol=1e-6)
        # They leave no trace in the pages.
        np.testing.assert_array_equal(served.score([1], candidates[None], at)[0], scores)


def test_events_that_come_late():
    """Test events before the window, which push others back into it, and ties, which come last."""
    config = make_config(max_seq_len=8)
    model = make_model(config)
    served, plain = serve(config, model, slide=3, cache_bytes=SMALL), Plain(config, model, 3)
    rng, now = np.random.default_rng(5), 0
    for _ in range(120):
        now += int(rng.integers(0, 3)) * 100
        time = now if rng.random() < 0.6 else int(rng.integers(0, now // 100 + 1)) * 100
        item = item_ids()[rng.integers(0, NUM_ITEMS)]
        for one in (served, plain):
            one.append([7], [item], [time])
        expected = plain.window(7)
        history = served.history("7")
        assert history.items.tolist() == [item for _, item, _ in expected]
        assert history.timestamps.tolist() == [time for time, *_ in expected]
    np.testing.assert_allclose(served.score([7], [item_ids()], now)[0], plain.score(7, item_ids(), now), atol=2e-6)


def test_a_request_leaves_no_trace():
    config = make_config(task="ranking")
    served = serve(config, make_model(config), cache_bytes=SMALL)
    items, times, actions = events(9)
    served.append(["a"] * 9, items, times, actions)
    first = served.score(["a"], [item_ids()], int(times[-1]))
    served.score(["a"], [item_ids()], int(times[-1]) + 10**7)
    np.testing.assert_array_equal(served.score(["a"], [item_ids()], int(times[-1])), first)
    served.append(["a"], items[:1], times[-1:] + 5, [1])
    fresh = serve(config, served.model, cache_bytes=SMALL)
    fresh.append(["a"] * 10, [*items, items[0]], [*times, times[-1] + 5], [*actions, 1])
    at = int(times[-1]) + 9
    np.testing.assert_allclose(served.score(["a"], [item_ids()], at), fresh.score(["a"], [item_ids()], at), atol=1e-6)


@pytest.fixture(scope="module")
def small():
    config = make_config()
    return config, make_model(config)


def test_lists(small):
    served = serve(*small, cache_bytes=SMALL)
    items, times, _ = events(20)
    served.append([1] * 20, items, times)
    lists, scores = served.recommend([1, 1], k=NUM_ITEMS + 5, at=int(times[-1]))
    assert (lists[0] == lists[1]).all() and lists.shape == scores.shape == (2, NUM_ITEMS + 5)
    assert (served.recommend(["1"], k=NUM_ITEMS + 5, at=int(times[-1]))[0][0] == lists[0]).all()
    left = NUM_ITEMS - len(set(items.tolist()))
    assert (lists[0, left:] == -1).all() and np.isneginf(scores[0, left:]).all()
    assert not set(lists[0, :left].tolist()) & set(items.tolist()) and (np.diff(scores[0, :left]) <= 0).all()
    everything, _ = served.recommend([1], k=NUM_ITEMS, at=int(times[-1]), exclude_seen=False)
    assert sorted(everything[0].tolist()) == item_ids().tolist()
    assert served.recommend([], k=3)[0].shape == (0, 3)


def test_ids_of_text():
    config = make_config()
    names = np.array(sorted(f"item-{i}" for i in range(NUM_ITEMS)))
    served = Recommender(make_model(config), config, Vocabulary(names), options=ServingOptions(cache_bytes=SMALL))
    served.append(["x", "y"], ["item-1", "item-10"], [5, 6])
    lists, _ = served.recommend(["x"], k=NUM_ITEMS, at=9)
    assert lists[0, 0] in names and "item-1" not in lists[0] and lists[0, -1] == ""
    with pytest.raises(UnknownItem, match="candidates: 1 of 2 items are not known to the run: nothing"):
        served.score(["x"], [["item-1", "nothing"]], 9)


def test_errors_by_name(small):
    served = serve(*small, cache_bytes=SMALL)
    served.append([1], [100], [50])
    before = served.history(1)
    for error, call in (
        (UnknownItem, lambda: served.append([1, 1], [100, 101], [60, 61])),
        (UnknownItem, lambda: served.append([1], ["0100"], [60])),
        (UnknownItem, lambda: served.append([1], [10**18], [60])),
        (InvalidRequest, lambda: served.append([1], [10**30], [60])),
        (InvalidRequest, lambda: served.append([1], [100.0], [60])),
        (InvalidRequest, lambda: served.append([1], [100], [60.5])),
        (InvalidRequest, lambda: served.append([1], [100], [-1])),
        (InvalidRequest, lambda: served.append([1], [100], None)),
        (InvalidRequest, lambda: served.append([1], [100], [60, 61])),
        (InvalidRequest, lambda: served.append([1], [100], [60], [3])),
        (InvalidRequest, lambda: served.append([None], [100], [60])),
        (InvalidRequest, lambda: served.append([1, "x"], [100, 100], [60, 60])),
        (InvalidRequest, lambda: served.append(["x", 1], [100, 103], [60, 60])),
        (NoHistory, lambda: served.recommend([2])),
        (NoHistory, lambda: served.history("nobody")),
        (NoHistory, lambda: served.pin(["nobody"])),
        (TooEarly, lambda: served.recommend([1], at=49)),
        (TooEarly, lambda: served.score([1], [[100]], at=[49])),
        (InvalidRequest, lambda: served.recommend([1], at=51.5)),
        (InvalidRequest, lambda: served.recommend([1], at=[51, 52])),
        (InvalidRequest, lambda: served.recommend([1], k=0)),
        (InvalidRequest, lambda: served.recommend([1], k=True)),
        (InvalidRequest, lambda: served.score([1], [100])),
        (InvalidRequest, lambda: served.score([1], [[100], [100, 103]])),
        (InvalidRequest, lambda: served.score([1], [[100], [100]])),
    ):
        with pytest.raises(error) as raised:
            call()
        assert type(raised.value) is error and "\n" not in str(raised.value)
    assert served.history(1).count == before.count == 1 and served.statistics["users"] == 1


def test_wrong_ids_and_times_are_shown(small):
    served = serve(*small, cache_bytes=SMALL)
    with pytest.raises(InvalidRequest, match="users: expected a list of ids, got 'ann'"):
        served.recommend("ann")
    with pytest.raises(InvalidRequest, match="timestamps: expected whole seconds, got '2026-01-01'"):
        served.append(["ann"], [100], ["2026-01-01"])


def test_actions_are_required():
    config = make_config(action_embedding=True)
    served = serve(config, make_model(config), cache_bytes=SMALL)
    with pytest.raises(MissingActions, match="the run reads actions, expected one for each event"):
        served.append([1], [100], [5])
    with pytest.raises(InvalidRequest, match="actions: 6 is not known to the run, expected 0 to 5"):
        served.append([1], [100], [5], [6])
    served.append([1], [100], [5], [5.0])
    assert served.history(1).actions.tolist() == [5]


def test_limits(small):
    served = serve(*small, cache_bytes=SMALL, most_users=2, most_events=3)
    served.append([1, 2], [100, 100], [1, 1])
    with pytest.raises(LimitReached, match="at most 2 users"):
        served.append([1, 3], [100, 100], [2, 2])
    with pytest.raises(LimitReached, match="at most 3 events"):
        served.append([1, 1, 1], [100, 100, 100], [2, 2, 2])
    assert served.history(1).count == 1


@pytest.mark.parametrize(
    ("attention", "changes", "options", "message"),
    [
        ({"kind": "htree"}, {}, {}, r"layer 0 \(htree\) cannot be served: expected dense, softmax, rotatekv or bsa"),
        ({"kind": "softmax", "num_kv_heads": 1}, {}, {}, "layer 0 has 1 key heads, expected 2"),
        ({"kind": "rotatekv", "bits": 3}, {}, {}, "layer 0 has bits=3"),
        ({"kind": "rotatekv", "sparsity": 0.5}, {}, {}, "layer 0 has sparsity=0.5"),
        ({"kind": "rotatekv"}, {}, {"cache": "4bit"}, "trained for another format"),
        ([{"kind": "rotatekv"}, DENSE], {}, {}, r"layer 1 \(dense\): expected all layers or none of kind rotatekv"),
        (DENSE, {}, {"cache": "5bit"}, "cache: expected one of auto, fp32"),
        (DENSE, {}, {"sink_tokens": 2}, "sink_tokens=2: expected cache 8bit, 4bit or 2bit, got auto"),
        (DENSE, {}, {"slide": 25}, "slide: expected 1 to 24"),
        (DENSE, {}, {"cache_bytes": 999}, "cache_bytes: a window of 24 tokens takes"),
        (DENSE, {"task": "ranking", "max_seq_len": 2}, {}, "serving ranking needs at least 3"),
    ],
)
def test_runs_and_options_that_cannot_be_served(attention, changes, options, message):
    config = make_config(attention, **changes)
    with pytest.raises(ServingError, match=message):
        serve(config, make_model(config), **options)


def test_pages_are_taken_from_the_least_recently_used(small):
    """Pinned users keep their pages; evicted windows are encoded again, with the same answers."""
    served = serve(*small, cache_bytes=3 * 2 * (2 * 2 * 16 * 16 * 2 * 4 + 128))  # three windows of 24 tokens: two pages
    items, times, _ = events(20)
    for user in range(5):
        served.append([user] * 20, items, times + user)
    first = served.score([0], [item_ids()], 10**8)
    assert served.statistics["users_with_pages"] == 3 and served.statistics["evictions"] >= 3
    served.pin([0])
    for user in (1, 2, 3, 4):
        served.recommend([user], at=10**8)
    encoded = served.statistics["tokens_encoded"]
    np.testing.assert_array_equal(served.score([0], [item_ids()], 10**8), first)
    assert served.statistics["tokens_encoded"] == encoded
    # More users than fit, the pinned one among them.
    assert served.recommend(range(5), at=10**8)[0].shape == (5, 10)
    served.pin([1, 2])
    served.recommend([1, 2], at=10**8)
    with pytest.raises(CacheFull, match="3 pinned users fill the cache"):
        served.recommend([3], at=10**8)
    served.append([3, 5], [100, 100], [10**7] * 2)
    assert served.history(3).count == 21 and served.history(5).count == 1
    assert served.evict([1]) == 1 and served.evict([1]) == 0
    served.unpin([2])
    assert served.forget(0) and not served.forget(0)
    served.recommend([3, 4], at=10**8)


def test_a_saved_store(small, tmp_path):
    for cache, sinks in (("fp32", 0), ("2bit", 2)):
        served = serve(*small, cache=cache, sink_tokens=sinks, cache_bytes=SMALL)
        for user in range(4):
            items, times, _ = events(30 + user, user)
            served.append([user] * len(items), items, times, encode=user != 3)
        served.pin([1])
        served.save(tmp_path / cache)
        other = serve(*small, cache=cache, sink_tokens=sinks, cache_bytes=SMALL)
        other.append([9], [100], [1])
        other.restore(tmp_path / cache)
        same = ("users", "users_with_pages", "users_pinned", "pages_in_use")
        assert [other.statistics[name] for name in same] == [served.statistics[name] for name in same] == [4, 3, 1, 6]
        actual, expected = (one.score(range(3), [item_ids()] * 3, 10**9) for one in (other, served))
        np.testing.assert_array_equal(actual, expected)
        assert other.statistics["tokens_encoded"] == 0
        other.append([0], [103], [10**8])
        served.append([0], [103], [10**8])
        actual, expected = (one.score([0, 3], [item_ids()] * 2, 10**9) for one in (other, served))
        np.testing.assert_array_equal(actual, expected)
    # Pages of another format are ignored.
    other = serve(*small, cache_bytes=SMALL)
    other.restore(tmp_path / "2bit")
    assert other.statistics["users"] == 4 and other.statistics["users_with_pages"] == 0
    for options, message in (({"slide": 1}, "slide 6, expected 1"),):
        with pytest.raises(StoreError, match=message):
            serve(*small, cache_bytes=SMALL, **options).restore(tmp_path / "fp32")


def test_a_store_of_other_weights_restores_only_events(small, tmp_path):
    """A resumed run has the same id and other weights: pages of the old weights are not used."""
    config, model = small
    items, times, _ = events(30)
    before, fresh, after = (serve(config, one, cache_bytes=SMALL) for one in (model, *[make_model(config, 1)] * 2))
    for served in (before, fresh):
        served.append([7] * 30, items, times)
    before.save(tmp_path / "store")
    after.restore(tmp_path / "store")
    assert after.statistics["users"] == 1 and after.statistics["users_with_pages"] == 0
    expected, old = (served.score([7], [item_ids()], 10**9) for served in (fresh, before))
    np.testing.assert_allclose(after.score([7], [item_ids()], 10**9), expected, atol=2e-6)
    assert np.abs(old - expected).max() > 1e-2


def test_the_files_of_a_store(small, tmp_path):
    """Only its owner can read a new store; a replaced one keeps its mode, and is unchanged if the disk is full."""
    served, users = serve(*small, cache_bytes=SMALL), ["a/b", "..", "a\0", "a", "\ud800", "\n", "x" * 300, ""]
    served.append(users, [100] * len(users), list(range(len(users))))
    served.save(tmp_path / "store")
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    (tmp_path / "store").chmod(0o750)
    served.save(tmp_path / "store")
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o750
    served.append(users, [103] * len(users), [9] * len(users))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 500, 5000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with pytest.raises(StoreError, match="cannot be written: File too large"):
                served.save(tmp_path / "store")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    served.restore(tmp_path / "store")
    assert [served.history(user).timestamps.tolist() for user in users] == [[time] for time in range(len(users))]
    assert all(served.forget(user) for user in users) and served.num_users == 0


@pytest.mark.parametrize("file", ["store.json", "events.npz", "pages.safetensors"])
@pytest.mark.parametrize("fault", ["missing", "cut", "other"])
def test_a_damaged_store_changes_nothing(small, tmp_path, file, fault):
    served = serve(*small, cache_bytes=SMALL)
    served.append([1, 1], [100, 103], [5, 6])
    served.save(tmp_path / "store")
    path = tmp_path / "store" / file
    if fault == "missing":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] if fault == "cut" else content[:-9] + b"!" * 9)
    served.append([2], [100], [7])
    with pytest.raises(StoreError) as raised:
        served.restore(tmp_path / "store")
    assert "\n" not in str(raised.value)
    assert served.statistics["users"] == 2 and served.recommend([1, 2], at=9)[0].shape == (2, 10)
    if file == "store.json" and fault == "other":
        path.write_text(json.dumps({"layout": 2, "users": [1]}))
        with pytest.raises(StoreError):
            served.restore(tmp_path / "store")


def test_several_threads_read_while_one_writes(small):
    """Each answer is that of a state between two appends."""
    served = serve(*small, cache_bytes=2**16)
    items, times, _ = events(12)
    served.append([0] * 2, items[:2], times[:2])
    at = int(times[-1])
    reference, valid = serve(*small, cache_bytes=SMALL), []
    for count in range(1, 13):
        reference.append([0], items[count - 1 : count], times[count - 1 : count])
        valid.append(reference.score([0], [item_ids()], at)[0])
    answers, stop = [], threading.Event()

    def read():
        while not stop.is_set():
            answers.append(served.score([0], [item_ids()], at)[0])
            served.recommend([0], at=at)
            served.history(0)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for count in range(2, 12):
        served.append([0, 1], [items[count]] * 2, [times[count]] * 2)
    answers.append(served.score([0], [item_ids()], at)[0])
    stop.set()
    for reader in readers:
        reader.join()
    assert all(min(np.abs(scores - one).max() for one in valid) < 2e-6 for scores in answers)
    np.testing.assert_allclose(answers[-1], served.score([0], [item_ids()], at)[0], atol=1e-6)
