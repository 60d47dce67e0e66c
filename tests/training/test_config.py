"""Test the configuration: all errors at once, each with its path and the nearest valid key."""

import os
import re
from pathlib import Path

import pytest
import torch

from data.errors import ConfigError
from hstu_sparse.core.launch import precision
from models.attention import ATTENTION
from models.hstu import SequenceModel
from models.options import ModelConfig
from tests.models.test_hstu import NUM_ITEMS, make_batch
from training.config import as_yaml, load_config
from training.run import check_backends, set_matmul_precision

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
SYNTHETIC = next(path for path in CONFIGS if path.stem == "synthetic-hstu")
BASE = """
name: tiny
data: {format: synthetic, protocol: leave_one_out}
model:
  block: hstu
  max_seq_len: 10
  embedding_dim: 8
  num_layers: 2
  attention: {kind: dense}
train: {epochs: 1, lr: 1e-3}
"""


def write(tmp_path, text=BASE):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("kind", ["htree", "indexer", "ring"])
def test_auto_is_resolved_by_the_constructor_and_by_validation(kind):
    """In a call of `ModelConfig(...)`, pydantic ignores the object that a validator returns."""
    options = {"block": "hstu", "max_seq_len": 100, "embedding_dim": 32, "num_layers": 2, "attention": {"kind": kind}}
    called, read = ModelConfig(**options), ModelConfig.model_validate(options)
    assert called == read
    left = {name for name, value in called.attention[0] if value == "auto"}
    assert left <= {"backend", "time_bias", "index_time_bias"}  # chosen by the data and the device


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_load(path):
    assert load_config(path).name == path.stem


def test_scientific_notation_is_a_number(tmp_path):
    assert load_config(write(tmp_path)).train.lr == 1e-3
    assert load_config(write(tmp_path), ["train.lr=3e-4"]).train.lr == 3e-4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr=1:30", "train.lr: input should be a valid number, got '1:30'"),
        ("seed=010", "seed: input should be a valid integer, got '010'"),
        ("seed=-010", "seed: input should be a valid integer, got '-010'"),
        ("train.epochs=0b10", "train.epochs: input should be a valid integer, got '0b10'"),
        ("train.lr=1:30.5", "train.lr: input should be a valid number, got '1:30.5'"),
    ],
)
def test_text_that_is_a_number_in_yaml_1_1(tmp_path, override, message):
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path), [override])
    assert message in str(error.value)


def test_hopper_needs_sm_90_and_no_bias(tmp_path):
    overrides = ["model.attention={kind: dense, backend: hopper}", "model.attention_dim=64", "model.linear_dim=64"]
    overrides.append("model.attention.position_bias=false")
    with pytest.raises(ConfigError, match=r": model\.attention\.backend=hopper takes no bias: set position_bias and "):
        load_config(write(tmp_path), overrides)
    config = load_config(write(tmp_path), [*overrides, "model.attention.time_bias=false"])
    with pytest.raises(ConfigError, match=r"^model\.attention\.backend=hopper needs a GPU with sm_90, got cpu: "):
        check_backends(config, torch.device("cpu"))


def test_numbers(tmp_path):
    for text, number in (("0.5", 0.5), (".5", 0.5), ("1e-2", 0.01), ("2.5E-1", 0.25), ("0.1e0", 0.1), ("1.", 1.0)):
        assert load_config(write(tmp_path), [f"train.lr={text}"]).train.lr == number
    for text, number in (("0", 0), ("1_000", 1000), ("+7", 7), ("0x10", 16)):
        assert load_config(write(tmp_path), [f"seed={text}"]).seed == number


def test_special_and_large_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "long").write_text("a: " + "[1, " * 300_000)
    for name, message in (("pipe", "expected a regular file"), ("zero", "expected a regular file"), ("long", "bytes")):
        with pytest.raises(ConfigError, match=message):
            load_config(tmp_path / name)


def test_name_of_a_shipped_config_without_its_path(tmp_path):
    for name in ("ml-1m-hstu", "ml-1m-hstu.yaml", "ml1m-hstu"):
        with pytest.raises(ConfigError, match=r"No such file or directory, did you mean .*configs/ml-1m-hstu\.yaml\?"):
            load_config(tmp_path / name)


