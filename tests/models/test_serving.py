"""The rotatekv kind, and models that answer from a packed cache: what they equal, what they count, what is refused."""

import json

import numpy as np
import pytest
import torch

from benchmarks import kv_cache
from models.config import ModelConfig
from models.folder import read_judged, write_judged
from models.hstu import SequenceModel
from models.serving import ServingError, serve_from_cache
from tests.models.test_models import NUM_ITEMS, make_batch
from tests.programs.test_train import run, start

SIZES = dict(block="hstu", max_seq_len=40, embedding_dim=32, num_layers=2, num_heads=2)
LENGTHS = [5, 1, 40, 17]


def make_model(attention, seed=0, **changes):
    torch.manual_seed(seed)
    model = SequenceModel(ModelConfig.model_validate(SIZES | {"attention": attention} | changes), NUM_ITEMS)
    with torch.no_grad():
        for layer in model.layers:
            if hasattr(layer, "uvqk"):
                layer.uvqk.mul_(20)  # so that scores matter
    return model.eval()


def last_outputs(model, batch):
    with torch.no_grad():
        return model(batch)[0][batch.seq_offsets[1:] - 1]


DENSE, ROTATE = {"kind": "dense"}, {"kind": "rotatekv", "bits": 2, "sink_tokens": 3}
SOFTMAX = {"kind": "softmax", "position_bias": True, "time_bias": True}
TRANSFORMER = dict(block="transformer", feed_forward_dim=8)


@pytest.mark.parametrize(
    ("attention", "changes"),
    [
        (DENSE, {}),
        (DENSE | {"position_bias": False, "time_bias": False}, {"rotary": {"position": True, "time": True}}),
        (SOFTMAX, {}),
        ({"kind": "softmax"}, TRANSFORMER),
    ],
)
def test_a_cache_of_sinks_alone_changes_nothing(attention, changes):
    model, batch = make_model(attention, **changes), make_batch(LENGTHS)
    whole = last_outputs(model, batch)
    serve_from_cache(model, bits=2, sink_tokens=40)
    torch.testing.assert_close(last_outputs(model, batch), whole)


@pytest.mark.parametrize("attention", [DENSE, SOFTMAX])
def test_more_bits_come_closer(attention):
    model, batch = make_model(attention), make_batch(LENGTHS)
    whole = last_outputs(model, batch)
    errors = []
    for bits in (2, 4, 8):
        served = make_model(attention)
        serve_from_cache(served, bits=bits)
        errors.append((last_outputs(served, batch) - whole).norm().item())
    assert 0 < errors[2] < errors[1] / 4 < errors[0] / 8


def test_training_through_the_codes_is_what_is_served():
    """Every query's last output, with and without the cache in between, and for each prefix of a sequence."""
    model, batch = make_model(ROTATE), make_batch(LENGTHS)
    whole = last_outputs(model, batch)
    assert not torch.allclose(whole, last_outputs(make_model(DENSE), batch), atol=1e-3)
    serve_from_cache(model, bits=2, sink_tokens=3)
    torch.testing.assert_close(last_outputs(model, batch), whole)


def test_gradients_pass_straight_through():
    """They are dense attention's gradients at the keys and values that the codes say."""
    batch = make_batch([30])
    from hstu_sparse import hstu_attention, rotatekv_round_trip
    from models.attention.rotatekv import own_token

    kind = make_model(ROTATE | {"position_bias": False, "time_bias": False}).layers[0].attention
    q, k, v = (torch.randn(30, 2, 16, requires_grad=True) for _ in range(3))
    out, _ = kind(None, q, k, v, batch)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), grad)

    k2, v2 = (x.requires_grad_() for x in rotatekv_round_trip(k, v, batch.seq_offsets, bits=2, sink_tokens=3))
    N = kind.normalizer
    rest = hstu_attention(q, k2, v2, batch.seq_offsets, N, scale=1.0) - own_token(q, k2, v2, None, 1.0, N)
    own = own_token(q, k, v, None, 1.0, N)
    torch.testing.assert_close(out, rest + own)
    expected = torch.autograd.grad(rest + own, (q, k, k2, v, v2), grad)
    wanted = expected[0], expected[1] + expected[2], expected[3] + expected[4]
    for x, y in zip(found, wanted):
        torch.testing.assert_close(x, y)


