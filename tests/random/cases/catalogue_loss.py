"""Softmax loss over a catalogue. Letters: T tokens, I items, E embedding size, K negatives."""

import torch

from hstu_sparse import catalogue_loss
from hstu_sparse.catalogue import BLOCK
from tests.random.cases import Launches
from tests.support.budgets import compare_with_reference, gradients


def draw(random, small):
    tokens = random.choice([0, 1, random.randint(2, 40 if small else 3000)])
    items = random.choice([1, 2, random.randint(3, 100 if small else 20_000)])
    num_negatives = random.choice([1, 2, random.randint(3, 9 if small else 64)])
    size = random.choice([16, 24, 50, 64] if small else [16, 50, 64, 96, 128, 192, 256, 320, 512])
    # With few tokens and items, all targets may by chance be nearly certain. Loss and gradients are then nearly 0, as
    # differences of large numbers. A dot product of rows of normal numbers is about sqrt(size).
    many = min(tokens, items, num_negatives) > 5
    sampled = random.choice(["no", "no", "shared", "blocks", "per token"])
    normalize = random.random() < 0.7
    return dict(
        tokens=tokens,
        items=items,
        size=size,
        sampled=sampled,
        num_negatives=num_negatives,
        corrected=random.random() < 0.5,
        normalize=normalize,
        temperature=random.choice(
            [*([0.02, 0.05] if many else []), 0.3, 1.0] if normalize else [3.0 if many else 0.5 * size**0.5, 10.0]
        ),
        learned=random.random() < 0.5,
        smoothing=random.choice([0.0, 0.1]) if sampled == "no" else 0.0,
        ignored=random.choice([0.0, 0.3, 1.0]),
        ids=random.choice(["int32", "int64"]),
        strided=random.random() < 0.3,
        weighted=random.random() < 0.2,
        reduction=random.choice(["mean", "mean", "none"]),
        dtype=random.choice(["float32"] if small else ["float32", "bfloat16", "float16"]),
        seed=random.randrange(2**31),
    )


def reference_bytes(*, tokens, items, size, sampled, num_negatives, **_):
    gathered = size if sampled in ("per token", "blocks") else 1
    scores = tokens * (items if sampled == "no" else num_negatives * gathered)
    return 96 * (scores + (tokens + items) * size)