def test_all_errors_at_once(tmp_path):
    text = BASE.replace("kind: dense", "kind: bsa, blok_size: 4").replace("epochs: 1, ", "batch_size: many, ")
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, text))
    message = str(error.value)
    assert "model.attention.blok_size: unknown key, did you mean block_size?" in message
    assert "train.epochs: missing" in message
    assert "train.batch_size: input should be a valid integer, got 'many'" in message


def test_errors_of_all_layers_at_once(tmp_path):
    text = BASE.replace("{kind: dense}", "[{kind: bsa, selection_group: 3}, {kind: softmax, num_kv_heads: 3}]")
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, text))
    first, second = str(error.value).splitlines()
    assert "model.attention.0.selection_group=3" in first and "model.attention.1.num_kv_heads=3" in second


def test_error_in_one_layer_names_the_layer(tmp_path):
    text = BASE.replace("{kind: dense}", "[{kind: dense}, {kind: dense, windw_size: 3}]")
    with pytest.raises(ConfigError, match=r"model\.attention\.1\.windw_size: unknown key, did you mean window_size\?"):
        load_config(write(tmp_path, text))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.attention.normalizer=0",
            "model.attention.normalizer: input should be greater than or equal to 1, got 0",
        ),
        (
            "model.attention=[{kind: dense}, {kind: bsa, block_size: 30, selection_group: 7}]",
            "model.attention.1.selection_group=7 does not divide block_size=30",
        ),
        ("model.attention=3", "model.attention: expected a mapping with a kind, got 3"),
        ("model.attention={scale: 2.0}", "model.attention.kind: missing, one of dense, softmax, bsa"),
        (
            "model.attention={kind: dense, scale: many}",
            "model.attention.scale: input should be a valid number, got 'many'",
        ),
        ("model.attention.time_bias=on", None),
        (
            "model.attention.time_bias=maybe",
            "model.attention.time_bias: expected true, false or auto, got 'maybe'",
        ),
        ("model.attention.time_bias=1", "model.attention.time_bias: expected true, false or auto, got 1"),
        (
            "model.attention={kind: softmax, backend: cute, dropout: 0.1}",
            "model.attention.backend=cute has no dropout: set attention's dropout to 0, or use backend=triton",
        ),
        (
            "model.attention={kind: softmax, backend: triton, position_bias: true}",
            "model.attention.backend=triton takes no position_bias or time_bias: leave backend out",
        ),
        (
            "model.attention={kind: ring, inner: hstu, backend: cute}",
            "model.attention.backend=cute is for inner=softmax",
        ),
        ("model.attention={kind: ring, inner: softmax, backend: cute, dropout: 0.1}", "backend=cute has no dropout"),
        (
            "model.attention={kind: dense, backend: hopper}",
            "model.attention.backend=hopper takes heads of one size, 64, 128 or 256, got ",
        ),
        ("model.attention={kind: dense, backend: cute}", "model.attention.backend: input should be 'auto', 'triton'"),
        ("trian.lr=1", "trian: unknown key, did you mean train"),
        ("model.attention.kind=htre", "model.attention.kind: unknown attention kind htre"),
        ("model.attention=[{kind: dense}]", None),
        ("model.attention=[{kind: dense}, {kind: dense}, {kind: dense}]", "lists 3 mappings for num_layers=2"),
        ("model.num_heads=3", "embedding_dim=8 is not divisible by num_heads=3"),
        ("model.block=transformer", "model: block=transformer needs feed_forward_dim"),
        ("train.residual=bfloat16", "train.residual=bfloat16: needs train.autocast=bf16"),
        ("model.rotary={time: false}", "model.rotary: set position or time to true, or leave rotary out"),
        ("eval.best_metric=HR@0", "eval.best_metric: HR@0 is none of"),
        ("train.lr", "expected key=value"),
        ("name.x=1", "name.x: no such key"),
        ("model.dropout=1.5", "model.dropout: input should be less than 1"),
        ("train.lr=[", "train.lr=["),
    ],
)
def test_overrides(tmp_path, override, message):
    path = write(tmp_path)
    if message is None:
        load_config(path, [override])
        return
    with pytest.raises(ConfigError) as error:
        load_config(path, [override])
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_another_kind_starts_from_its_own_defaults(tmp_path):
    text = BASE.replace("kind: dense", "kind: bsa, block_size: 4, scale: 0.5")
    (attention,) = load_config(write(tmp_path, text), ["model.attention.kind=dense"]).model.attention
    assert (attention.kind, attention.scale, attention.time_bias) == ("dense", 0.5, "auto")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [1, 2", "run.yaml line"),  # truncated
        ("", "expected a mapping"),
        (BASE + "name: twice\n", "key given twice: name"),
    ],
)
def test_damaged_yaml(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_config(write(tmp_path, text))
    assert len(str(error.value).splitlines()) == 1


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "absent.yaml")


