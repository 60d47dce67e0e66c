"""Test report.html of a run: complete, self-contained and escaped."""

import re
from types import SimpleNamespace

from models.tasks.contract import Table
from training.page import as_html, learning


def page(**more):
    task = SimpleNamespace(
        config=SimpleNamespace(best_metric="NDCG@10"),
        plotted=("NDCG@10",),
        plotted_baseline="popularity",
        tables=lambda result: [
            Table("Full ranking", ["", "NDCG@10"], [["<b>model</b>", "0.2"]], [0, 1]),
            Table("Examples", ["user", "list"], [["ann", "tea, cup"]], note="The <first> items.", words=True),
        ],
    )
    history = [{"epoch": 1, "loss": 2.0}, {"epoch": 2, "loss": 1.0, "split": "valid", "NDCG@10": 0.1}]
    return as_html("<small>", task, more, learning(task, more, history), ["Data: shop"], {"device": "CPU"})


def test_a_page_is_complete_and_needs_no_network():
    verdict = {"sentence": "The model is better.", "low": 1.1, "high": 1.3, "less_is_better": False}
    verdict |= {"model": 0.2, "of_baseline": 0.1}
    baselines = {"again": {"metrics": {"NDCG@10": 0.1}}}
    text = page(split="test", against_baseline=verdict, baselines=baselines, plotted_baseline={"NDCG@10": 0.05})
    assert not re.search(r"(src|href)=\"(?!#)|https?:|@import|url\((?!#)", text)
    assert text.count("<svg") == 3 and 'class="verdict better"' in text
    assert text.count('<table class="words">') == text.count("<p>The &lt;first&gt; items.</p>") == 1
    assert "<b>model" not in text and "&lt;b&gt;model" in text and "<h1>&lt;small&gt;</h1>" in text


def test_a_run_without_evaluation_has_plots_but_no_table():
    text = page(notes=["INTERRUPTED"])
    assert "Full ranking" not in text and text.count("<svg") == 2
