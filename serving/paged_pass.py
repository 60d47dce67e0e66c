"""Run new tokens of users through the model; they attend to the cached pages of earlier tokens.

Letters: T new tokens, E embedding size, H heads, D query/key and V value head size.
"""

import copy
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hstu_sparse
from hstu_sparse.bias.relative import RelativeBias
from models.attention.contract import AttentionKind, AuxLoss, PagedForm
from models.hstu import HSTULayer, SequenceModel
from serving.block_sparse import paged_block_sparse
from serving.errors import ServingError
from serving.paged_group import PagedGroup, PagedPass, ServedBatch


class ServedAttention(nn.Module):
    """An attention kind whose new tokens attend to earlier tokens in pages."""

    def __init__(self, inner: AttentionKind, form: PagedForm, layer: int):
        super().__init__()
        self.inner, self.form, self.layer = inner, form, layer

    @property
    def sizes(self):
        return self.inner.sizes

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Any) -> tuple[Tensor, dict[str, AuxLoss]]:
        outputs = []
        for group in batch.served.groups:
            group_q, group_k, group_v = (y[group.tokens] for y in (q, k, v))
            if not group.candidates:
                batch.served.pool.write(self.layer, group_k, group_v, group.offsets, group.pages, group.lengths)
            if self.layer == batch.served.last and self.form.blocks is None:
                outputs.append(torch.zeros_like(group_v))  # these outputs are not used
            else:
                outputs.append(self.attend(group_q, group_k, group_v, batch.served, group))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, served: PagedPass, group: PagedGroup) -> Tensor:
        """Return the attention outputs [T, H, V] of a group's tokens."""
        form, longest, bias = self.form, self.inner.sizes.max_seq_len, None
        if form.position is not None or form.time is not None:
            bias = RelativeBias(form.position, form.time)
            if form.time is not None:
                bias = bias._replace(timestamps=group.times, query_timestamps=group.query_times)
        if form.blocks is not None:
            return paged_block_sparse(cast(Any, self.inner), self.layer, q, k, v, bias, served, group)
        if group.whole:
            out = whole_attention(form, longest, q, k, v, bias, served.pool.format, group)
            if out is not None:
                return out
        one_each = len(q) == len(group.lengths)  # `candidates` gives the same result faster
        return hstu_sparse.paged_attention(
            q,
            k,
            v,
            group.offsets,
            served.pool,
            group.pages,
            group.lengths,
            longest,
            layer=self.layer,
            candidates=group.candidates or one_each,
            window_size=form.window,
            num_context=group.num_context,
            activation="softmax" if form.softmax else "silu",
            scale=form.scale,
            normalizer=form.normalizer,
            bias=bias,
        )


def whole_attention(
    attention: PagedForm,
    longest: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: RelativeBias | None,
    form: hstu_sparse.PageFormat,
    group: PagedGroup,
) -> Tensor | None:
    """Return the attention outputs [T, H, V] of a group with `whole`, by the kernels for whole sequences.

    These are ten times as fast as paged attention, which looks up a time bias for each pair. As in paged attention, a
    token attends to the decoded keys and values of other tokens and to the exact ones of itself. For coded pages
    `rotatekv_self_attention` computes this; it is used on a CPU only.

    Returns None if no such kernel computes the same as paged attention.
    """
    exact = form.bits is None and (form.dtype == k.dtype or form.dtype.itemsize > k.dtype.itemsize)
    only_exact = form.bits is None or q.is_cuda or attention.window or group.num_context is not None
    if attention.softmax or (not exact and only_exact):
        return None
    # Coded keys are padded to a size that the Hadamard transform supports.
    q, k = (F.pad(x, (0, form.coded_size - form.head_size)) if form.bits else x for x in (q, k))
    offsets = group.offsets
    options: dict[str, Any] = dict(bias=bias)
    if exact:
        options |= dict(window_size=attention.window, num_context=group.num_context)
    options["plan"] = hstu_sparse.attention_plan(q, v, offsets, longest, **options, once=group.once)
    options |= dict(scale=attention.scale, normalizer=attention.normalizer)
    if exact:
        return hstu_sparse.hstu_attention(q, k, v, offsets, longest, **options)
    codes = {name: getattr(form, name) for name in ("bits", "head_group", "quant_group", "sink_tokens", "clip")}
    return hstu_sparse.rotatekv_self_attention(q, k, v, offsets, longest, **options, **codes)


def served_layers(model: SequenceModel, dtype: torch.dtype | None = None) -> list[Any]:
    """Return the model's layers with the same weights, whose attention reads from pages; ServingError if one cannot.

    dtype: cast the weights of an HSTU layer's matrix products to it once, as autocast would in each pass.
    """
    layers = []
    for place, layer in enumerate(cast(Iterable[Any], model.layers)):
        inner = layer.attention
        form = paged_form(inner, place, model.num_context > 0)
        twin = copy.copy(layer)
        twin._modules = layer._modules | {"attention": ServedAttention(inner, form, place)}
        if dtype is not None and isinstance(layer, HSTULayer):
            twin._parameters = {"uvqk": nn.Parameter(layer.uvqk.to(dtype), requires_grad=False)}
            output = copy.copy(layer.output)
            output._parameters = output._parameters | {
                "weight": nn.Parameter(layer.output.weight.to(dtype), requires_grad=False)
            }
            twin._modules["output"] = output
        layers.append(twin)
    return layers


def paged_form(inner: AttentionKind, place: int, context: bool) -> PagedForm:
    """Return how a layer's attention reads from pages; ServingError if it cannot.

    context: whether sequences begin with feature tokens.
    """
    try:
        form = inner.paged()
    except ValueError as error:
        raise ServingError(f"layer {place} {error}") from None
    if form is None:
        raise ServingError(
            f"layer {place} ({inner.config.kind}) cannot be served: expected dense, softmax, rotatekv or bsa"
        )
    if context and not inner.context:
        raise ServingError(f"layer {place} ({inner.config.kind}) does not support data.features.users.as=tokens")
    heads = inner.kv_heads(inner.config, inner.sizes.num_heads)
    if heads != inner.sizes.num_heads:
        raise ServingError(
            f"layer {place} has {heads} key heads, expected {inner.sizes.num_heads}, one for each query head"
        )
    return form


def embedded(model: SequenceModel, batch: ServedBatch) -> Tensor:
    """Return the embeddings [T, E] of event tokens and feature tokens."""
    embedding, served = model.embedding, batch.served
    # A direct look-up: torchrec's launches a dozen more kernels.
    rows = None if embedding.sharded else embedding.item_rows(batch.item_ids)
    x = embedding(batch.with_event_positions, rows)
    if served.context is None:
        return x
    user_tokens = embedding.user_tokens(batch.user_features).flatten(0, 1).to(x.dtype)
    return torch.where((served.context < 0)[:, None], x, user_tokens[served.context.clamp(min=0)])


@torch.inference_mode()
def run(model: SequenceModel, layers: list[Any], batch: ServedBatch) -> Tensor:
    """Write new tokens to the pages, and return their outputs [T, E], fp32, not normalised."""
    served = batch.served
    for group in served.groups:
        if not group.candidates:
            served.pool.write_timestamps(group.times, group.offsets, group.pages, group.lengths)
    x = embedded(model, batch)
    for layer in layers:
        x, _ = layer(x, batch)
    return x.float()
