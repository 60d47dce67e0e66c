"""Check features in a model: their sums, items without a training event, and causality."""

import itertools
from dataclasses import replace
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch

from data.features.features import feature_of
from data.features.vocabulary import FeatureVocabulary, fit_features, with_rows
from data.features.zones import calendar_rows, checked_zone, offsets_of
from data.splits import Split
from data.synthetic import generate
from data.types import DataError, Dataset
from models.features import ContextFeatures
from models.hstu import SequenceModel
from models.losses import Negatives, Share, competing_items, training_loss
from models.tasks.build import build_task
from training.config import RunConfig
from training.step import build_step
from training.vocabulary import features_of

KINDS = {"brand": "category", "genres": "list"}
FEATURES = {
    "items": {"format": "csv", "path": "x", "columns": KINDS},
    "users": {"format": "csv", "path": "x", "columns": {"age": {"kind": "number", "quantiles": 4}}},
    "events": {"columns": {"device": "category"}, "calendar": ["hour", "weekday"]},
}
SIZES = {"num_users": 30, "num_items": 40, "num_clusters": 4, "mean_length": 12, "max_length": 20}
CONFIG = {
    "name": "t",
    "device": "cpu",
    "threads": 1,
    "data": {"format": "synthetic", "protocol": "leave_one_out", "features": FEATURES},
    "model": {"block": "hstu", "max_seq_len": 20, "embedding_dim": 16, "num_layers": 1, "attention": {"kind": "dense"}},
    "train": {"epochs": 1, "batch_size": 10, "lr": 1e-2},
}
LOSSES = {
    "cross_entropy": {"kind": "cross_entropy"},
    "sampled_softmax": {"kind": "sampled_softmax", "num_negatives": 4},
    "shared": {"kind": "sampled_softmax", "num_negatives": 8, "negatives": "shared"},
    "in_batch": {"kind": "in_batch", "num_negatives": 4},
    "mixed_negatives": {"kind": "mixed_negatives", "num_negatives": 4},
    "bce": {"kind": "bce", "num_negatives": 4},
}
MOL = {"kind": "mol", "query_components": 2, "item_components": 2, "component_dim": 8, "gate_hidden_dim": 8}


def with_made_up_features(dataset: Dataset, seed=0) -> Dataset:
    """Return the data set with two features of items and one each of users and events, drawn at random."""
    rng = np.random.default_rng(seed)
    items, users, events = (np.arange(n) for n in (dataset.num_items, dataset.num_users, dataset.num_events))
    lengths = rng.integers(0, 4, len(items))
    listed = np.repeat(items, lengths)
    features = (
        feature_of("items", "brand", "category", len(items), items, rng.integers(5, size=len(items)).astype(str)),
        feature_of("items", "genres", "list", len(items), listed, rng.integers(6, size=len(listed)).astype(str)),
        feature_of("users", "age", "number", len(users), users, rng.normal(40, 9, len(users))),
        feature_of("events", "device", "category", len(events), events, rng.integers(3, size=len(events)).astype(str)),
    )
    return replace(dataset, features=features)


def configured(**changes):
    return RunConfig.model_validate(CONFIG | changes)


def prepared(config, dataset):
    """Return (data set with its rows, splits, feature vocabulary, task)."""
    task = build_task(config)
    splits = task.splits(dataset)
    known = fit_features(dataset, splits.train_end, config.data.features)
    return with_rows(dataset, known), splits, known, task


def model_of(config, dataset, known):
    torch.manual_seed(0)
    head = build_task(config).head()
    return SequenceModel(config.model, dataset.num_items, 2 if head else 0, head, known)


def losses_of(config, dataset, steps=2):
    """Return (the losses of the first training steps, the model after them, its features)."""
    dataset, splits, known, task = prepared(config, dataset)
    model = model_of(config, dataset, known)
    _, step = build_step(config, model, torch.device("cpu"))
    batches = task.batches(dataset, splits.train, batch_size=10, seed=0)
    model.train()
    step_losses = [
        step(batch)["loss"].item() for _, batch in zip(range(steps), (b for n in range(9) for b in batches.epoch(n)))
    ]
    return step_losses, model, known


