"""Define the public function of the softmax loss over a catalogue of items, its validation, the choice of backend.

Letters: T tokens, I items, E embedding size, K negatives.
"""

import torch

from hstu_sparse.catalogue.parts import Part, catalogue_loss_reference, loss_of_part
from hstu_sparse.core.jagged import check_storage, readable
from hstu_sparse.core.precision import without_autocast
from hstu_sparse.core.validation import (
    INTEGER,
    check_bool,
    check_int,
    check_kernel,
    check_number,
    check_tensor,
    choose_backend,
)

MAX_EMBEDDING = 512
# Tokens that share negatives in blocks are a multiple of this: no tile of a kernel has tokens of two blocks.
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
    part: Part | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute the mean softmax cross-entropy of each output's target among the items, over the targets >= 0.

    The logit of item i at token t is l(t, i) = out[t].items[i] / temperature, both divided by their norms first if
    `normalize` (norms below 1e-6 count as 1e-6). Without `negatives` the loss of a token with target y is
    -l(t, y) + ln sum_i exp l(t, i) over all I items. With them it is

        -l(t, y) + ln(exp l(t, y) + sum over k with neg_k != y of exp(l(t, neg_k) - c_k))

    with c_k = log_q[neg_k] + ln K, or 0 without log_q: the positive is not corrected, repeated negatives count
    repeatedly, and a row without a valid negative counts 0.

    In Triton nothing of size T x I is ever written, and forward saves only numbers for each token and item, and with
    negatives [T, K] at most their logits and what dout is computed from. Gradients have the same bits in every run,
    except the table's with negatives [T, K]: entries are added by atomics, in no order, unless I is small beside K * E,
    the table has over 2^28 numbers or torch.are_deterministic_algorithms_enabled(). Memory beyond inputs and gradients:
    docs/catalogue_loss.md.

    Args:
        out: [T, E], fp16, bf16 or fp32 (the reference also fp64); E up to 512 in Triton.
        items: [I, E], dtype of out. Rows of either tensor that are not aligned to 16 bytes are copied.
        targets: [T] int32 or int64 below I; a negative one does not count.
        temperature: a number above 0, or a floating point tensor of no dimension, which gets a gradient; its value is
            checked on a CPU.
        negatives: [K] for all tokens, [T, K], or with `block` [ceil(T / block), K], int32 or int64 below I; negative
            ones do not count. The [T, K] form never allocates [T, K, E]: it gathers rows in the kernel, or, for I up to
            K * E / 2.5 (fp32: / 4), computes products with all items, some thousand tokens at a time.
        log_q: [I], logarithm of the probability with which each item is drawn as a negative. It gets no gradient.
        block: 1, or a multiple of 128: the number of consecutive tokens that share a row of `negatives`. The fewer
            rows are gathered, the faster: in Triton, blocks cost little more than negatives [K].
        label_smoothing: as torch's cross_entropy, 0 <= label_smoothing < 1; only without negatives.
        weights: [T] floating point, finite and at least 0, checked on a CPU: each target's weight in the mean, which is
            the sum of the weighted losses over the sum of the weights of the targets >= 0 (0 if that is 0).
        reduction: "mean", or "none" for the loss of each target, [T], multiplied by its weight; 0 for none.
        part: if `items` are only some of the catalogue, starting with item `part.first`, while targets are numbers in
            the whole catalogue: `part.merge` turns the log-sum-exps and the targets' logits of the part into those of
            the whole catalogue, for processes that share it. The loss is that of the whole catalogue; gradients are
            those of this part, and out's gradient is the sum over all parts. Without negatives and label_smoothing.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        The loss, a tensor of no dimension or, with reduction="none", [T], fp32 (fp64 for fp64 inputs); 0 if no target
        counts. Gradients flow to out, items, temperature and weights; the kernels have no second derivatives.

    Examples:
        >>> out, items = torch.zeros(3, 8), torch.randn(100, 8)
        >>> targets = torch.tensor([7, 42, -1])  # the third does not count
        >>> hstu_sparse.catalogue_loss(out, items, targets, temperature=1.0)  # ln 100: all items are equally likely
        tensor(4.6052)
        >>> hstu_sparse.catalogue_loss(out, items, targets, temperature=1.0, negatives=torch.tensor([1, 2, 3]))  # ln 4
        tensor(1.3863)
        >>> hstu_sparse.catalogue_loss(out, items, targets, temperature=1.0, reduction="none")
        tensor([4.6052, 4.6052, 0.0000])

    Raises:
        TypeError, ValueError: with the expected and the actual value. Ids out of range are detected on a CPU, and
            elsewhere with HSTU_SPARSE_DEBUG.

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
                f"temperature must be a number, or a floating point tensor of no dimension on {out.device}, got "
                f"{temperature.dtype} of shape {list(temperature.shape)} on {temperature.device}"
            )
        if readable(temperature):
            check_number("temperature", temperature.item(), above=0.0)
    else:
        temperature = check_number("temperature", temperature, above=0.0)
    check_bool("normalize", normalize)
    label_smoothing = check_number("label_smoothing", label_smoothing, above=-1e-30, below=1.0)
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
        raise ValueError("block: of tokens that share negatives, it needs negatives")
    if negatives is None:
        if log_q is not None:
            raise ValueError("log_q corrects sampled negatives: it needs negatives")
    else:
        if label_smoothing:
            raise ValueError(f"label_smoothing is over the whole catalogue: with negatives 0, got {label_smoothing}")
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
        raise ValueError("part: not together with negatives or label_smoothing")
    for name, ids in (("targets", targets if part is None else None), ("negatives", negatives)):
        if ids is not None and ids.numel() and readable(ids) and int(ids.max()) >= sizes["I"]:
            raise ValueError(f"{name} must be below I={sizes['I']}, got {int(ids.max())}")
    if backend == "triton":
        check_kernel("catalogue_loss", out, {"E": sizes["E"]}, most=MAX_EMBEDDING)
    reduced = weights is None and reduction == "mean"
    if part is not None:
        loss = loss_of_part(out, items, targets, temperature, normalize, part, backend, reduced)
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
