"""Check the task `ranking`: causality, labels, configuration, and a run from YAML to report."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import eval as evaluation
import train
from data.errors import ConfigError
from data.ranking import RankingBatches
from data.splits import Split
from data.synthetic import generate
from experiments.plan import Plan
from experiments.report import as_html
from experiments.results import collect
from models.hstu import SequenceModel
from models.tasks.build import build_task
from models.tasks.ranking import ActionHeads
from training.config import RunConfig, load_config
from training.folder import read_judged
from training.loop import train as train_run
from training.run import open_data

SYNTHETIC = {"num_users": 60, "num_items": 30, "num_clusters": 4, "mean_length": 24, "max_length": 40, "actions": True}
CONFIG = {
    "name": "t",
    "device": "cpu",
    "threads": 1,
    "data": {"format": "synthetic", "protocol": "last_tenth", "synthetic": SYNTHETIC},
    "task": {"kind": "ranking", "actions": [{"name": "liked", "at_least": 1}]},
    "model": {
        "block": "hstu", "max_seq_len": 40, "embedding_dim": 16, "num_layers": 2, "num_heads": 2,
        "attention": {"kind": "dense"},
    },
    "train": {"epochs": 2, "batch_size": 20, "lr": 3e-3},
}  # fmt: skip


def configured(**changes):
    return RunConfig.model_validate(CONFIG | changes)


def model_of(config, dataset):
    torch.manual_seed(0)
    return SequenceModel(config.model, dataset.num_items, 2, build_task(config).head()).eval()


@pytest.mark.parametrize(
    "attention",
    [
        {"kind": "dense"},
        {"kind": "softmax"},
        {"kind": "bsa", "block_size": 8, "block_counts": 2, "window_size": 4, "selection_group": 2},
    ],
)
def test_a_flipped_action_changes_later_predictions_alone(attention):
    config = configured(model=CONFIG["model"] | {"attention": attention})
    dataset, task = generate(**SYNTHETIC), build_task(config)
    model = model_of(config, dataset)
    split = Split(np.array([0]), np.array([0]), np.array([15]), np.array([0]))
    (batch,) = task.batches(dataset, split, batch_size=1, shuffle=False).epoch(0)
    # With output weights of zero, no input would change a prediction.
    for name, weight in model.named_parameters():
        if "position_bias" in name or "time_bias" in name:
            torch.nn.init.normal_(weight, std=0.5)

    def predictions(batch):
        return model.task_head(model.raw_output(batch)[0])[~batch.has_action]

    before = predictions(batch)
    for event in (3, 9):
        actions = batch.actions.clone()
        actions[2 * event : 2 * event + 2] ^= 1
        after = predictions(replace(batch, actions=actions))
        assert torch.equal(after[: event + 1], before[: event + 1])
        assert (after[event + 1 :] != before[event + 1 :]).all()


def test_actions_of_item_tokens_change_no_output():
    config, dataset = configured(), generate(**SYNTHETIC)
    model = model_of(config, dataset)
    split = Split(np.array([0]), np.array([0]), np.array([15]), np.array([0]))
    (batch,) = build_task(config).batches(dataset, split, batch_size=1, shuffle=False).epoch(0)
    other = torch.where(batch.has_action, batch.actions, 1 - batch.actions)
    changed = replace(batch, actions=other, labels=-batch.labels)
    assert torch.equal(model.raw_output(batch)[0], model.raw_output(changed)[0])


TARGETS = CONFIG["task"] | {"layout": "targets", "num_targets": 5}


def test_candidates_attend_to_the_history_and_themselves():
    model_config = CONFIG["model"] | {"max_seq_len": 20, "rotary": {"position": True, "time": True}}
    config, dataset = configured(task=TARGETS, model=model_config), generate(**SYNTHETIC)
    model, task = model_of(config, dataset), build_task(config)
    split = Split(np.array([0, 1]), *(dataset.user_offsets[:2] + np.array(x) for x in ([0, 0], [15, 9], [10, 9])))
    split.scored[1] -= 4
    (batch,) = task.batches(dataset, split, batch_size=2, shuffle=False).epoch(0)
    for name, weight in model.named_parameters():
        if "position_bias" in name or "time_bias" in name:
            torch.nn.init.normal_(weight, std=0.5)

    def logits(batch):
        return model.task_head(model.raw_output(batch)[0])[batch.labels[:, 0] >= 0, 0]

    def changed(tokens, **columns):
        values = {name: getattr(batch, name).clone() for name in columns}
        for name, value in columns.items():
            values[name][tokens] = value
        return logits(replace(batch, **values))

    before = logits(batch)
    # Tokens 10 to 14 are the first user's candidates, which depend neither on their actions nor on each other.
    assert torch.equal(changed(slice(10, 15), actions=1 - batch.actions[10:15], labels=0), before)
    other = changed(11, item_ids=(batch.item_ids[11] + 1) % 30)
    assert other[1] != before[1] and torch.equal(other[[0, 2, 3, 4]], before[[0, 2, 3, 4]])
    history = changed(4, actions=1 - batch.actions[4])
    assert (history[:5] != before[:5]).all() and torch.equal(history[5:], before[5:])
    # A candidate alone has the same score as among others.
    single = Split(split.users[:1], split.begin[:1], split.scored[:1] + 1, split.scored[:1])
    (one,) = task.batches(dataset, single, batch_size=1, shuffle=False).epoch(0)
    torch.testing.assert_close(logits(one), before[:1])


def test_candidates_are_trained_on_the_actions_of_the_history():
    """Every second user likes all items, which only earlier actions show."""
    config, dataset = configured(task=TARGETS), generate(**SYNTHETIC)
    users = np.repeat(np.arange(60), np.diff(dataset.user_offsets))
    dataset, task = replace(dataset, actions=(users % 2).astype(np.int32)), build_task(config)
    model, splits = model_of(config, dataset).train(), task.splits(dataset)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for epoch in range(3):
        for batch in task.batches(dataset, splits.train, batch_size=20).epoch(epoch):
            optimizer.zero_grad()
            task.loss(model, model.raw_output(batch)[0], batch, None)[0].backward()
            optimizer.step()
    test = task.batches(dataset, splits.test, batch_size=50, shuffle=False)
    assert task.evaluate(model, test)["auc"] > 0.99


def test_experts_are_shared_and_mixed_by_a_gate_for_each_action():
    heads = ActionHeads(2, 6, 0.0, 8, experts=3)
    torch.nn.init.normal_(heads.gates)
    out = torch.randn(5, 8)
    x = heads.norm(out)
    experts = torch.stack([torch.nn.functional.silu(x @ weight) for weight in heads.hidden], 1)  # [T, K, H]
    for action in range(2):
        mixed = ((x @ heads.gates[action]).softmax(-1)[:, :, None] * experts).sum(1)
        expected = mixed @ heads.weight[action] + heads.bias[action]
        torch.testing.assert_close(heads(out)[:, action], expected)


def test_the_loss_is_the_mean_over_scored_events_by_hand():
    actions = [{"name": "a", "at_least": 1, "weight": 2.0}, {"name": "b", "at_least": 1}]
    config = configured(task={"kind": "ranking", "actions": actions, "hidden_dim": 4})
    dataset, task = generate(**SYNTHETIC), build_task(config)
    model = model_of(config, dataset)
    begin = dataset.user_offsets[:2]
    split = Split(np.array([0, 1]), begin, begin + np.array([8, 5]), begin + np.array([3, 0]))
    (batch,) = task.batches(dataset, split, batch_size=2, shuffle=False).epoch(0)
    out, _ = model.raw_output(batch)
    loss, named = task.loss(model, out, batch, None)
    scored = [t for t in range(26) if t % 2 == 0 and not t < 6]
    p = model.task_head(out)[scored].sigmoid()
    y = torch.from_numpy(dataset.actions)[batch.events[scored]].float()[:, None]
    means = -(y * p.log() + (1 - y) * (1 - p).log()).mean(0)
    torch.testing.assert_close(loss, 2 * means[0] + means[1])
    assert named.keys() == {"loss/a", "loss/b"}
    torch.testing.assert_close(named["loss/b"].value, means[1])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.protocol=leave_one_out",
            "data.protocol=leave_one_out: task.kind=ranking expects one of last_tenth, all",
        ),
        (
            "task={kind: retrieval}",
            "data.protocol=last_tenth: task.kind=retrieval expects one of leave_one_out, ",
        ),
        ("loss.kind=bce", "loss: not supported by task.kind=ranking, leave it out"),
        ("model.head={kind: mol}", "model.head: not supported by task.kind=ranking, leave it out"),
        ("eval.best_metric=NDCG@10", "eval.best_metric: NDCG@10 is none of auc, gauc"),
        ("model.max_seq_len=1", "model.max_seq_len: expected at least 2, the tokens of an event, got 1"),
        ("task.experts=2", "experts: needs hidden_dim, the size of the experts"),
        ("task.num_targets=3", "num_targets is for layout=targets, got layout=interleaved"),
        (
            f"task={json.dumps(TARGETS | {'num_targets': 40})}",
            "model.max_seq_len=40: expected more than task.num_targets=40, the events that are",
        ),
        (
            [f"task={json.dumps(TARGETS)}", "model.attention.kind=softmax"],
            "task.layout=targets: model.attention.kind=softmax does not support candidates",
        ),
        ("task.actions=[]", "task.actions"),
        (
            "task.actions=[{name: a, at_least: 1}, {name: a, at_least: 0}]",
            "actions: expected each name once, got a twice",
        ),
    ],
)
def test_invalid_configurations_raise(tmp_path, override, message):
    path = tmp_path / "t.yaml"
    path.write_text(json.dumps(CONFIG))
    with pytest.raises(ConfigError, match="(?s).*".join(message.split("...")).replace("[", r"\[")):
        load_config(path, [override] if isinstance(override, str) else override)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ({"name": "liked"}, "task.actions: liked: expected a threshold, at_least"),
        ({"name": "liked", "at_least": 5}, "task.actions: liked is 0 in every event of synthetic"),
    ],
)
def test_actions_that_are_not_in_the_data_raise(action, message):
    task = build_task(configured(task={"kind": "ranking", "actions": [action]}))
    with pytest.raises(ConfigError, match=message):
        task.check_data(generate(**SYNTHETIC))
    with pytest.raises(ConfigError, match="ranking predicts actions, but synthetic has none"):
        task.check_data(generate(**SYNTHETIC | {"actions": False}))


def test_flags_and_texts_are_found_by_name():
    dataset = replace(generate(**SYNTHETIC), actions=np.tile(np.arange(5, dtype=np.int32), 2000)[: 60 * 24])
    flags = configured(
        data={"format": "kuairand", "path": "x", "protocol": "last_tenth"},
        task={"kind": "ranking", "actions": [{"name": "is_like"}, {"name": "is_click"}]},
    )
    table = build_task(flags).label_table(dataset)
    assert table.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 0]]
    texts = replace(dataset, action_names=("view", "cart", "buy", "return", "gift"))
    csv = configured(
        data={"format": "csv", "path": "x", "protocol": "last_tenth"},
        task={"kind": "ranking", "actions": [{"name": "buy"}]},
    )
    assert build_task(csv).label_table(texts).tolist() == [[0], [0], [1], [0], [0]]


def test_events_of_two_tokens_count_once(tmp_path):
    config = configured(model=CONFIG["model"] | {"max_seq_len": 80})
    data = open_data(config)
    events = (data.splits.train_end - data.dataset.user_offsets[:-1]).sum()
    result = json.loads((train_run(config, tmp_path / "run", None) / "result.json").read_text())
    assert result["events_per_second"] * result["seconds"] == pytest.approx(config.train.epochs * events)


def test_a_run_from_yaml_to_report(tmp_path, capsys):
    path, run = tmp_path / "t.yaml", tmp_path / "run"
    path.write_text(json.dumps(CONFIG))
    assert train.main([str(path), "--run", str(run)]) == 0
    result = json.loads((run / "result.json").read_text())
    assert result["weights"] == "best" and result["events"] > 60
    assert set(result["model"]) == set(result["baseline"]) == set(load_config(run / "config.yaml").task.metric_names())
    assert 0.5 < result["baseline"]["auc"] < 1
    gain = result["actions"]["liked"]["auc_over_baseline"]
    assert gain["lower"] <= gain["difference"] <= gain["upper"]
    assert abs(gain["difference"] - (result["model"]["auc"] - result["baseline"]["auc"])) < 1e-9
    config, judged = load_config(run / "config.yaml"), read_judged(run)
    users, values = build_task(config).user_values(judged)
    assert len(users) == result["users"] and values.keys() == {"auc", "gauc", "log_loss", "normalized_entropy"}
    for name, value in values.items():
        assert value.mean() == pytest.approx(result["model"][name], rel=1e-9)
    (groups,) = build_task(config).breakdowns(result, judged).values()
    assert list(groups) == [row["history"] for row in result["actions"]["liked"]["by_history"]]
    results = collect(Plan({}, {"a": [run], "b": [run]}, "a", []), tmp_path, [])
    same = results.settings[1].metrics["auc"]
    assert results.metric == "auc" and same["mean"] == pytest.approx(result["model"]["auc"], rel=1e-9)
    assert (same["ratio"], same["low"], same["high"], same["sd"]) == (1, 1, 1, None)
    assert "auc by events before the scored one" in as_html(results)
    report = (run / "report.md").read_text()
    assert "Against the baseline" in report and "![ranking-liked.png](ranking-liked.png)" in report
    assert (run / "ranking-liked.png").read_bytes()[:4] == b"\x89PNG"
    assert evaluation.main([str(run)]) == 0
    again = json.loads((run / "eval-test.json").read_text())
    assert again["model"] == result["model"] and again["baseline"] == result["baseline"]
    capsys.readouterr()


@pytest.mark.parametrize("layout", [CONFIG["task"], TARGETS])
def test_batches_of_any_size_predict_alike(layout):
    config, dataset = configured(task=layout), generate(**SYNTHETIC)
    task = build_task(config)
    model, splits = model_of(config, dataset), task.splits(dataset)
    predictions = [
        task.predictions(model, task.batches(dataset, splits.test, batch_size=size, shuffle=False)) for size in (1, 50)
    ]
    assert isinstance(task.batches(dataset, splits.test, batch_size=1), RankingBatches)
    assert (predictions[0].events == predictions[1].events).all() and (np.diff(predictions[0].events) > 0).all()
    np.testing.assert_allclose(predictions[0].probabilities, predictions[1].probabilities, atol=1e-6)
    assert (predictions[0].labels[:, 0] == (dataset.actions[predictions[0].events] == 1)).all()


def test_outputs_of_retrieval_raise(tmp_path, capsys):
    path, run = tmp_path / "t.yaml", tmp_path / "run"
    path.write_text(json.dumps(CONFIG | {"train": CONFIG["train"] | {"epochs": 1}}))
    assert train.main([str(path), "--run", str(run)]) == 0
    for option in (["--sampled", "5"], ["--predict", str(tmp_path / "p.csv")]):
        capsys.readouterr()
        assert evaluation.main([str(run), *option]) == 2
        assert "task.kind=ranking scores given items" in capsys.readouterr().err
