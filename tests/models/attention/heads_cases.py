"""Define cases of models with heads divided over ranks, and compare ranks of torchrun with one GPU."""

import dataclasses
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from data.batch import Batch
from data.features.vocabulary import FeatureVocabulary, KnownFeature
from models.hstu import SequenceModel
from models.options import ModelConfig
from tests.models.test_hstu import CONFIG, NUM_ITEMS, make_batch
from training.config import load_config
from training.graph import GraphedStep
from training.ranks.processes import Ranks
from training.step import build_step

ROOT = Path(__file__).resolve().parents[3]

LENGTHS = [9, 0, 12, 1, 6]
SIZES = CONFIG | {"num_heads": 12, "attention_dim": 4, "linear_dim": 3}  # heads that 2, 3 and 4 ranks divide
TRANSFORMER = {"block": "transformer", "feed_forward_dim": 8}
WIDE = {"attention_dim": 16, "linear_dim": 16}
INDEXER = {"kind": "indexer", "top_k": 3, "num_index_heads": 2, "index_dim": 5, "num_kv_heads": 12}
INDEXER |= {"index_position_bias": True, "index_time_bias": True, "position_bias": True}
KINDS = {
    "dense": {"attention": {"kind": "dense", "window_size": 5}},
    "dense, candidates": {"attention": {"kind": "dense"}, "rotary": {"position": True, "time": True}},
    "dense, context": {"attention": {"kind": "dense", "normalizer": 9}},
    "softmax": TRANSFORMER | {"attention": {"kind": "softmax"}},
    "softmax, context": {"attention": {"kind": "softmax", "position_bias": True, "time_bias": True}},
    "bsa": {"attention": {"kind": "bsa", "block_size": 2, "block_counts": 2, "window_size": 3}},
    "htree": {"attention": {"kind": "htree", "compression_rate": 2, "top_k": 1, "num_kv_heads": 12}},
    "indexer": {"attention": INDEXER | {"selection_group": 1}},
    "indexer, groups": {"attention": INDEXER | {"selection_group": 2}},
    "indexer, every token": TRANSFORMER | {"attention": INDEXER | {"warmup_steps": 5}},
    "rotatekv": WIDE | {"attention": {"kind": "rotatekv", "bits": 4, "head_group": 1}},
    "ring of softmax": {"attention": {"kind": "ring", "inner": "softmax", "num_kv_heads": 12}},
    "ring of hstu": {"attention": {"kind": "ring", "inner": "hstu", "position_bias": True, "time_bias": True}},
}
# Cases whose groups of heads only two ranks can divide.
OF_TWO = {
    "softmax, shared keys": {"attention": {"kind": "softmax", "num_kv_heads": 2, "position_bias": True}},
    "rotatekv, groups": WIDE | {"attention": {"kind": "rotatekv", "bits": 2, "head_group": 2, "sink_tokens": 1}},
}
USERS = FeatureVocabulary(
    tuple(KnownFeature("users", name, "category", np.array(["a", "b", "c"])) for name in ("age", "country"))
)


def cases(world: int) -> dict[str, dict]:
    return KINDS | OF_TWO if world == 2 else KINDS


def model_of(case: str, dtype=torch.float64, backend="auto") -> SequenceModel:
    torch.manual_seed(3)
    options = SIZES | (KINDS | OF_TWO)[case]
    config = ModelConfig.model_validate(options | {"attention": options["attention"] | {"backend": backend}})
    context = {"features": USERS, "user_tokens": True} if "context" in case else {}
    model = SequenceModel(config, NUM_ITEMS, **context).to(dtype)
    # Make outputs depend on attention, which they hardly do in a new model.
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def batch_of(case: str) -> Batch:
    batch = dataclasses.replace(make_batch(LENGTHS), phase=0 if "every" in case else 10)
    batch.real = torch.arange(sum(LENGTHS)) % 5 != 3
    if "candidates" in case:
        batch.num_targets = torch.tensor([2, 0, 3, 1, 0])
    if "context" in case:
        batch.user_features = torch.tensor([[1, 2], [3, 1], [2, 2], [0, 3], [1, 1]])[:, :, None]
    return batch