def with_cold_items(dataset: Dataset, seed: int) -> Dataset:
    """Return the data set with a new first and a new last item, each with one test event and other features."""
    items, last = dataset.items + 1, dataset.num_items + 1
    tested = dataset.user_offsets[1:][np.diff(dataset.user_offsets) >= 10] - 1  # of last_tenth too
    items[tested[:2]] = 0, last
    features = []
    for feature in dataset.features:
        if feature.entity == "items":
            rows = np.concatenate([[0], feature.rows + 1, [last]])
            values = np.concatenate([[f"new{seed}"], feature.values[feature.codes], [str(seed)]])
            feature = feature_of("items", feature.name, feature.kind, last + 1, rows, values)
        features.append(feature)
    ids = np.concatenate([[0], dataset.item_ids, [10**6]])
    return replace(dataset, items=items.astype(np.int32), item_ids=ids, features=tuple(features))


@pytest.mark.parametrize(
    ("loss", "head"), [*((loss, "dot") for loss in LOSSES), ("cross_entropy", "mol"), ("sampled_softmax", "mol")]
)
def test_items_without_a_training_event_change_no_training_loss(loss, head):
    """Losses must be bit-identical with and without these items, for all losses."""
    model = CONFIG["model"] | {"dropout": 0.2, "id_dropout": 0.2}
    config = configured(loss=LOSSES[loss], model=model | ({"head": MOL} if head == "mol" else {}))
    dataset = with_made_up_features(generate(**SIZES))
    expected, _, _ = losses_of(config, dataset)
    actual, after, known = losses_of(config, with_cold_items(dataset, 1))
    assert actual == expected
    cold = torch.from_numpy(~known.trained)
    assert cold[0] and cold[-1] and after.item_weight[cold].eq(0).all() and after.item_weight[~cold].ne(0).all()
    if loss == "cross_entropy":
        assert losses_of(config, with_cold_items(dataset, 2))[0] == expected


def test_an_item_is_its_row_and_the_means_of_its_features():
    config, dataset = configured(), with_cold_items(with_made_up_features(generate(**SIZES)), 1)
    _, _, known, _ = prepared(config, dataset)
    model = model_of(config, dataset, known).eval()
    tables = {name: table.weight for name, table in model.embedding.items.tables.tables.embedding_bags.items()}
    expected = model.item_weight.detach().clone()
    for table, (offsets, rows) in zip(tables.values(), known.item_rows):
        for item, (begin, end) in enumerate(itertools.pairwise(offsets)):
            if end > begin:
                expected[item] += table[rows[begin:end]].mean(0)
    torch.testing.assert_close(model.item_table, expected)
    ids = torch.tensor([5, 0, 5, dataset.num_items - 1])
    torch.testing.assert_close(
        model.embedding.item_rows(ids), expected[ids]
    )  # few items: only their features are summed
    ids = torch.arange(dataset.num_items).repeat(20)
    torch.testing.assert_close(
        model.embedding.item_rows(ids), expected[ids]
    )  # many items: the features of the catalogue are summed
    # Bit by bit, since a service scores few items and evaluation many.
    each = torch.cat([model.embedding.item_rows(torch.tensor([item])) for item in range(dataset.num_items)])
    assert torch.equal(each, model.item_table) and torch.equal(each.repeat(20, 1), model.embedding.item_rows(ids))
    assert model.embedding.item_rows(ids[:0]).shape == (0, 16)
    model.train()  # the loss is over items with a training event
    torch.testing.assert_close(model.item_table, expected[torch.from_numpy(known.trained)])


@pytest.mark.parametrize("loss", ["cross_entropy", "sampled_softmax"])
def test_features_that_no_trained_item_has(loss):
    dataset = with_cold_items(with_made_up_features(generate(**SIZES)), 1)
    only = feature_of("items", "brand", "category", dataset.num_items, np.array([0]), np.array(["new"]))
    config = configured(loss=LOSSES[loss], data=CONFIG["data"] | {"features": {"items": FEATURES["items"]}})
    losses, model, _ = losses_of(config, replace(dataset, features=(only,)))
    assert np.isfinite(losses).all() and model.eval().item_table.isfinite().all()


