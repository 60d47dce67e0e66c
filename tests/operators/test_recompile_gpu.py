"""On a GPU: the operators around the attention compile nothing again for another batch."""

import pytest
import torch

pytestmark = pytest.mark.gpu


def count():
    from hstu_sparse.layer import embed_inputs as inputs
    from hstu_sparse.layer import norm_gate as kernels
    from hstu_sparse.layer import query_gates as gates
    from hstu_sparse.layer import residual
    from hstu_sparse.layer import silu_parts as parts

    jit_functions = {
        x for m in (kernels, residual, gates, inputs, parts) for x in vars(m).values() if hasattr(x, "device_caches")
    }
    return sum(len(cache[0]) for kernel in jit_functions for cache in kernel.device_caches.values())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("size", [50, 64])
def test_batches_do_not_recompile_kernels(size, autocast):
    from data.batch import Batch
    from models.hstu import SequenceModel
    from training.config import RunConfig

    attention = {"kind": "bsa", "block_size": 16, "block_counts": 2, "window_size": 8, "gate_hidden_dim": 16}
    config = RunConfig.model_validate({
        "name": "x", "data": {"format": "synthetic", "protocol": "published"}, "train": {"epochs": 1},
        "model": {"block": "hstu", "max_seq_len": 300, "embedding_dim": size, "num_layers": 2, "num_heads": 2,
                  "dropout": 0.2, "attention": attention},
    })  # fmt: skip
    model = SequenceModel(config.model, 100).cuda()

    def step(tokens):
        times = torch.arange(tokens)
        offsets = torch.arange(0, tokens + 300, 300).clamp(max=tokens)
        batch = Batch(times % 100, times, times % 100, times + 1, offsets, torch.arange(len(offsets) - 1)).to("cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            out, _ = model.raw_output(batch)
        out.square().sum().backward()

    for tokens in (900, 300):
        step(tokens)
    before = count()
    for tokens in (1, 16, 17, 4096, 5001):
        step(tokens)
    assert before > 0
    assert count() == before