def ranks_of(rank: int, world: int) -> Ranks:
    """Return the ranks of a context group of all processes, without a run."""
    ranks = Ranks.__new__(Ranks)
    ranks.context, ranks.context_rank, ranks.context_group = world, rank, dist.group.WORLD if world > 1 else None
    ranks.by_heads = world > 1
    return ranks


def results(case: str, rank: int = 0, world: int = 1, device="cpu", dtype=torch.float64) -> dict:
    """Return a rank's outputs by the index of their tokens, its losses, and its parts of the weights' gradients."""
    # The kernels of sparse kinds take larger blocks than a small case has.
    sparse = (KINDS | OF_TWO)[case]["attention"]["kind"] in ("bsa", "htree", "indexer", "rotatekv")
    backend = "reference" if sparse and device != "cpu" else "auto"
    model, ranks = model_of(case, dtype, backend).to(device), ranks_of(rank, world)
    batch = ranks.cut(batch_of(case).to(device), model.num_context)
    share = ranks.part_of_context if world > 1 else None
    out, losses = model.raw_output(batch, share=share)
    # Random weights for events, none for context tokens.
    events = torch.arange(sum(LENGTHS), device=device) if batch.cut is None else batch.cut.index
    if batch.num_context:
        sequence = torch.bucketize(events, batch.cut.uncut.seq_offsets[1:], right=True)
        events = torch.where(batch.positions > 0, events - model.num_context * (sequence + 1), -1)
    weights = torch.randn(sum(LENGTHS), out.shape[1], generator=torch.Generator().manual_seed(4)).to(out)
    loss = (out * weights[events])[events >= 0].sum() + sum(one.weighted for one in losses.values())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    values = {name: one.value.detach() for name, one in losses.items()}
    return {"out": dict(zip(events.tolist(), out.detach())), "losses": values, "gradients": gradients}


def all_of_rank(rank: int, world: int) -> dict:
    return {case: results(case, rank, world) for case in cases(world)}


def assert_as_one(case: str, ranks: list[dict], whole: dict, **tolerance) -> None:
    """Assert that the ranks' outputs are those of one process, and that the gradients add up to its gradients."""
    outputs = {token: row for rank in ranks for token, row in rank["out"].items() if token >= 0}
    assert outputs.keys() == whole["out"].keys(), case
    for token, row in whole["out"].items():
        torch.testing.assert_close(outputs[token], row, **tolerance)
    for rank in ranks:
        torch.testing.assert_close(rank["losses"], whole["losses"], **tolerance)
    for name, gradient in whole["gradients"].items():
        total = sum(rank["gradients"].get(name, torch.zeros_like(gradient)) for rank in ranks)
        torch.testing.assert_close(total, gradient, **tolerance, msg=lambda m, n=name: f"{case}, {n}: {m}")


def losses_of_steps(world: int, graphs: bool) -> list[float]:
    """Return the losses of training steps on a GPU, by heads, of one batch: the first before a capture."""
    words = [f"parallel.context={world}", "device=cuda", "model.dropout=0", "loss.kind=cross_entropy"]
    config = load_config(ROOT / "configs/synthetic-hstu.yaml", [*words, f"train.cuda_graphs={str(graphs).lower()}"])
    torch.manual_seed(5)
    model = SequenceModel(config.model, NUM_ITEMS).cuda().train()
    _, step = build_step(config, model, torch.device("cuda"), ranks=Ranks(config))
    assert isinstance(step, GraphedStep) == graphs
    batch = make_batch(LENGTHS).to("cuda")
    return [float(step(batch)["loss"]) for _ in range(4)]


def main() -> None:
    """Compare the ranks of torchrun with one GPU, in fp32, and captured training steps with others; print what was
    compared.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    for case in cases(world):
        parts: list = [None] * world
        part = results(case, rank, world, device, torch.float32)
        part = {name: {key: x.cpu() for key, x in values.items()} for name, values in part.items()}
        dist.all_gather_object(parts, part)
        whole = results(case, device=device, dtype=torch.float32)
        whole = {name: {key: x.cpu() for key, x in values.items()} for name, values in whole.items()}
        assert_as_one(case, parts, whole, rtol=2e-3, atol=2e-3)
        print(f"rank {rank}: {case}", flush=True)
    captured, others = (losses_of_steps(world, graphs) for graphs in (True, False))
    torch.testing.assert_close(captured, others, rtol=1e-4, atol=1e-4)
    print(f"rank {rank}: captured steps {captured}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