@pytest.mark.parametrize("repeats", [1, 60])
def test_id_dropout_leaves_the_features(repeats):
    """An item's representation is either complete or only its features, for few items and for many."""
    config = configured(model=CONFIG["model"] | {"id_dropout": 0.5})
    dataset = with_cold_items(with_made_up_features(generate(**SIZES)), 1)
    _, _, known, _ = prepared(config, dataset)
    model = model_of(config, dataset, known).eval()
    ids = torch.from_numpy(np.flatnonzero(known.trained)[:8]).repeat(repeats)
    whole, features = model.item_table[ids], (model.item_table - model.item_weight)[ids]
    model.train()
    assert model.embedding.items.all_is_less(len(ids)) == (repeats > 1)
    rows, every = model.embedding.item_rows(ids), model.item_table
    alone = (rows - features).abs().amax(1) < 1e-6
    assert alone.any() and not alone.all()
    torch.testing.assert_close(rows, torch.where(alone[:, None], features, whole))
    assert len(every) == len(model.embedding.items.trained)
    rows.sum().backward()  # dropped rows have no gradient
    counts = torch.zeros(dataset.num_items).index_add_(0, ids, (~alone).float())
    torch.testing.assert_close(model.item_weight.grad, counts[:, None].expand(-1, 16))


def test_padding_with_an_item_without_a_training_event():
    """Padding of captured steps has item 0, which may have no training event."""
    dataset, splits, known, task = prepared(configured(), with_cold_items(with_made_up_features(generate(**SIZES)), 1))
    model = model_of(configured(), dataset, known).train()
    assert not known.trained[0]
    batch = next(task.batches(dataset, splits.train, batch_size=4, shuffle=False).epoch(0))
    padded = batch.padded(batch.num_tokens + 5, 8, 20)
    expected, out = (model.raw_output(each)[0] for each in (batch, padded))
    torch.testing.assert_close(out[: len(expected)], expected)
    assert out.isfinite().all()


@pytest.mark.parametrize("shared", [False, True])
def test_drawn_rows_give_the_loss_of_the_whole_catalogue(shared):
    """Check gradients, too; negatives include repeated ones, targets of other tokens and the token's target."""
    config = configured(loss=LOSSES["mixed_negatives"] | ({"negatives": "shared"} if shared else {}))
    dataset = with_cold_items(with_made_up_features(generate(**SIZES)), 1)
    _, _, known, _ = prepared(config, dataset)
    model = model_of(config, dataset, known).train()
    out = torch.nn.functional.normalize(torch.randn(3, 16, generator=torch.Generator().manual_seed(0)), dim=1)
    ids = torch.tensor([4, 7, 7, 2] if shared else [[4, 7, 7, 2], [4, 5, 6, 1], [0, 0, 1, 2]])
    drawn = Negatives(ids, torch.linspace(-4, -1, len(model.embedding.items.trained)))
    share = Share(torch.tensor([4, -1, 7]), drawn)
    few, new_share = competing_items(model.embedding, share)
    assert len(few) == 3 + ids.numel() < len(model.embedding.items.trained)
    losses = [training_loss(config.loss, out, *parts) for parts in ((few, new_share), (model.item_table, share))]
    torch.testing.assert_close(*losses)
    parameters = list(model.embedding.tables.parameters()) + list(model.embedding.items.parameters())
    for actual, expected in zip(*(torch.autograd.grad(loss, parameters) for loss in losses)):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-7)


def test_calendar():
    times = torch.tensor([0, 3599, 3600, 86399, 86400, 1_700_000_000, 4_102_444_799])
    moments = [datetime.fromtimestamp(t, UTC) for t in times.tolist()]
    assert calendar_rows("hour", times).tolist() == [moment.hour for moment in moments]
    assert calendar_rows("weekday", times).tolist() == [moment.weekday() for moment in moments]


