"""Compare filters of recommendations with a plain filter over the full ranking."""

import numpy as np
import pytest

from data.features.features import feature_of
from data.features.vocabulary import FeatureVocabulary
from data.vocabulary import Vocabulary
from serving import Filter, InvalidRequest, NoHistory, Recommender, ServingOptions, UnknownFilter
from tests.serving.plain import NUM_ITEMS, item_ids, make_config, make_model

USERS, AT = 6, 10**6


def features():
    """Each item has a brand, except a tenth of the items, and up to three tags."""
    rng = np.random.default_rng(0)
    branded = np.flatnonzero(rng.random(NUM_ITEMS) < 0.9)
    tags = np.sort(rng.integers(0, NUM_ITEMS, 2 * NUM_ITEMS))
    return (
        feature_of("items", "brand", "category", NUM_ITEMS, branded, rng.choice(list("abcdef"), len(branded))),
        feature_of("items", "tags", "list", NUM_ITEMS, tags, rng.choice(["new", "red", "wool", "sale"], len(tags))),
        feature_of("items", "price", "number", NUM_ITEMS, np.arange(NUM_ITEMS), rng.random(NUM_ITEMS)),
    )


def recommender(**options):
    config = make_config()
    vocabulary = Vocabulary(item_ids(), features=FeatureVocabulary((), items=features()))
    options = ServingOptions(**{"cache_bytes": 2**22, **options})
    served = Recommender(make_model(config), config, vocabulary, options=options, clock=lambda: AT)
    rng = np.random.default_rng(1)
    for user in range(USERS):
        count = 4 * user + 1
        served.append([user] * count, rng.choice(item_ids(), count), np.sort(rng.integers(0, AT, count)))
    return served


