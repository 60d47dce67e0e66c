"""Launch attention to pages: choose the constants of the kernel, and divide pages among programs.

Letters: Tq new tokens, B sequences, P columns of the page table, H heads, D query/key and V value head size.
"""

import torch
from torch import Tensor

from hstu_sparse.bias.scores import KernelBias
from hstu_sparse.cache.codec import Form, Pages
from hstu_sparse.cache.format import PageFormat
from hstu_sparse.cache.launch import code_offset, kernel_form, tile_tokens
from hstu_sparse.cache.paged.kernel import (
    History,
    candidate_bias_kernel,
    merge_parts_kernel,
    paged_attention_fwd_kernel,
)
from hstu_sparse.cache.paged.reference import Queries, Scoring
from hstu_sparse.cache.pool import PagePool
from hstu_sparse.core import launch
from hstu_sparse.core.launch import LaunchConfig, cdiv, configuration, next_power_of_2, padded_head, precision, run
from hstu_sparse.core.validation import check_kernel
from hstu_sparse.tiles.rows import Rows, as_rows

BIAS_BLOCK = 256  # positions of a program of `candidate_bias_kernel`
# The mean numbers of new tokens of a sequence from which programs may have 64 of them (fp32: 32), and 128.
MIN_QUERIES_64, MIN_QUERIES_128 = 8, 48


@configuration
def tile(dtype: torch.dtype, width: int, coded: bool, queries: int, simple: bool) -> LaunchConfig:
    """Return the configuration: BQ rows and R positions of a program, programs per multiprocessor of an H200.

    `attend` divides BQ by the number of heads of a program, so that it counts new tokens.

    Args:
        width: the larger head size, padded.
        coded: pages have codes.
        queries: the mean number of new tokens of a sequence.
        simple: all new tokens attend to the same positions, without look-ups of a bias, which leaves registers for
            more positions.
    """
    if queries < MIN_QUERIES_64:
        big = width > 128 or dtype == torch.float32
        few = LaunchConfig(BQ=16, R=32 if big else 64, num_warps=4, num_stages=2, programs=3 if coded else 6)
        return few.replace(maxnreg=168) if coded and not big else few  # with more registers only two programs fit
    if dtype == torch.float32:
        return LaunchConfig(BQ=32, R=32, num_warps=4, num_stages=1, programs=4)
    if width > 128:
        return LaunchConfig(BQ=64, R=32, num_warps=8, num_stages=2, programs=4)
    if simple and not coded:
        return LaunchConfig(BQ=64, R=128 if width <= 64 else 64, num_warps=4, num_stages=3, programs=2)
    if coded and width > 64:
        return LaunchConfig(BQ=64, R=64, num_warps=8, num_stages=2, programs=2)
    if queries < MIN_QUERIES_128 or coded:
        return LaunchConfig(BQ=64, R=64, num_warps=4, num_stages=2, programs=4)
    return LaunchConfig(BQ=128, R=64, num_warps=8, num_stages=2, programs=4)