def test_what_is_counted():
    model, batch = make_model(DENSE, max_seq_len=600, embedding_dim=128), make_batch([600, 580])
    size = serve_from_cache(model, bits=2)
    for _ in range(2):
        last_outputs(model, batch)
    report = size.report()
    assert report["kind"] == "rotatekv" and report["bits"] == 2
    assert (
        report["bytes_per_user_bf16"] == 2 * (599 + 579) * 2 * 128 * 2 / 2
    )  # layers, tokens, k and v, E, bytes; users
    assert 0.15 < report["share_of_bf16"] < 0.19
    assert abs(report["bytes_per_user"] / report["bytes_per_user_bf16"] - report["share_of_bf16"]) < 1e-3


@pytest.mark.parametrize(
    ("attention", "changes", "message"),
    [
        ({"kind": "bsa", "block_size": 8}, {}, "layer 0 \\(bsa\\) cannot be served"),
        (DENSE | {"window_size": 3}, {}, "window_size=3"),
        ({"kind": "softmax", "num_kv_heads": 1}, {}, "shares 1 key heads"),
        (DENSE, {"embedding_dim": 50}, "nearest head sizes that work are D=16 or D=32"),
    ],
)
def test_models_that_have_no_cache(attention, changes, message):
    with pytest.raises(ServingError, match=message):
        serve_from_cache(make_model(attention, **changes), bits=2)


def test_kind_refuses_heads_when_the_configuration_is_loaded():
    with pytest.raises(ValueError, match=r"head_group=2: the Hadamard transform needs .* D=16 or D=32"):
        make_model(ROTATE, embedding_dim=50)


def compared(out):
    """benchmarks/kv_cache.py on the run, as if compare.py had made it."""
    (out / "small").mkdir()
    folder = (out / "run").rename(out / "small" / "seed-1")
    for sinks in (0, 20):
        kv_cache.rank(folder, out, {"bits": 2, "sink_tokens": sinks})
    write_judged(folder, read_judged(folder) | {"history": np.load(out / "ranks" / "small+2bit+20sinks-1.npy")})
    rows = {row.name: row for row in kv_cache.table(out)}
    assert rows["small+2bit"].size < rows["small+2bit+20sinks"].size and rows["small+2bit"].size < rows["small"].size
    assert rows["small"].value == pytest.approx(rows["small+2bit+20sinks"].value)
    # The same ranks, the same runs: no spread, though the users and the runs are drawn anew.
    same = rows["small+2bit+20sinks"]
    assert same.low == pytest.approx(1.0) and same.high == pytest.approx(1.0)
    kv_cache.plot(kv_cache.table(out), out / "plot.png")
    folder.rename(out / "run")


def test_command_line(tmp_path):
    assert start(tmp_path / "run", "model.num_heads=2", "model.attention={kind: rotatekv}").returncode == 0
    found = {}
    for more in ([], ["--kv-cache", "rotatekv", "--bits", "4", "--sink-tokens", "2"]):
        result = run("eval.py", tmp_path / "run", "device=cpu", *more)
        assert result.returncode == 0, result.stderr
        name = "eval-test-rotatekv-4bit-sink_tokens=2.json" if more else "eval-test.json"
        found[bool(more)] = json.loads((tmp_path / "run" / name).read_text())
    assert "kv_cache" not in found[False]
    assert found[True]["kv_cache"]["bits"] == 4 and found[True]["kv_cache"]["bytes_per_user"] > 0
    assert found[True]["popularity"] == found[False]["popularity"]
    compared(tmp_path)
    for more, message in (
        (["--bits", "2"], "--bits is an option of --kv-cache"),
        (["--kv-cache", "rotatekv", "--bits", "5"], "bits must be one of 2, 3, 4, 8"),
        (["--kv-cache", "rotatekv", "--head-group", "4"], "must divide the number of heads"),
    ):
        result = run("eval.py", tmp_path / "run", "device=cpu", *more)
        assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
