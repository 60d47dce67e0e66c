"""Test features of users and events in a service: its answers are those of the model on batches with features."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from data.features.vocabulary import FeatureVocabulary, KnownFeature
from data.ranking import RankingBatch
from models.heads import normalized
from serving import InvalidRequest, Recommender, ServingError, ServingOptions
from serving.paged_pass import served_layers
from tests.serving.plain import DENSE, item_ids, make_config, make_model, vocabulary
from training.run import build_model

FEATURES = FeatureVocabulary(
    (
        KnownFeature("users", "country", "category", np.array(["de", "fr"])),
        KnownFeature("users", "tags", "list", np.array(["a", "b", "c"])),
        KnownFeature("events", "device", "category", np.array(["phone", "tv"]), "before"),
        KnownFeature("events", "watched", "number", np.array([10.0, 60.0])),
    ),
    calendar=("hour",),
)
COUNTRIES = {"de": 1, "fr": 2, "xx": 0}  # rows of the tables; training does not have xx, so it is unknown
DEVICES = {"phone": 1, "tv": 2, None: -1}


def watched_row(seconds):
    return -1 if seconds is None else 1 + (seconds >= 10) + (seconds >= 60)


class Reference:
    """The model on one sequence: a user's events as (item, time, action, device, watched)."""

    def __init__(self, config, model):
        self.config, self.model = config, model

    @torch.no_grad()
    def scores(self, events, user_rows, candidates, at, device=None):
        ranking = self.config.task.kind == "ranking"
        interleaved = ranking and self.config.task.layout == "interleaved"
        out = []
        for candidate in candidates if ranking else [None]:
            chain = [*events, *([(candidate, at, 0, device, 999)] if ranking else [])]
            items, times, actions, devices, seconds = zip(*chain)
            each, total = (2, 2 * len(chain) - 1) if interleaved else (1, len(chain))

            def column(values, each=each, total=total):
                return torch.tensor(values).repeat_interleave(each, 0)[:total]

            following = [*times[1:], at]
            queries = [time for pair in zip(times, following) for time in pair][:total] if interleaved else following
            rows = [[[DEVICES[one]], [watched_row(more)]] for one, more in zip(devices, seconds)]
            history = total - 1 if ranking else total
            has_action = torch.arange(total) % 2 == 1 if interleaved else torch.arange(total) < history
            batch = RankingBatch(
                item_ids=(column(items) - 100) // 3,
                timestamps=column(times),
                target_ids=torch.full((total,), -1),
                query_timestamps=torch.tensor(queries),
                seq_offsets=torch.tensor([0, total]),
                users=torch.zeros(1, dtype=torch.int64),
                actions=column(actions),
                user_features=torch.tensor([user_rows]),
                event_features=column(rows),
                has_action=has_action if ranking else None,
                num_targets=torch.ones(1, dtype=torch.int64) if ranking and not interleaved else None,
            )
            last = self.model.raw_output(batch)[0][-1:]
            if ranking:
                out.append(self.model.task_head(last).sigmoid()[0, 0])
            else:
                table = torch.nn.functional.normalize(self.model.item_table, dim=1)
                out = [normalized(last)[0] @ table[(int(one) - 100) // 3] for one in candidates]
        return torch.stack(out).numpy()


EVENTS = [  # item, time, action, device, watched
    (100, 3_600, 4, "phone", 5),
    (103, 7_300, 1, "tv", None),
    (106, 9_000, 5, None, 70),
    (109, 90_000, 2, "phone", 20),
]
CANDIDATES, AT = item_ids()[5:9], 100_000


def served(task, attention=DENSE, *, tokens=False, seed=0, **options):
    config = make_config(attention, task=task, max_seq_len=20, tokens=tokens)
    known = replace(vocabulary(config), features=FEATURES)
    torch.manual_seed(seed)
    model = build_model(config, known, torch.device("cpu")).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "context" in name:
                weight.mul_(20)  # so that features change the scores
    recommender = Recommender(model, config, known, options=ServingOptions(cache_bytes=2**22, **options))
    return recommender, Reference(config, model)


def append(recommender, user, events):
    items, times, actions, devices, watched = zip(*events)
    actions = None if recommender.actions is None else actions
    features = {"device": devices, "watched": watched}
    recommender.append([user] * len(events), items, times, actions, features=features)


@pytest.mark.parametrize(
    ("task", "attention", "tokens"),
    [
        ("retrieval", DENSE, False),
        ("ranking", DENSE, False),
        ("targets", DENSE, False),
        ("retrieval", DENSE | {"window_size": 2}, True),
        ("retrieval", {"kind": "softmax"}, True),
        ("targets", DENSE, True),
    ],
)
def test_answers_are_those_of_batches_with_the_features(task, attention, tokens, tmp_path):
    """Features of users may be tokens, which all later tokens attend to even with a window."""
    recommender, reference = served(task, attention, tokens=tokens)
    append(recommender, "u", EVENTS[:3])
    append(recommender, "v", EVENTS[1:])
    recommender.add_users(["u", "v"], {"country": ["de", "xx"], "tags": [["a", "c", "new"], None]})

    def check(user, events, rows, device=None):
        features = None if device is None else {"device": [device]}
        scores = recommender.score([user], [CANDIDATES], AT, features=features)[0]
        np.testing.assert_allclose(scores, reference.scores(events, rows, CANDIDATES, AT, device), atol=1e-6)
        return scores

    first = check("u", EVENTS[:3], [[1, -1, -1], [1, 3, 0]])
    check("v", EVENTS[1:], [[0], [-1]])
    append(recommender, "u", EVENTS[3:])
    before = check("u", EVENTS, [[1, -1, -1], [1, 3, 0]])
    # A change of a user's features changes this user's next answer, and no other user's.
    other = recommender.score(["v"], [CANDIDATES], AT)
    recommender.add_users(["u"], {"country": ["fr"]})
    after = check("u", EVENTS, [[2], [-1]])
    assert (first != before).all() and (after != before).all()
    assert np.array_equal(recommender.score(["v"], [CANDIDATES], AT), other)
    if task != "retrieval":  # a feature known before the user acts
        assert (check("u", EVENTS, [[2], [-1]], "tv") != after).all()
    recommender.save(tmp_path / "store")
    again, _ = served(task, attention, tokens=tokens)
    again.restore(tmp_path / "store")
    assert np.array_equal(again.score(["u"], [CANDIDATES], AT)[0], after)
    # A deleted user has no features.
    assert recommender.forget("u")
    append(recommender, "u", EVENTS)
    check("u", EVENTS, [[-1], [-1]])


def test_a_kind_without_context_is_refused():
    config = make_config(tokens=True)
    model = make_model(config)
    model.layers[1].attention = make_model(make_config({"kind": "rotatekv"})).layers[1].attention
    with pytest.raises(ServingError, match=r"layer 1 \(rotatekv\) does not support data\.features\.users\.as=tokens"):
        served_layers(model)


def test_tokens_are_rewritten_only_if_needed():
    recommender, _ = served("retrieval", tokens=True)
    count = lambda: recommender.statistics["tokens_encoded"]
    append(recommender, "u", EVENTS[:1])
    assert count() == 2  # two feature tokens; the only event is not written yet
    append(recommender, "u", EVENTS[1:3])
    append(recommender, "v", EVENTS[:3])
    assert count() == 4 + 4
    recommender.add_users(["u", "v"], {"country": ["de", None], "tags": [None, []]})  # no change for v
    recommender.score(["u", "v"], [CANDIDATES] * 2, AT)
    assert count() == 4 + 4 + 4
    append(
        recommender, "u", [(112, 10, 1, None, None)]
    )  # an event before the first one, whose time the feature tokens have
    assert count() == 4 + 4 + 4 + 5


def test_features_that_are_refused():
    recommender, _ = served("ranking")
    append(recommender, "u", EVENTS)
    for features, message in (
        ({"devise": ["tv"]}, "features: devise is not a feature of events, did you mean device?"),
        ({"watched": ["long"]}, "features: watched of events.0: expected a number, got 'long'"),
        ({"device": ["tv", "tv"]}, "features: device: expected a value for each of 1 events, got 2"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            recommender.append(["u"], [100], [AT], [4], features=features)
    with pytest.raises(
        InvalidRequest, match="features: watched is not a feature of events with known=before; the run has device"
    ):
        recommender.score(["u"], [CANDIDATES], AT, features={"watched": [3]})
    with pytest.raises(InvalidRequest, match=r"features: tags of users.0: expected a list, got 'a'"):
        recommender.add_users(["u"], {"tags": ["a"]})
    with pytest.raises(InvalidRequest, match=r"features: tags of users.0: expected at most 64 values, got 65"):
        recommender.add_users(["u"], {"tags": [[str(n) for n in range(65)]]})
    config = make_config()
    plain = Recommender(build_model(config, vocabulary(config), torch.device("cpu")), config, vocabulary(config))
    with pytest.raises(InvalidRequest, match="features: the run has no features of users"):
        plain.add_users(["u"], {"country": ["de"]})
    with pytest.raises(InvalidRequest, match="features: the run has no features of events"):
        plain.append(["u"], [100], [AT], features={"device": ["tv"]})
