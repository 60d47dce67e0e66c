"""Test frames, item vectors, similar items and explanations of `Recommender`."""

import numpy as np
import pytest
import torch

from serving import InvalidRequest, UnknownItem
from tests.serving.plain import DENSE, NUM_ITEMS, item_ids, make_config, make_model, serve

SOFTMAX = {"kind": "softmax", "position_bias": True, "time_bias": True}
EVENTS = [("a", 103, 50, 1), ("a", 130, 90, 2), ("a", 106, 400, 0), ("a", 130, 900, 5), ("b", 100, 7, 3)]
AT = 5000


def served(config):
    model = make_model(config)
    if model.repeats is not None:  # the weights of the repeat term are zero at first
        for table in model.repeats.parameters():
            torch.nn.init.normal_(table)
    recommender = serve(config, model)
    users, items, times, actions = zip(*EVENTS)
    recommender.append(users, items, times, actions if config.model.action_embedding else None)
    return recommender, model


def test_frames_equal_arrays():
    recommender, _ = served(make_config())
    items, scores = recommender.recommend(["a", "b"], k=NUM_ITEMS, at=AT)
    frame = recommender.recommend(["a", "b"], k=NUM_ITEMS, at=AT, as_frame=True)
    assert frame.columns == ["user", "rank", "item", "score"]
    some = np.isfinite(scores)
    assert some.sum() == 2 * NUM_ITEMS - 4 == len(frame) and frame["item"].to_list() == items[some].tolist()
    assert frame["score"].to_list() == scores[some].tolist()
    assert frame.filter(user="b")["rank"].to_list() == list(range(1, NUM_ITEMS))


def test_neighbours_are_the_nearest_vectors():
    recommender, _ = served(make_config())
    ids, vectors = recommender.item_vectors()
    assert ids.tolist() == item_ids().tolist() and np.allclose((vectors**2).sum(1), 1, atol=1e-5)
    frame = recommender.item_vectors(as_frame=True)
    assert frame["item"].to_list() == ids.tolist() and np.array_equal(frame["vector"].to_numpy(), vectors)
    items, cosines = recommender.similar([106, 100], k=NUM_ITEMS)
    for row, place in enumerate((2, 0)):
        expected = vectors @ vectors[place]
        others = np.delete(np.argsort(-expected, kind="stable"), 0)
        assert items[row].tolist() == [*ids[others].tolist(), -1] and cosines[row, -1] == -np.inf
        np.testing.assert_allclose(cosines[row, :-1], expected[others], atol=1e-6)
    frame = recommender.similar([106, 100], k=2, as_frame=True)
    assert frame.rows()[0][:3] == (106, 1, items[0, 0]) and frame.columns == ["item", "rank", "similar", "score"]
    with pytest.raises(UnknownItem):
        recommender.similar([7])
    with pytest.raises(InvalidRequest, match="k: expected"):
        recommender.similar([100], k=0)


@pytest.mark.parametrize(
    ("attention", "model"),
    [
        (DENSE, {"action_embedding": True}),
        (SOFTMAX, {"head": {"kind": "dot", "repeats": 4}}),
        *(pytest.param(attention, {}, marks=pytest.mark.slow) for attention in (DENSE, SOFTMAX)),
    ],
)
def test_an_effect_is_the_score_without_the_event(attention, model):
    config = make_config(attention, loss={"kind": "cross_entropy"}, **model)
    recommender, network = served(config)
    user_events = [event for event in EVENTS if event[0] == "a"]
    explanation = recommender.explain("a", 109, AT)
    assert explanation.items.tolist() == [event[1] for event in user_events]
    assert explanation.score == pytest.approx(recommender.score(["a"], [[109]], AT).item(), abs=1e-6)
    for place, effect in enumerate(explanation.effects):
        rest = [event for at, event in enumerate(user_events) if at != place]
        without = serve(config, network)
        users, items, times, actions = zip(*rest)
        without.append(users, items, times, actions if config.model.action_embedding else None)
        assert effect == pytest.approx(explanation.score - without.score(["a"], [[109]], AT).item(), abs=2e-6)
    assert np.ptp(explanation.effects) > 1e-4 and explanation.frame()["effect"].is_sorted(descending=True)
    assert np.isnan(recommender.explain("b", 109, AT).effects).all()


def test_a_long_history_is_explained_in_its_window():
    config = make_config(max_seq_len=8)
    recommender = serve(config, make_model(config))
    recommender.append(["a"] * 11, item_ids()[:11], range(11))
    assert recommender.explain("a", 100, AT).items.tolist() == recommender.history("a").items.tolist()


def test_a_ranking_run_has_no_explanation():
    config = make_config(task="ranking")
    with pytest.raises(InvalidRequest, match="explain: the run ranks"):
        serve(config, make_model(config)).explain("a", 100)
