"""Test the page of a comparison."""

from types import SimpleNamespace

from experiments.report import as_html, readable_changes
from experiments.results import Results, Setting


def test_a_page_escapes_texts_of_runs():
    runs = [SimpleNamespace(result={"parameters": 10}, curve=[(1, 0.4), (2, 0.5)])]
    metrics = {"mean": 0.5, "by_seed": [0.5], "sd": None, "ratio": 1.0, "low": None, "high": None, "p_holm": None}
    settings = [Setting(name, runs, {"auc": metrics}, {"length": {"few": None}}) for name in ("a", "b")]
    page = as_html(Results("auc", 1200, False, settings, [("b, seed 1", "error: <script>")]))
    assert "1,200 users" in page and "error: &lt;script&gt;" in page and "<script" not in page
    assert page.count("<svg") == 4 and page.count('class="legend"') == 2


def test_changes_have_no_options_of_the_other_kind():
    changes = [
        "model.rotary: None -> {'time': True}",
        "train.clip_norm: 1.0 -> None",
        "model.attention.0.kind: dense -> htree",
        "model.attention.0.scale: 1.0 -> None",
        "model.attention.0.top_k: None -> 16",
    ]
    assert readable_changes(changes) == [
        "model.rotary: absent -> {'time': True}",
        "train.clip_norm: 1.0 -> absent",
        "model.attention.0.kind: dense -> htree",
        "model.attention.0.top_k: 16",
    ]
