"""Test benchmarks/crossover.py: from which length a kind overtakes, and a measurement that continues after a stop."""

import json
import math

import pytest

from benchmarks import crossover


def test_from_where_a_kind_overtakes():
    slow = {256: 1.0, 1024: 4.0, 4096: 64.0}
    assert crossover.overtakes({256: 0.5, 1024: 3.0, 4096: 63.0}, slow) == 256
    assert crossover.overtakes({256: 2.0, 1024: 5.0, 4096: 65.0}, slow) is None
    # Twice as slow at 1,024, twice as fast at 4,096: equal halfway between, on logarithmic axes.
    assert crossover.overtakes({256: 0.5, 1024: 8.0, 4096: 32.0}, slow) == pytest.approx(math.sqrt(1024 * 4096))
    assert crossover.overtakes({512: 1.0}, slow) is None


def test_measured_in_two_parts(tmp_path, capsys):
    out = tmp_path / "c.jsonl"
    sizes = ["--tokens", "64", "--items", "20", "--size", "16", "--layers", "1", "--heads", "2", "--repeats", "1"]
    # Softmax attention has no option x: the record has the error, and the other kinds are measured.
    kinds = {
        "dense": crossover.KINDS["dense"],
        "softmax": crossover.KINDS["softmax"],
        "odd": {"kind": "softmax", "x": 1},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crossover, "KINDS", kinds)
        for lengths in ("32", "32,64"):
            crossover.main(["--kinds", "dense;softmax;odd", "--lengths", lengths, "--out", str(out), *sizes])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["attention"], r["length"]) for r in records] == [(k, n) for n in (32, 64) for k in kinds]
    for record in records:
        assert record["environment"]["torch"] and record["commit"]
        if record["attention"] == "odd":
            assert "unknown key" in record["error"] or "Extra inputs" in record["error"]
        else:
            assert all(record[part] > 0 for part in crossover.PARTS)
    capsys.readouterr()
    crossover.main(["--out", str(out), "--table"])
    table = capsys.readouterr().out
    assert "| step, ms | 32 | 64 |" in table and "| odd | - | - | - | - | - | - |" in table
    crossover.main(["--out", str(out), "--plot", str(tmp_path / "c.png")])
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
