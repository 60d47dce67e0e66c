"""Test the reference of the configuration: every key is listed, with a description."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from data.errors import ConfigError
from tests.support.forked import Forked
from training.config import load_config
from training.keys import as_markdown, as_text, sections

ROOT = Path(__file__).resolve().parents[2]
KEYS = [key for section in sections() for key in section.keys]


def test_every_key_has_a_description():
    silent = [key.name for key in KEYS if not re.fullmatch(r"[A-Z`\"].* .*\.", key.meaning)]
    assert len(KEYS) > 150 and not silent, silent
    nameless = [section.title for section in sections() if not re.match(r"[A-Z].*\.", section.meaning)]
    assert not nameless, nameless


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_key_of_a_loaded_configuration_is_listed(config):
    def names(tree, prefix=""):
        for name, value in tree.items():
            yield prefix + name
            if isinstance(value, dict) and name != "action_codes":
                named = name == "columns" and "features" in prefix
                below = f"{prefix}{name}."
                yield from (
                    (key for one in value.values() for key in names(one, f"{below}NAME."))
                    if named
                    else names(value, below)
                )
            elif isinstance(value, list) and value and isinstance(value[0], dict):
                below = f"{prefix}{name}." if name == "attention" else f"{prefix}{name}.0."
                yield from (key for one in value for key in names(one, below))

    listed = {key.name for key in KEYS}
    missing = [name for name in names(load_config(config).model_dump(mode="json")) if name not in listed]
    assert not missing, missing


def test_defaults_are_those_of_the_classes(tmp_path):
    least = {"name": "x", "data": {"format": "synthetic", "protocol": "leave_one_out"}, "train": {"epochs": 1}}
    least["model"] = dict(block="hstu", max_seq_len=8, embedding_dim=8, num_layers=1, attention={"kind": "dense"})
    (tmp_path / "least.yaml").write_text(yaml.safe_dump(least))
    loaded = load_config(tmp_path / "least.yaml").model_dump(mode="json")
    for key in KEYS:
        section, _, name = key.name.rpartition(".")
        if section in ("loss", "train", "eval", "parallel") and key.default not in (
            "required",
            "absent",
            "{}",
        ):  # {}: see the keys below
            assert yaml.safe_load(key.default) == loaded[section][name], key.name


def test_keys_of_a_prefix():
    assert "model.attention.block_counts: 4   (integer, at least 1)" in as_text("model.attention", 80)
    assert "train." not in as_text("eval", 80)
    with pytest.raises(ConfigError, match=r"--keys evla: no key begins with this, did you mean eval\?"):
        as_text("evla", 80)
    with pytest.raises(ConfigError, match=r"did you mean train\.lr\?"):
        as_text("TRAIN.LR", 80)
    assert "| `train.lr` | `0.001` | The learning rate. *number, above 0* |" in as_markdown()


def run_train(*arguments):
    sys.argv = ["train.py", *arguments]
    runpy.run_path("train.py", run_name="__main__")


@pytest.mark.parametrize(
    ("prefix", "status", "says"),
    [("train.lr", 0, "The learning rate."), ("no.such", 2, "error: --keys no.such: no key begins with this\n")],
)
def test_the_program_prints_keys(prefix, status, says):
    process = Forked(run_train, "--keys", prefix)
    assert says in "".join(process.communicate()) and process.returncode == status


def test_a_closed_pipe_is_no_error():
    process = Forked(run_train, "--keys", "train")
    process.stdout.close()
    assert process.stderr.read() == ""
    process.process.join()
    assert process.returncode == 0


@pytest.mark.slow
def test_the_output_can_be_piped_to_head():
    line = f"set -o pipefail; {sys.executable} train.py --keys train | head -1"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout and not done.stderr, done.stderr
