"""Test benchmarks/kinds.py: measured steps are added to the comparison of attention kinds, its page and its figure."""

import json
import re

import pytest

from benchmarks import kinds
from benchmarks.figures import RESULTS

COMPARISON = (RESULTS / "ml-1m-kinds.json").read_text()
PAGE = (kinds.DOCS / "reports" / "ml-1m-kinds.html").read_text()
NAMES = [setting["name"] for setting in json.loads(COMPARISON)["settings"]]


def lines(device: str = "a device", names: list[str] = NAMES) -> list[str]:
    """Return a measurement of each setting, in units that tell them apart."""
    measured = {"before": 100, "peak_memory_bytes": 2**20 + 100, "steps": 20, "environment": {"device": device}}
    return [json.dumps({"speed": name, "events_per_second": 1e6 + i, **measured}) for i, name in enumerate(names)]


def test_the_page_is_what_the_results_give():
    """Except for the plots, which other versions of matplotlib draw a little differently."""
    page = kinds.page(kinds.restore(json.loads(COMPARISON)), PAGE)
    with_no_plots, expected = (re.sub("<svg.*?</svg>", "<svg>", text, flags=re.DOTALL) for text in (page, PAGE))
    assert with_no_plots == expected and page.count("<svg") == PAGE.count("<svg")


def test_measurements_are_added(tmp_path, capsys):
    (tmp_path / "results.json").write_text(COMPARISON)
    (tmp_path / "page.html").write_text(PAGE)
    (tmp_path / "speeds.jsonl").write_text("\n".join(lines()))
    paths = [f"--{name}={tmp_path / file}" for name, file in (("results", "results.json"), ("report", "page.html"))]
    kinds.main([*paths, f"--figure={tmp_path / 'kinds.png'}", f"--speeds={tmp_path / 'speeds.jsonl'}"])
    settings = json.loads((tmp_path / "results.json").read_text())["settings"]
    assert [setting["events_per_second"] for setting in settings] == [1e6 + i for i in range(len(NAMES))]
    assert {setting["peak_memory_bytes"] for setting in settings} == {2**20}
    page = (tmp_path / "page.html").read_text()
    assert all(text in page for text in ("against time", "against memory", "without other runs", "<td>1,000,001</td>"))
    assert "of the evaluations on the way" in page  # the curves of the earlier page
    assert (tmp_path / "kinds.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    kinds.main([*paths, "--table"])
    assert "| 1,000,001 | 1 MiB |" in capsys.readouterr().out


def test_the_median_of_several_measurements_counts():
    comparison = json.loads(COMPARISON)
    kinds.merge(comparison, lines(names=[name for name in NAMES for _ in range(3)]))
    assert comparison["settings"][0]["events_per_second"] == 1e6 + 1


def test_measurements_that_do_not_belong_are_refused():
    with pytest.raises(SystemExit, match=f"speed=odd: expected one of {', '.join(NAMES)}"):
        kinds.merge(json.loads(COMPARISON), lines(names=["odd"]))
    with pytest.raises(SystemExit, match="different devices"):
        kinds.merge(json.loads(COMPARISON), [*lines(names=NAMES[:1]), *lines("another", NAMES[1:])])
