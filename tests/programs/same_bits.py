"""Train tiny models on a CPU with the code of several folders, and print whether all results are bit-identical.

    git archive COMMIT | tar x -C /tmp/before
    python -m tests.programs.same_bits /tmp/before .

The models are those of CASES, each trained with one thread. The weights of best/ and of the last checkpoint and the
losses in metrics.jsonl are compared.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file

from training.weights import saved_weights

SETTINGS = [
    "data.synthetic={num_users: 60, num_items: 100, mean_length: 20, min_length: 5, max_length: 60, actions: true}",
    *("model.num_layers=2", "train.epochs=2", "train.batch_size=16", "threads=1", "device=cpu"),
]
MOL = "model.head={kind: mol, query_components: 2, item_components: 2, component_dim: 8, gate_hidden_dim: 8}"
RANKING = ["task={kind: ranking, actions: [{name: liked, at_least: 1}]}", "data.protocol=last_tenth", "loss={}"]
CASES = {
    "hstu": [],
    "bsa": ["model.attention.kind=bsa", "loss.kind=in_batch"],
    "transformer": [
        *("model.block=transformer", "model.attention={kind: softmax}", "model.feed_forward_dim=32"),
        "loss.kind=cross_entropy",
    ],
    "indexer": ["model.attention={kind: indexer, warmup_steps: 4, selection_group: 4}"],
    "mol": [MOL, "train.ema_decay=0.9"],
    "htree": ["model.attention.kind=htree", "loss.kind=mixed_negatives", "train.clip_norm=0.5"],
    "rotatekv": ["model.attention.kind=rotatekv", "model.dropout=0.2"],
    "16-bit": ["model.table_dtype=bfloat16", "train.ema_decay=0.9", "train.decay=cosine", "loss.kind=bce"],
    "ranking": RANKING,
    "ranking-bsa": [*RANKING, "model.attention.kind=bsa", "train.clip_norm=0.5"],
}


def trained(tree: Path, case: str, folder: Path) -> tuple[str, list[float]]:
    """Train a case with the code in `tree` in a new folder; return (the SHA-256 of the weights, the losses)."""
    command = [sys.executable, "train.py", "configs/synthetic-hstu.yaml", *SETTINGS, *CASES[case]]
    command += [f"data.cache_dir={folder / 'cache'}", "--run", str(folder / "run")]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{tree}, {case}: {done.stderr[-2000:]}")
    digest = hashlib.sha256()
    for saved in (folder / "run/best", max((folder / "run/checkpoints").iterdir())):
        one_file = saved / "model.safetensors"  # of best weights, and of checkpoints of earlier commits
        weights = load_file(one_file) if one_file.exists() else saved_weights(saved)[0]
        for name in sorted(weights):
            digest.update(name.encode() + weights[name].float().numpy().tobytes())
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return digest.hexdigest(), [line["loss"] for line in lines]


def main(*trees: str) -> int:
    same = True
    for case in CASES:
        results = []
        for tree in trees:
            with tempfile.TemporaryDirectory() as folder:
                results.append(trained(Path(tree).resolve(), case, Path(folder)))
        equal = all(result == results[0] for result in results)
        same = same and equal
        print(case, "same" if equal else "DIFFERENT", *(f"{digest[:16]} {losses}" for digest, losses in results))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
