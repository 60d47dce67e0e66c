"""Run new tokens of users through the model, on top of the pages of earlier tokens.

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
from serving.paged_group import Part, Pass, ServedBatch


class ServedAttention(nn.Module):
    """An attention kind whose new tokens read what came before them from pages."""

    def __init__(self, inner: AttentionKind, form: PagedForm, layer: int):
        super().__init__()
        self.inner, self.form, self.layer = inner, form, layer

    @property
    def sizes(self):
        return self.inner.sizes

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Any) -> tuple[Tensor, dict[str, AuxLoss]]:
        outputs = []
        for part in batch.served.parts:
            own_q, own_k, own_v = (y[part.tokens] for y in (q, k, v))
            if not part.candidates:
                batch.served.pool.write(self.layer, own_k, own_v, part.offsets, part.pages, part.lengths)
            if self.layer == batch.served.last and self.form.blocks is None:
                outputs.append(torch.zeros_like(own_v))  # nobody reads the outputs of the last layer
            else:
                outputs.append(self.attend(own_q, own_k, own_v, batch.served, part))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, served: Pass, part: Part) -> Tensor:
        """Return [T, H, V] of a part's tokens."""
        form, longest, bias = self.form, self.inner.sizes.max_seq_len, None
        if form.position is not None or form.time is not None:
            bias = RelativeBias(form.position, form.time)
            if form.time is not None:
                bias = bias._replace(timestamps=part.times, query_timestamps=part.query_times)
        if form.blocks is not None:
            return paged_block_sparse(cast(Any, self.inner), self.layer, q, k, v, bias, served, part)
        if part.whole:
            out = whole_attention(form, longest, q, k, v, bias, served.pool.format, part)
            if out is not None:
                return out
        one_each = len(q) == len(part.lengths)  # the result is the same as with candidates, which are faster
        return hstu_sparse.paged_attention(
            q,
            k,
            v,
            part.offsets,
            served.pool,
            part.pages,
            part.lengths,
            longest,
            layer=self.layer,
            candidates=part.candidates or one_each,
            window_size=form.window,
            num_context=part.num_context,
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
    part: Part,
) -> Tensor | None:
    """Return [T, H, V] of tokens that only see one another, by the kernels for whole sequences; None if these do not
    apply.

    Paged attention looks up a time bias pair by pair, which makes it ten times as slow. As there, a token sees the
    others as decoded from the pages and itself exactly; for pages that round keys and values `rotatekv_self_attention`
    can do that for codes, so far only on a CPU.
    """
    exact = form.bits is None and (form.dtype == k.dtype or form.dtype.itemsize > k.dtype.itemsize)
    only_exact = form.bits is None or q.is_cuda or attention.window or part.num_context is not None
    if attention.softmax or (not exact and only_exact):
        return None
    # Coded keys are padded to a size that the Hadamard transform supports.
    q, k = (F.pad(x, (0, form.coded_size - form.head_size)) if form.bits else x for x in (q, k))
    offsets = part.offsets
    options: dict[str, Any] = dict(bias=bias)
    if exact:
        options |= dict(window_size=attention.window, num_context=part.num_context)
    options["plan"] = hstu_sparse.attention_plan(q, v, offsets, longest, **options, once=part.once)
    options |= dict(scale=attention.scale, normalizer=attention.normalizer)
    if exact:
        return hstu_sparse.hstu_attention(q, k, v, offsets, longest, **options)
    codes = {name: getattr(form, name) for name in ("bits", "head_group", "quant_group", "sink_tokens", "clip")}
    return hstu_sparse.rotatekv_self_attention(q, k, v, offsets, longest, **options, **codes)


def served_layers(model: SequenceModel, dtype: torch.dtype | None = None) -> list[Any]:
    """Return the model's layers with the same weights and attention that reads from pages; ServingError if one cannot.

    dtype: the dtype to which autocast would cast the weights of an HSTU layer's products in each pass: they are cast
    here.
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
    """Return how a layer's attention reads from pages; ServingError if it cannot. context: of features of users too."""
    try:
        form = inner.paged()
    except ValueError as error:
        raise ServingError(f"layer {place} {error}") from None
    if form is None:
        raise ServingError(
            f"layer {place} ({inner.config.kind}) cannot be served: dense, softmax, rotatekv and bsa can"
        )
    if context and not inner.context:
        raise ServingError(f"layer {place} ({inner.config.kind}) has no data.features.users.as=tokens")
    heads = inner.kv_heads(inner.config, inner.sizes.num_heads)
    if heads != inner.sizes.num_heads:
        raise ServingError(f"layer {place} shares {heads} key heads between {inner.sizes.num_heads}, pages do not")
    return form


def embedded(model: SequenceModel, batch: ServedBatch) -> Tensor:
    """Return the embeddings [T, E] of events and of features of users."""
    embedding, served = model.embedding, batch.served
    # A plain look-up: torchrec's needs a dozen launches more.
    rows = None if embedding.sharded else embedding.item_rows(batch.item_ids)
    x = embedding(batch.with_event_positions, rows)
    if served.context is None:
        return x
    of_users = embedding.user_tokens(batch.user_features).flatten(0, 1).to(x.dtype)
    return torch.where((served.context < 0)[:, None], x, of_users[served.context.clamp(min=0)])


@torch.inference_mode()
def run(model: SequenceModel, layers: list[Any], batch: ServedBatch) -> Tensor:
    """Return the outputs [T, E] of new tokens, in fp32, before normalisation, and write tokens to the pages."""
    served = batch.served
    for part in served.parts:
        if not part.candidates:
            served.pool.write_timestamps(part.times, part.offsets, part.pages, part.lengths)
    x = embedded(model, batch)
    for layer in layers:
        x, _ = layer(x, batch)
    return x.float()