@configuration
def coded_tile(
    config: LaunchConfig, format: PageFormat, form: Form, dtype: torch.dtype, rope: bool, architecture: int
) -> LaunchConfig:
    """Return `config` with tiles that suit pages of codes. rope: whether keys are rotated after they are decoded."""
    if rope or form.SPARSE:  # all channels of a group are in registers: at most two programs fit
        positions = min(config.R, tile_tokens(format, dtype))
        config = config.replace(R=positions, num_stages=1, maxnreg=None, programs=min(2, config.programs))
    narrowest = min(padded_head(format.head_size) // (2 if rope else 1), form.K_BLOCK, form.V_BLOCK, config.R)
    if narrowest < 64 and architecture == 90:
        # Products of 64 rows (BQ, with RoPE also R) would be wgmma. ptxas 12.8 (Triton 3.6 and 3.7) can make wrong
        # descriptors of tiles whose rows have fewer than 64 numbers of 16 bits: `unset_registers` in tools/ahead.py.
        # Pruned keys and wider heads would spill with more positions.
        most = 32 if rope or form.SPARSE or max(format.head_size, format.value_size) > 64 else config.R
        config = config.replace(BQ=min(config.BQ, 32), R=min(config.R, most))
    return config


@configuration
def num_splits(programs: int, tiles: int, at_once: int, device: torch.device) -> int:
    """Return the number of parts into which pages are divided so that all multiprocessors have work.

    A part has at least four tiles. at_once: the number of programs that a multiprocessor runs at once.
    """
    return max(1, min(at_once * launch.multiprocessors(device) // max(1, programs), tiles // 4))


def candidate_bias(new: Queries, history: History, form: Form, bias: KernelBias) -> Tensor:
    """Return the bias of the candidates of each sequence, [B, P * page_size + 1]; see `candidate_bias_kernel`."""
    assert history.table is not None
    batch, columns = history.table.shape
    room = columns * form.PAGE + 1
    out = torch.empty(batch, room, dtype=torch.float32, device=new.q.device)
    run(
        candidate_bias_kernel, (batch, cdiv(room, BIAS_BLOCK)), out, history.table, new.lengths, new.num_context,
        history.timestamps, bias, columns, PAGE=form.PAGE, SINKS=form.SINKS, BLOCK=BIAS_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def attend(
    new: Queries, history: History, format: PageFormat, longest: int, scoring: Scoring
) -> tuple[Tensor, Tensor | None]:
    """Return (out [Tq, H, V], log-sum-exp [Tq, H] or None) of attention of new tokens to cached ones.

    Args:
        format: the format of the pages; without a page table, each token is a page.
        longest: an upper bound of the number of cached tokens of a sequence.
    """
    q, (tokens, heads, _), V = new.q, new.q.shape, format.value_size
    out = q.new_empty(tokens, heads, V)
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if scoring.return_lse else None
    if tokens == 0:
        return out, lse
    batch, form = new.q_offsets.shape[0] - 1, kernel_form(format)
    rope, coded = history.near is not None, format.bits is not None
    if history.table is None:
        form = form._replace(PAGE=1)
    looked_up = scoring.bias.position is not None or scoring.bias.time is not None
    width, candidates = max(padded_head(format.head_size), padded_head(V)), new.candidates and new.k is not None
    simple = candidates or (new.candidates and not looked_up)
    config = tile(q.dtype, width, coded, cdiv(tokens, max(1, batch)), simple)
    few = config.BQ == 16
    together = form.G if few else 1
    config = config.replace(BQ=max(16 // together, config.BQ // together))
    if coded:
        config = coded_tile(config, format, form, q.dtype, rope, launch.architecture(q.device))
    slots, programs = tokens // config.BQ + batch, heads // together
    filled = min(slots, batch * cdiv(tokens, batch * config.BQ))
    seen = min(longest, scoring.window + config.BQ) if scoring.window else longest
    splits = num_splits(filled * programs, cdiv(seen, config.R), config.programs, q.device)
    part, part_lse = out, lse
    if splits > 1:
        part = q.new_empty(splits, tokens, heads, V, dtype=torch.float32)
        part_lse = q.new_empty(splits, tokens, heads, dtype=torch.float32) if scoring.softmax else None
    values_out = form.V_BLOCKS
    if coded and not few:
        whole = V % form.V_BLOCK == 0
        values_out = V // form.V_BLOCK if whole else min(form.V_BLOCKS, (V - 1) // form.V_BLOCK + 2)
    rows = [None if x is None else Rows.of(x) for x in as_rows(new.q, new.k, new.v, align=False)]
    bias, by_position = KernelBias.from_bias(scoring.bias), None
    columns = 0 if history.table is None else history.table.shape[1]
    with launch.on_device(q.device):
        if candidates and looked_up:
            by_position, bias = candidate_bias(new, history, form, bias), KernelBias()
        run(
            paged_attention_fwd_kernel, (slots, programs, splits), *rows, new.q_offsets, new.lengths, new.num_context,
            history, bias, by_position, part, part_lse, batch, columns, format.sink_tokens, tokens, splits,
            scoring.window, scoring.scale, (form.CODED * form.G) ** -0.5 if coded else 1.0, 1.0 / scoring.normalizer,
            **config, FORM=form, OFFSET=code_offset(format, q.dtype), PAD_D=padded_head(format.head_size),
            OUT_V=values_out, CANDIDATES=new.candidates, WINDOW=scoring.window > 0,
            SOFTMAX=scoring.softmax, SCALED=coded and few, HEADS=together,
            FAST=q.dtype != torch.float32, PRECISION=precision(q.dtype),
        )  # fmt: skip
        if splits > 1:
            run(
                merge_parts_kernel, cdiv(tokens * heads, 16), part, part_lse, out, lse, tokens * heads, splits, V=V,
                PAD=next_power_of_2(V), ROWS=16, num_warps=4,
            )  # fmt: skip
    return out, lse


def attend_to_pool(new: Queries, pool: PagePool, layer: int, pages: Tensor, scoring: Scoring) -> Tensor:
    """Compute `hstu_sparse.paged_attention`, [Tq, H, V], for checked arguments without defaults."""
    tensors, format = pool.tensors[layer], pool.format
    check_kernel("paged_attention", new.q, {"D": format.head_size, "V": format.value_size})
    if format.dtype == torch.float64:
        check_kernel("paged_attention", tensors.get("k", tensors.get("sink_k", new.q)), {})
    context = None if new.num_context is None else new.num_context.contiguous()
    new = new._replace(q_offsets=new.q_offsets.contiguous(), lengths=new.lengths.contiguous(), num_context=context)
    timestamps = None if scoring.bias.time is None else pool.timestamps
    history = History(Pages.from_tensors(tensors), pages.contiguous(), timestamps=timestamps)
    return attend(new, history, format, pages.shape[1] * format.page_size, scoring)[0]