def test_saved_config_is_the_same_run(tmp_path):
    attention = "model.attention=[{kind: dense, window_size: 3}, {kind: bsa, block_size: 8}]"
    config = load_config(write(tmp_path), [attention, "eval.patience=2"])
    (tmp_path / "saved.yaml").write_text(as_yaml(config))
    assert load_config(tmp_path / "saved.yaml") == config


def test_matmul_precision_reaches_torch_and_the_kernels():
    before = torch.get_float32_matmul_precision()
    try:
        for name, dot_precision in (("high", "tf32"), ("default", "tf32"), ("highest", "ieee")):
            set_matmul_precision(name)
            assert precision(torch.float32) == dot_precision
            # All kernels use TF32 if it is allowed, otherwise their default.
            assert precision(torch.float32, "tf32x3") == ("tf32" if dot_precision == "tf32" else "tf32x3")
            assert precision(torch.bfloat16, "tf32x3") == "ieee"
            assert torch.backends.cuda.matmul.allow_tf32 == (dot_precision == "tf32")
    finally:
        torch.set_float32_matmul_precision(before)


# Errors of kinds that do not support a head size of 25 or the number of heads.
REFUSED_HEADS = {
    "htree": "even number of channels per head, got 25",
    "rotatekv": "must divide the number of heads|Hadamard",
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_one_override_changes_the_kind(path):
    layers = load_config(path).model.attention
    # The last layer's, in a config with a mapping for each layer.
    key = "model.attention.kind" if len(layers) == 1 else f"model.attention.{len(layers) - 1}.kind"
    for kind in ATTENTION:
        try:
            config = load_config(path, [f"{key}={kind}", "parallel.context=1"])
        except ConfigError as error:
            assert kind in REFUSED_HEADS and re.search(REFUSED_HEADS[kind], str(error)), (kind, error)
        else:
            assert config.model.attention[-1].kind == kind


@pytest.mark.parametrize("kind", ATTENTION)
def test_every_kind_computes_gradients(kind):
    config = load_config(SYNTHETIC, [f"model.attention.kind={kind}"]).model
    torch.manual_seed(0)
    model, batch = SequenceModel(config, NUM_ITEMS), make_batch([5, 0, 33])
    out, aux = model(batch)
    sum((loss.weighted for loss in aux.values()), out[:, 0].sum()).backward()
    assert out.shape == (38, 64) and out.isfinite().all()
    for name, parameter in model.layers.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], ("hstu", True, "auto")),
        (["model.attention.inner=hstu"], ("hstu", True, "auto")),
        (["model.attention.position_bias=false", "model.attention.time_bias=false"], ("hstu", False, False)),
        (["model.attention.inner=softmax"], ("softmax", False, False)),
        (["model.block=transformer", "model.feed_forward_dim=64"], ("softmax", False, False)),
        (
            ["model.block=transformer", "model.feed_forward_dim=64", "model.attention.inner=hstu"],
            ("hstu", True, "auto"),
        ),
    ],
    ids=str,
)
def test_the_inner_attention_of_a_ring_follows_the_block(tmp_path, overrides, expected):
    config = load_config(SYNTHETIC, ["model.attention.kind=ring", *overrides])
    (ring,) = config.model.attention
    assert (ring.inner, ring.position_bias, ring.time_bias) == expected
    (tmp_path / "saved.yaml").write_text(as_yaml(config))
    assert load_config(tmp_path / "saved.yaml") == config


def test_the_error_of_an_override_that_is_not_yaml_shows_how_to_quote_it():
    path = next(path for path in CONFIGS if path.stem == "default")
    with pytest.raises(
        ConfigError, match=r"""quote text with special characters: 'data\.columns\.timestamp_format="\.\.\."'$"""
    ):
        load_config(path, ["data.columns.timestamp_format=%d.%m.%Y"])
    config = load_config(path, ["data.path=x.csv", 'data.columns.timestamp_format="%d.%m.%Y"'])
    assert config.data.columns.timestamp_format == "%d.%m.%Y"
