"""Define `catalogue_loss`, the softmax loss over a catalogue of items, and its validation.

Letters: T tokens, I items, E embedding size, K negatives.
"""

import torch

from hstu_sparse.catalogue.parts import CatalogueShard, catalogue_loss_reference, part_loss
from hstu_sparse.core.jagged import check_storage, readable
from hstu_sparse.core.precision import without_autocast
from hstu_sparse.core.validation import (
    INTEGER,
    check_bool,
    check_fraction,
    check_int,
    check_kernel,
    check_number,
    check_tensor,
    choose_backend,
)

MAX_EMBEDDING = 512
# The number of tokens that share negatives is a multiple of this, so that no tile of a kernel has tokens of two blocks.
BLOCK = 128


@without_autocast
def catalogue_loss(
    out: torch.Tensor,
    items: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float | torch.Tensor,
    normalize: bool = True,
    negatives: torch.Tensor | None = None,
    log_q: torch.Tensor | None = None,
    block: int = 1,
    label_smoothing: float = 0.0,
    weights: torch.Tensor | None = None,
    reduction: str = "mean",
    part: CatalogueShard | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute the softmax cross-entropy of outputs and items, as the mean over the targets >= 0.

    The logit of item i at token t is l(t, i) = out[t].items[i] / temperature; with `normalize` both vectors are divided
    by their norms (at least 1e-6). Without `negatives` the loss of a token with target y is
    -l(t, y) + ln sum_i exp l(t, i) over all I items. With `negatives` it is

        -l(t, y) + ln(exp l(t, y) + sum over k with neg_k != y of exp(l(t, neg_k) - c_k))

    where c_k = log_q[neg_k] + ln K, or 0 without log_q. The target is not corrected. Repeated negatives count
    repeatedly. The loss of a token without valid negatives is 0.

    In Triton no tensor of size T x I is written. Forward saves vectors of sizes T and I, and for negatives [T, K] at
    most their logits and the gradient of `out` without some factors. docs/catalogue_loss.md states the memory.

    Gradients are deterministic, except that of items with negatives [T, K]: the kernel adds atomically, unless I is
    small compared to K * E, items has over 2^28 numbers, or torch.are_deterministic_algorithms_enabled().

    Args:
        out: [T, E], fp16, bf16 or fp32 (the reference also fp64); E up to 512 in Triton.
        items: [I, E], dtype of out. `out` and `items` are copied if their rows are not aligned to 16 bytes.
        targets: [T] int32 or int64, below I. Targets below 0 are ignored.
        temperature: a number above 0, or a floating point tensor without dimensions, which gets a gradient.
        normalize: divide outputs and items by their norms.
        negatives: [K] for all tokens, [T, K], or with `block` [ceil(T / block), K], int32 or int64, below I. Negatives
            below 0 are ignored. For [T, K] no tensor [T, K, E] is allocated: kernels gather rows; for I up to
            K * E / 2.5 (fp32: / 4) backward multiplies with all items, some thousand tokens at a time.
        log_q: [I], the logarithm of the probability with which each item is drawn as a negative. Not differentiable.
        block: the number of consecutive tokens that share a row of `negatives`: 1, or a multiple of 128. In Triton
            a multiple of 128 takes little longer than negatives [K].
        label_smoothing: as in torch's cross_entropy, 0 <= label_smoothing < 1; 0 with negatives.
        weights: [T] floating point, finite and at least 0: the weight of each target. The mean is the sum of weighted
            losses divided by the sum of the weights of targets >= 0, or 0 if that is 0.
        reduction: "mean", or "none" for the weighted loss of each target, [T], 0 for ignored targets.
        part: the part of the catalogue that `items` are, if processes share the catalogue; targets are then indices in
            the whole catalogue. The loss is that of the whole catalogue. The gradients are those of this part, so that
            the gradient of `out` is the sum over all parts. Not with negatives or label_smoothing.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        The loss, fp32 (fp64 for fp64 inputs), without dimensions or, with reduction="none", [T]; 0 if all targets are
        ignored. Gradients flow to out, items, temperature and weights; the kernels have no second derivatives.

    Examples:
        >>> out, items = torch.zeros(3, 8), torch.randn(100, 8)
        >>> targets = torch.tensor([7, 42, -1])  # the third is ignored
        >>> hstu_sparse.catalogue_loss(out, items, targets, temperature=1.0)  # ln 100: all items are equally likely
        tensor(4.6052)
        >>> hstu_sparse.catalogue_loss(out, items, targets, temperature=1.0, negatives=torch.tensor([1, 2, 3]))  # ln 4
        tensor(1.3863)
        >>> hstu_sparse.catalogue_loss(out, items, targets, temperature=1.0, reduction="none")
        tensor([4.6052, 4.6052, 0.0000])

    Raises:
        TypeError, ValueError: with the expected and the actual value. Values of tensors are checked on a CPU, and
            elsewhere with HSTU_SPARSE_DEBUG=1.

    Source: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models (arXiv 2411.09009), for the whole
    catalogue; Yi et al., Sampling-Bias-Corrected Neural Modeling, RecSys 2019, for the correction by log_q.
    """
    backend = choose_backend(backend, out, "catalogue_loss")
    sizes: dict[str, int] = {}
    check_tensor("out", out, "T E", sizes)
    check_tensor("items", items, "I E", sizes, dtype=out.dtype, device=out.device)
    check_tensor("targets", targets, "T", sizes, dtype=INTEGER, device=out.device)
    if sizes["E"] < 1 or (sizes["I"] < 1 and part is None):
        raise ValueError(f"items must be [I, E] with I, E > 0, got shape {list(items.shape)}")
    if isinstance(temperature, torch.Tensor):
        check_storage("temperature", temperature)
        if temperature.dim() or not temperature.is_floating_point() or temperature.device != out.device:
            raise ValueError(
                f"temperature must be a number, or a floating point tensor without dimensions on {out.device}, got "
                f"{temperature.dtype} of shape {list(temperature.shape)} on {temperature.device}"
            )
        if readable(temperature):
            check_number("temperature", temperature.item(), above=0.0)
    else:
        temperature = check_number("temperature", temperature, above=0.0)
    check_bool("normalize", normalize)
    label_smoothing = check_fraction("label_smoothing", label_smoothing)
    if reduction not in ("mean", "none"):
        raise ValueError(f"reduction must be 'mean' or 'none', got {reduction!r}")
    if weights is not None:
        check_tensor("weights", weights, "T", sizes, device=out.device)
        if readable(weights) and not (valid := weights.isfinite() & (weights >= 0)).all():
            raise ValueError(f"weights must be finite and at least 0, got {weights[~valid][0].item()}")
    check_int("block", block, 1)
    if block % BLOCK and block != 1:
        raise ValueError(f"block must be 1 or a multiple of {BLOCK}, got {block}")
    if block > 1 and negatives is None:
        raise ValueError(f"block={block} needs negatives, got None")
    if negatives is None:
        if log_q is not None:
            raise ValueError("log_q needs negatives, got None")
    else:
        if label_smoothing:
            raise ValueError(f"label_smoothing must be 0 with negatives, got {label_smoothing}")
        per_token = isinstance(negatives, torch.Tensor) and negatives.dim() == 2
        rows = "T" if block == 1 else "G"
        check_tensor("negatives", negatives, f"{rows} K" if per_token else "K", sizes, dtype=INTEGER, device=out.device)
        if block > 1 and (not per_token or sizes["G"] != -(-sizes["T"] // block)):
            raise ValueError(
                f"negatives must be [ceil(T={sizes['T']} / block={block}), K], got shape {list(negatives.shape)}"
            )
        if log_q is not None:
            check_tensor("log_q", log_q, "I", sizes, device=out.device)
            log_q = log_q.detach()
    if part is not None and (negatives is not None or label_smoothing):
        raise ValueError("part cannot be combined with negatives or label_smoothing")
    for name, ids in (("targets", targets if part is None else None), ("negatives", negatives)):
        if ids is not None and ids.numel() and readable(ids) and int(ids.max()) >= sizes["I"]:
            raise ValueError(f"{name} must be below I={sizes['I']}, got {int(ids.max())}")
    if backend == "triton":
        check_kernel("catalogue_loss", out, {"E": sizes["E"]}, most=MAX_EMBEDDING)
    reduced = weights is None and reduction == "mean"
    if part is not None:
        loss = part_loss(out, items, targets, temperature, normalize, part, backend, reduced)
    elif backend == "reference":
        loss = catalogue_loss_reference(
            out, items, targets, temperature=temperature, normalize=normalize, negatives=negatives, log_q=log_q,
            label_smoothing=label_smoothing, block=block,
        )  # fmt: skip
        if reduced:
            loss = loss.sum() / (targets >= 0).sum().clamp(min=1)
    else:
        from hstu_sparse.catalogue.launches import catalogue_loss_operator

        learned = isinstance(temperature, torch.Tensor)
        loss = catalogue_loss_operator(
            out, items, targets, temperature if learned else None, negatives, log_q, 1.0 if learned else temperature,
            normalize, label_smoothing, reduced, block,
        )[0]  # fmt: skip
    if weights is None:
        return loss
    weights = torch.where(targets < 0, 0.0, weights.to(loss.dtype))
    if reduction == "none":
        return weights * loss
    total = weights.sum()
    return (weights * loss).sum() / torch.where(total > 0, total, 1.0)