class PlainFilter:
    """Filter like a shop would: check every item of the full ranking in order."""

    def __init__(self, served):
        self.values = {
            feature.name: [
                set(feature.values[codes].tolist()) for codes in np.split(feature.codes, feature.offsets[1:-1])
            ]
            for feature in features()
        }
        self.rankings = [
            [np.ravel(x).tolist() for x in served.recommend([user], NUM_ITEMS, AT, False)] for user in range(USERS)
        ]
        self.seen = [set(served.history(user).items.tolist()) for user in range(USERS)]
        self.named: dict[str, set] = {}

    def top(self, user, k, exclude_seen=True, allow=None, deny=(), where=None, at_most=None, filters=()):
        chosen, counts = [], {}
        for item, score in zip(*self.rankings[user]):
            values = {name: item_values[(item - 100) // 3] for name, item_values in self.values.items()}
            if (exclude_seen and item in self.seen[user]) or item in set(deny):
                continue
            if (allow is not None and item not in set(allow)) or any(item not in self.named[name] for name in filters):
                continue
            if any(not values[name] & set(needed) for name, needed in (where or {}).items()):
                continue
            pairs = [(name, value) for name in at_most or {} for value in values[name]]
            if any(counts.get(key, 0) >= at_most[key[0]] for key in pairs):
                continue
            counts |= {key: counts.get(key, 0) + 1 for key in pairs}
            chosen.append((item, score))
        return chosen[:k]


def random_filter(rng):
    some = lambda most: rng.choice(np.append(item_ids(), [1, 2, 3]), rng.integers(0, most)).tolist()
    request = {}
    if rng.random() < 0.3:
        request["allow"] = some(60)
    if rng.random() < 0.3:
        request["deny"] = some(30)
    if rng.random() < 0.4:
        request["where"] = {"brand": rng.choice(list("abcdefx"), rng.integers(0, 4)).tolist()}
    if rng.random() < 0.2:
        request.setdefault("where", {})["tags"] = rng.choice(["new", "red", "wool", "cotton"], 2).tolist()
    if rng.random() < 0.4:
        names = rng.choice(["brand", "tags"], rng.integers(1, 3), replace=False)
        request["at_most"] = {str(name): int(rng.integers(0, 4)) for name in names}
    if rng.random() < 0.3:
        request["filters"] = rng.choice(["stock", "adult"], rng.integers(1, 3), replace=False).tolist()
    return request


@pytest.mark.parametrize("requests", [100, pytest.param(30_000, marks=pytest.mark.slow)])
def test_random_requests_against_a_plain_filter(requests, monkeypatch):
    """The lists are exact: the k best items of the full ranking that pass. Tiles are smaller than the catalogue."""
    monkeypatch.setattr("evaluation.scores.TILE", 60)
    monkeypatch.setattr("evaluation.item_filters.FIRST", 4)
    served, rng = recommender(), np.random.default_rng(2)
    plain, lengths = PlainFilter(served), []
    outputs = served._engine.answer(served.check_requests([str(user) for user in range(USERS)], AT))
    for turn in range(requests):
        if turn % 20 == 0:
            name = ("stock", "adult")[turn // 20 % 2]
            plain.named[name] = set(rng.choice(item_ids(), 25).tolist())
            if turn == 0:
                plain.named["adult"] = set(item_ids()[::2].tolist())
            for each in plain.named:
                assert served.filters.put(each, sorted(plain.named[each])) == (len(plain.named[each]), 0)
        request, k = random_filter(rng), int(rng.integers(1, NUM_ITEMS + 3))
        seen = bool(rng.random() < 0.5)
        users = rng.integers(0, USERS, rng.integers(1, 4))
        passing = [served.filters.build(Filter(**request))] * len(users)
        without = [np.array([(item - 100) // 3 for item in sorted(plain.seen[user])], np.int32) for user in users]
        best = served._search.lists(outputs[users], k, without if seen else [], passing)
        for user, items, scores in zip(users, *served._listed(*best, k)):
            expected = plain.top(user, k, seen, **request)
            lengths.append(len(expected))
            assert items.tolist() == [item for item, _ in expected] + [-1] * (k - len(expected)), request
            np.testing.assert_allclose(scores[: len(expected)], [score for _, score in expected], atol=2e-6)
            assert np.isneginf(scores[len(expected) :]).all()
    assert min(lengths) == 0 and max(lengths) > 30


def test_each_request_of_a_round_has_its_filter():
    """Check the lists without padding, and with padding as on a GPU."""
    served = recommender()
    plain = PlainFilter(served)
    requests = [{}, {"deny": [100, 103]}, {"where": {"brand": ["a"]}}, {"at_most": {"brand": 1}}, {"allow": []}, {}]
    filters = [served.filters.build(Filter(**request)) for request in requests]
    for padded in (False, True):
        served._engine.padded = padded
        checked = served.check_requests([str(user) for user in range(USERS)], AT)
        items, _ = served.recommend_checked(checked, 5, [None] * USERS, filters)
        for user, request in enumerate(requests):
            expected = [item for item, _ in plain.top(user, 5, **request)]
            assert items[user].tolist() == expected + [-1] * (5 - len(expected))


def test_unknown_and_invalid_filters():
    served = recommender()
    built = served.filters.build(Filter(allow=[100, 1, 103, 2], deny=[5], where={"brand": ["a", "zzz"]}))
    assert built.unknown == {"allow": 2, "deny": 1, "where": 1}
    served.filters.put("stock", [100])
    assert served.filters.put("stock", [103, 103, 1]) == (1, 1) and served.filters.sizes == {"stock": 1}
    assert served.recommend([0], 2, AT, False, filters=["stock"])[0].tolist() == [[103, -1]]
    assert served.filters.drop("stock") and not served.filters.drop("stock")
    for error, message, request in (
        (UnknownFilter, "there is no list named stock", {"filters": ["stock"]}),
        (InvalidRequest, "colour is not a feature of the items: expected one of", {"where": {"colour": []}}),
        (InvalidRequest, "at_most: price is a number", {"at_most": {"price": 1}}),
        (InvalidRequest, "at_most: brand: expected a whole number", {"at_most": {"brand": -1}}),
        (InvalidRequest, "where: brand: expected a list of values, got 'a'", {"where": {"brand": "a"}}),
        (InvalidRequest, "allow: expected integers or text", {"allow": [1.5]}),
    ):
        with pytest.raises(error, match=message):
            served.recommend([0], 2, AT, **request)


def test_users_without_events_get_popular_items():
    """Recent events have more weight; events of deleted users do not count; filters apply."""
    served = recommender(popular_days=1.0)
    with pytest.raises(NoHistory):
        served.recommend(["new"], 3)
    for user in range(USERS):
        served.forget(user)
    served.append(["x"] * 3, [100] * 3, [0] * 3)
    served.append(["y", "z", "z"], [103, 106, 106], [AT, AT, AT])  # eleven days later
    items, counts = served.recommend(["new", "y"], 4, AT, cold="popular")
    assert items[0].tolist() == [106, 103, 100, 109] and counts[0, :2].tolist() == [2, 1] and 0 < counts[0, 2] < 0.01
    assert items[1].tolist() == served.recommend(["y"], 4, AT)[0][0].tolist()
    assert served.recommend(["new"], 2, cold="popular", deny=[106])[0].tolist() == [[103, 100]]
    served.forget("z")
    assert served.recommend(["new"], 2, cold="popular")[0].tolist() == [[103, 100]]
    with pytest.raises(InvalidRequest, match="cold: expected one of popular, error"):
        served.recommend(["new"], 2, cold="warm")