def problem(device, *, tokens, items, size, sampled, num_negatives, corrected, normalize, temperature, learned,
            smoothing, ignored, ids, strided, dtype, weighted, reduction, seed):  # fmt: skip
    """Return (tensors with gradients, the other arguments of catalogue_loss)."""
    generator = torch.Generator().manual_seed(seed)
    ids, dtype = getattr(torch, ids), getattr(torch, dtype)
    wide = [torch.randn(rows, size + 8, generator=generator).to(device, dtype) for rows in (tokens, items)]
    out, table = (x[:, 8:] if strided else x[:, :size].contiguous() for x in wide)
    targets = torch.randint(items, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < ignored] = -1
    options = {"targets": targets.to(device, ids), "normalize": normalize, "label_smoothing": smoothing}
    options |= {"reduction": reduction}
    if weighted:
        options["weights"] = torch.rand(tokens, generator=generator).to(device)
    if sampled != "no":
        rows = {"shared": (), "blocks": (-(-tokens // BLOCK),), "per token": (tokens,)}[sampled]
        shape = (*rows, num_negatives)
        negatives = torch.randint(-1, items, shape, generator=generator)
        if tokens and num_negatives > 1:
            # One of them is a target, and one item occurs twice.
            negatives[..., 0] = targets[0] if sampled == "shared" else targets[:: BLOCK if sampled == "blocks" else 1]
            if num_negatives > 2:
                negatives[..., -1] = negatives[..., -2]
        options["negatives"] = negatives.to(device, ids)
        options["block"] = BLOCK if sampled == "blocks" else 1
        if corrected:
            options["log_q"] = torch.randn(items, generator=generator).sub(3).to(device)
    inputs = {"out": out, "items": table}
    if learned:
        inputs["temperature"] = torch.tensor(temperature, device=device)
    else:
        options["temperature"] = temperature
    return inputs, options


# Relative errors that are always allowed, of (the loss, the gradients of out and items, the temperature's gradient).
# The loss subtracts logits of tens from each other, and the temperature's gradient sums rounded probabilities.
FLOOR = {"float32": (4e-6, 4e-6, 2e-5), "float16": (4e-6, 3e-3, 4e-3), "bfloat16": (4e-6, 2e-2, 2e-2)}


def alone(items: int, targets, negatives=None, block=1, **_) -> bool:
    """Return whether no target has a competing item, so that loss and gradients are differences of equal numbers."""
    if negatives is None:
        return items == 1
    if block > 1:
        negatives = negatives.repeat_interleave(block, 0)[: len(targets)]
    target_column = targets[:, None].expand(len(targets), negatives.shape[-1])
    return not ((target_column >= 0) & (negatives >= 0) & (negatives != target_column)).any()


def check(device, **case):
    inputs, options = problem(device, **case)
    if alone(case["items"], **options):
        grad = torch.ones(() if case["reduction"] == "mean" else case["tokens"])
        grads = gradients(lambda **x: catalogue_loss(**x, **options, backend="triton"), inputs, grad)
        # A gradient is the difference of two rounded rows that are equal before rounding.
        rounded = 4 * torch.finfo(inputs["out"].dtype).eps
        for name, x in grads.items():
            most = max(1e-4, rounded if name != "output" else 0.0) / min(case["temperature"], 1.0)
            assert not x.numel() or x.abs().max() < most, (name, x.abs().max())
        return
    loss, grad, slope = FLOOR[case["dtype"]]
    floor = {"output": loss, "grad of out": grad, "grad of items": grad, "grad of temperature": slope}
    compare_with_reference(
        lambda **arguments: catalogue_loss(**arguments, **options, backend="triton"),
        lambda **arguments: catalogue_loss(**arguments, **options, backend="reference"),
        inputs,
        factor=4.0,
        floor=floor,
        terms=lambda slope: {name: x / floor[name] for name, x in rounding(**inputs, **options, slope=slope).items()},
    )


@torch.no_grad()
def rounding(
    out, items, targets, temperature, normalize, slope, reduction, weights=None, **_
) -> dict[str, torch.Tensor]:
    """Estimate the error of the loss and its gradients, by name, from rounded scores and a softmax of dout in 16 bits.

    The loss of a nearly certain target is nearly 0: the difference of a log-sum-exp and a score, while the gradients
    have the probability minus 1. The temperature's gradient is 0 for tokens whose negatives are all their target.
    """
    rounded = 0.0 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps / 2
    rows = targets.clamp(min=0).long()
    out, target_rows = out.double(), items.double()[rows]
    if normalize:
        (out, length), (target_rows, height) = (
            (x / x.norm(dim=-1, keepdim=True), x.norm(dim=-1)) for x in (out, target_rows)
        )
    else:
        length = height = torch.ones_like(rows, dtype=torch.float64)
    terms = out * target_rows / temperature
    share = (targets >= 0) * (1.0 if weights is None else weights)
    share = share / share.sum().clamp(min=1e-9) if reduction == "mean" else share * slope.to(share.device).abs()
    score = terms.sum(-1).abs()
    off = 2.0**-21 * (1 + score + terms.norm(dim=-1)) * share
    out_slope = ((off + rounded * share) / length / temperature)[:, None] * target_rows.abs()
    target_slope = (off / height / temperature)[:, None] * out.abs()
    return {
        "output": off.sum() if reduction == "mean" else off / share.clamp(min=1e-9),
        "grad of out": out_slope,
        "grad of items": torch.zeros_like(items, dtype=torch.float64).index_add_(0, rows, target_slope),
        "grad of temperature": (off + rounded * share) @ score / temperature,
    }


def launches():
    from hstu_sparse.catalogue.launches import catalogue_loss_operator as operator
    from hstu_sparse.catalogue.parts import CatalogueShard, part_loss

    # These spill after the loop over tiles, where the end of a gradient needs registers for rows of both matrices
    # besides the accumulators; within the loop only in fp32 (three products, operands split in registers).
    spills = {f"catalogue_loss_bwd_{part}_kernel": 1500 for part in ("dout", "ditems")}
    # A number or two on some architectures and compilers.
    spills |= {
        f"catalogue_loss_{part}_kernel": 16 for part in ("fwd", "sampled_fwd", "sampled_bwd_dout", "merge_bwd_ditems")
    }

    def case(
        size,
        dtype,
        sampled="no",
        normalize=True,
        smoothing=0.0,
        tokens=256,
        items=1000,
        bounded=True,
        reduced=True,
        **options,
    ):
        def call():
            out, table = torch.zeros(tokens, size, dtype=dtype), torch.zeros(items, size, dtype=dtype)
            targets = torch.zeros(tokens, dtype=torch.int64)
            rows = {"shared": (), "blocks": (-(-tokens // BLOCK),), "per token": (tokens,)}
            shape = None if sampled == "no" else (*rows[sampled], 40)
            negatives = None if shape is None else torch.zeros(shape, dtype=torch.int64)
            log_q = None if shape is None else torch.zeros(items)
            temperature = None if bounded else torch.ones(())
            arguments = (out, table, targets, temperature, negatives, log_q, 0.05, normalize, smoothing, reduced)
            arguments = (*arguments, BLOCK if sampled == "blocks" else 1)
            _, *saved = operator.forward(*arguments)
            operator.backward(torch.ones(() if reduced else tokens), *arguments, *saved)

        label = f"{dtype} E={size} {sampled} normalize={normalize} smoothing={smoothing} T={tokens} reduced={reduced}"
        allowed = spills | {"catalogue_loss_fwd_kernel": 200} if dtype == torch.float32 else spills
        return Launches(label, call, local_bytes=allowed, **options)

    def case_of_part(tokens, **options):
        def call():
            out, table = (torch.zeros(n, 128, dtype=torch.bfloat16, requires_grad=True) for n in (tokens, 1000))
            part = CatalogueShard(500, lambda lse, logit: (lse, logit))
            targets = torch.zeros(tokens, dtype=torch.int64)
            part_loss(out, table, targets, 0.05, True, part, "triton").backward()

        return Launches(f"a part of a catalogue T={tokens}", call, local_bytes=spills, **options)

    # 40,000 tokens fill a GPU, so that no tile is split and the kernels that loop over tiles also end the gradients.
    return [
        case(256, torch.bfloat16, tokens=40_000),
        case(256, torch.bfloat16, "shared", tokens=64),
        case(256, torch.bfloat16, "blocks", architectures=(90,)),
        case(50, torch.float32, "blocks", architectures=(80,)),
        # A small catalogue, and one whose rows are gathered.
        case(50, torch.float32, "per token", items=400, architectures=(90,)),
        case(256, torch.bfloat16, "per token", architectures=(80,)),
        case(50, torch.float32, "per token"),
        case(50, torch.float32, bounded=False, architectures=(80, 90)),
        case(512, torch.float16, tokens=40_000, smoothing=0.1, architectures=(90,)),
        case(256, torch.float32, normalize=False, architectures=(80,)),
        case(128, torch.bfloat16, tokens=40_000, reduced=False, architectures=(90,)),
        case(64, torch.float16, "per token", reduced=False, architectures=(80,)),
        case(64, torch.bfloat16, "per token", items=100, reduced=False, architectures=(90,)),
        case_of_part(40_000, architectures=(90,)),
        case_of_part(64, architectures=(90,)),
    ]
