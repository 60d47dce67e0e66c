"""Divide attention over the ranks that share sequences (parallel.context), in a ring or by heads.

Letters: T tokens of this rank, E embedding size, H heads, Hkv key/value heads, D query/key and V value head size.
"""

from torch import Tensor

from data.batch import Batch
from hstu_sparse import heads_to_tokens, tokens_to_heads
from models.attention.contract import AttentionKind, AuxLosses
from models.protocols import RunOptions


def context_by(run: RunOptions) -> str:
    """Return how the ranks of parallel.context share sequences, `ring` or `heads`.

    With parallel.context_by=auto, `heads` if the attention of all layers supports it, otherwise `ring`. ValueError if
    the attention of a layer does not support the result.
    """
    way = run.parallel.context_by
    faults = {name: fault_of(run, name) for name in ("heads", "ring")}
    if way == "auto":
        way = next((name for name, fault in faults.items() if fault is None), "heads")
    if (fault := faults[way]) is not None:
        raise ValueError(f"parallel.context_by={way}: {fault}")
    return way


def fault_of(run: RunOptions, way: str) -> str | None:
    """Return why ranks cannot share sequences in this way (`ring` or `heads`); None if they can."""
    for attention in run.model.attention:
        if way not in attention.context_by:
            possible = " or ".join(attention.context_by) or "neither ring nor heads"
            return f"model.attention.kind={attention.kind} supports {possible}"
        if way == "heads":
            try:
                attention.check_heads(run.model.layer_sizes, run.parallel.context)
            except ValueError as error:
                return str(error)
    return None


def attend(
    attention: AttentionKind, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch
) -> tuple[Tensor, AuxLosses]:
    """Call an attention module; if ranks divide the heads, with all tokens and this rank's heads.

    x [T, E], q [T, H, D], k [T, Hkv, D], v [T, Hkv, V] -> (output [T, H, V], auxiliary losses by name).
    """
    cut = batch.cut
    if cut is None or cut.uncut is None:
        return attention(x, q, k, v, batch)
    q, k, v = tokens_to_heads(q, k, v, tokens=cut.tokens, group=cut.group)
    if attention.reads_input:
        copies = x[:, None].expand(-1, len(cut.tokens), -1)  # one for each rank
        x = tokens_to_heads(copies, tokens=cut.tokens, group=cut.group)[0][:, 0]
    out, losses = attention(x, q, k, v, cut.uncut)
    return heads_to_tokens(out, cut.tokens, cut.group), losses