RANKING = {
    "data": CONFIG["data"] | {"protocol": "last_tenth"},
    "task": {"kind": "ranking", "actions": [{"name": "liked", "at_least": 1}]},
}


@pytest.mark.parametrize("known_at", ["before", "after"])
def test_features_of_an_event_that_ranking_predicts_from(known_at):
    """A feature changes predictions of later events, and of its event only if it is known before the action."""
    columns = {"device": {"kind": "category", "known": known_at}}
    data = RANKING["data"] | {"features": {"events": {"columns": columns}}}
    config = configured(**RANKING | {"data": data})
    dataset = with_made_up_features(generate(**SIZES, actions=True))
    dataset = replace(dataset, features=dataset.features[-1:])
    dataset, _, known, task = prepared(config, dataset)
    model = model_of(config, dataset, known).eval()
    split = Split(np.array([0]), np.array([0]), np.array([8]), np.array([0]))
    (batch,) = task.batches(dataset, split, batch_size=1, shuffle=False).epoch(0)

    def predictions(batch):
        return model.task_head(model.raw_output(batch)[0])[~batch.has_action]

    before, event = predictions(batch), 3
    rows = batch.event_features.clone()
    rows[2 * event : 2 * event + 2] = rows[2 * event] % 3 + 1
    after = predictions(replace(batch, event_features=rows))
    first = event + (known_at == "after")
    assert torch.equal(after[:first], before[:first]) and (after[first:] != before[first:]).all()


@pytest.mark.parametrize("known_at", ["before", "after"])
def test_features_that_a_candidate_reads(known_at):
    """A candidate reads the history's features and, if known before the user acts, its own; no other candidates'."""
    columns = {"device": {"kind": "category", "known": known_at}}
    data = RANKING["data"] | {"features": {"events": {"columns": columns}}}
    layout = RANKING["task"] | {"layout": "targets", "num_targets": 4}
    config = configured(**RANKING | {"data": data, "task": layout})
    dataset = with_made_up_features(generate(**SIZES, actions=True))
    dataset, _, known, task = prepared(config, replace(dataset, features=dataset.features[-1:]))
    model = model_of(config, dataset, known).eval()
    split = Split(np.array([0]), np.array([0]), np.array([8]), np.array([4]))
    (batch,) = task.batches(dataset, split, batch_size=1, shuffle=False).epoch(0)

    def changed(event):
        rows = batch.event_features.clone()
        rows[event] = rows[event] % 3 + 1
        before, after = (
            model.task_head(model.raw_output(one)[0])[4:, 0] for one in (batch, replace(batch, event_features=rows))
        )
        return (before != after).tolist()

    assert changed(6) == [False, False, known_at == "before", False]
    assert changed(2) == [True] * 4


def test_retrieval_reads_no_feature_of_a_later_event():
    config, dataset = configured(), with_made_up_features(generate(**SIZES))
    dataset, splits, known, task = prepared(config, dataset)
    model = model_of(config, dataset, known).eval()
    batch = next(task.batches(dataset, splits.test, batch_size=1, shuffle=False).epoch(0))
    before, rows = model(batch)[0], batch.event_features.clone()
    rows[4] = rows[4] % 3 + 1
    after = model(replace(batch, event_features=rows))[0]
    assert torch.equal(after[:4], before[:4]) and (after[4:] != before[4:]).any(1).all()
    other = model(replace(batch, user_features=batch.user_features % 3 + 1))[0]
    assert (other != before).any(1).all()
    with pytest.raises(ValueError, match="the model expects 1 features of users, got a batch with 0"):
        model(replace(batch, user_features=None))


