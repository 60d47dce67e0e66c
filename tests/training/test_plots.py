"""Test plots of pages."""

import math
import re
from xml.etree import ElementTree

from training.plots import Row, Series, curves, groups, scatter, standalone, strip


def test_plots_are_svg_in_the_page_s_colours():
    nan = float("nan")
    plots = [
        curves(
            [Series(0, [(1, 0.3), (2, 0.31)]), Series(1, [(1, nan), (2, math.inf)])], "epoch", 'a "metric" & <more>'
        ),
        scatter([Series(7, [(1500.0, 0.5), (3500.0, 0.6)])], "MiB", "metric"),
        groups([(0, {"few": 0.1, "$x_1$": None, "many": 0.3}), (1, dict.fromkeys(("few", "$x_1$", "many")))], "g", "m"),
        strip([Row("<a>", 0, [0.1, 0.2], 0.15), Row("b" * 60, 1, [], 1.1, (0.9, 1.3))], "ratio", at=1.0),
    ]
    for plot in plots:
        ElementTree.fromstring(plot)
        assert "var(--line)" in plot and "#010101" not in plot and "<style" not in plot
        assert not re.search(r"https?:|url\(", plot)
        assert "var(" not in (file := standalone(plot))
        assert ElementTree.fromstring(file).tag == "{http://www.w3.org/2000/svg}svg"
    assert plots[1] == scatter([Series(7, [(1500.0, 0.5), (3500.0, 0.6)])], "MiB", "metric")
    assert 'aria-label="a &quot;metric&quot; &amp; &lt;more&gt; by epoch"' in plots[0] and ">1.5<" not in plots[0]
    assert ">2,000<" in plots[1] and ">$x_1$<" in plots[2]
    assert ">&lt;a&gt;<" in plots[3] and "b" * 43 + "…" in plots[3] and "var(--soft)" in plots[3]