def test_ranking_reads_features_of_users_and_items():
    """A user's feature changes all predictions, an item's feature those from its first event on."""
    config, dataset = configured(**RANKING), with_made_up_features(generate(**SIZES, actions=True))
    dataset, splits, known, task = prepared(config, dataset)
    model = model_of(config, dataset, known).eval()
    batch = next(task.batches(dataset, splits.test, batch_size=1, shuffle=False).epoch(0))

    def predictions(batch):
        return model.task_head(model.raw_output(batch)[0])[~batch.has_action]

    before = predictions(batch)
    assert (predictions(replace(batch, user_features=batch.user_features % 3 + 1)) != before).all()
    item, at = batch.item_ids[6], 3
    assert (batch.item_ids[:6] != item).all()
    offsets, rows = known.item_rows[0]
    rows = rows.copy()
    rows[offsets[item]] = rows[offsets[item]] % 3 + 1
    other = replace(known, item_rows=((offsets, rows), known.item_rows[1]))
    model = model_of(config, dataset, other).eval()
    after = predictions(batch)
    assert torch.equal(after[:at], before[:at]) and (after[at:] != before[at:]).all()


def test_items_without_a_training_event_change_no_loss_of_ranking():
    config = configured(**RANKING, model=CONFIG["model"] | {"dropout": 0.2, "id_dropout": 0.2})
    dataset = with_made_up_features(generate(**SIZES, actions=True))
    expected, _, _ = losses_of(config, dataset)
    actual, after, known = losses_of(config, with_cold_items(dataset, 1))
    assert actual == expected
    cold = torch.from_numpy(~known.trained)
    assert cold[0] and cold[-1] and after.item_weight[cold].eq(0).all()


def test_ranking_trains_all_tables():
    dataset = with_made_up_features(generate(**SIZES, actions=True))
    losses, model, _ = losses_of(configured(**RANKING), dataset)
    assert np.isfinite(losses).all()
    tables = {name: table for name, table in model.named_parameters() if "embedding_bags" in name}
    assert len(tables) == 6 and all(table.grad.abs().sum() > 0 for table in tables.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": CONFIG["model"] | {"id_dropout": 0.1}, "data": CONFIG["data"] | {"features": None}}, "id_dropout"),
        (
            {
                "parallel": {"context": 2, "context_by": "ring"},
                "model": CONFIG["model"] | {"attention": {"kind": "ring"}},
            },
            "data.features: not supported with parallel.context_by=ring",
        ),
    ],
)
def test_options_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        configured(**changes)


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/St_Johns", "Asia/Kolkata", "Pacific/Apia", "UTC"])
def test_calendar_of_a_time_zone(zone):
    """Local times, also at changes of summer time and of a zone that crossed the date line."""
    starts, _ = offsets_of(zone)
    near = (starts[:, None] + np.array([-3600, -1, 0, 1, 3600])).ravel()
    times = np.concatenate([near[(near >= 0) & (near < 2**33)], np.random.default_rng(0).integers(0, 2**32, 500)])
    known = FeatureVocabulary((), ("hour", "weekday"), time_zone=zone)
    clock = ContextFeatures(known, 4, torch.float32).clock(torch.from_numpy(times))
    moments = [datetime.fromtimestamp(int(time), ZoneInfo(zone)) for time in times]
    assert calendar_rows("hour", clock).tolist() == [moment.hour for moment in moments]
    assert calendar_rows("weekday", clock).tolist() == [moment.weekday() for moment in moments]


def test_unknown_time_zones_raise():
    with pytest.raises(
        DataError, match=r"data.time_zone: expected a time zone .* got 'Europe/Berln', did you mean Europe/Berlin\?"
    ):
        checked_zone("Europe/Berln")
    for wrong in ("../etc/passwd", "", "/etc/localtime"):
        with pytest.raises(DataError, match="expected a time zone"):
            checked_zone(wrong)


def test_zone_of_a_run_is_stored_with_its_calendar():
    ids = {"item_ids": np.arange(3)}
    assert features_of([], ["hour"], ids, "Europe/Berlin").time_zone == "Europe/Berlin"
    assert features_of([], ["hour"], ids).time_zone is None  # as runs of 0.2.0 have it
    with pytest.raises(ValueError, match="nowhere"):
        features_of([], ["hour"], ids, "nowhere")
