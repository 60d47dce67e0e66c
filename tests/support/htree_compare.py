"""Compare the kernels of htree with the reference at all positions of large random data.

    python -m tests.support.htree_compare --tokens 65536 --heads 64 --kv-heads 4

It prints the absolute and relative error of the output, the worst positions, and how often kernel and reference choose
different nodes, which is correct for importances that differ by rounding only. The error is computed twice: against the
reference with its own choice, and with the kernel's choice, which leaves only arithmetic errors.

Without a GPU set TRITON_INTERPRET=1 and keep to some hundred tokens in fp32.

Letters: P positions, T tokens, Hq query heads, Hkv key/value heads, V value head size, S top_k.
"""

import argparse
import math

import torch
from torch import Tensor

from hstu_sparse import htree_attention
from hstu_sparse.htree.reference import Tree, Walk, attend_queries, group_leaders
from tests.support.budgets import make_jagged, make_offsets


def chosen_nodes(
    q, k, v, seq_offsets, max_seq_len, *, compression_rate, top_k, scale, rope_base, selection_group=1
) -> list[Tensor]:
    """Return the kernel's choices: for the layers 1, 2, ... [T, Hkv, S] int64 nodes, ascending, -1 last."""
    from hstu_sparse.htree import launch
    from hstu_sparse.tiles.rows import as_rows

    launch.check_supported(q, k, v, compression_rate, top_k)
    options = launch.Options(max_seq_len, compression_rate, top_k, selection_group, scale, rope_base)
    problem = launch.Problem(q, k, v, seq_offsets, options)
    parts = problem.choices(*as_rows(q, align=False), launch.build_tree(problem, k, True))
    table = torch.cat([part[:-1, :top_k] for _, _, part in parts])
    token = torch.arange(q.shape[0], device=q.device)
    sequence = torch.searchsorted(seq_offsets.long(), token, right=True) - 1
    start = seq_offsets.long()[sequence]
    slot = start // selection_group + sequence + (token - start) // selection_group
    choices = table.view(problem.slots, problem.H, problem.top, top_k)[slot]
    return [x.long() for x in choices.unbind(2)]


def compare_all(q, k, v, seq_offsets, options, chunk: int = 512) -> list[str]:
    """Return lines: errors over all positions, the worst positions, differing choices."""
    tokens = q.shape[0]
    tree = Tree(k.double(), v.double(), seq_offsets, tokens, options["compression_rate"], options["top_k"])
    leaders = group_leaders(tree.offsets, tokens, options["selection_group"])
    worst, largest = [], 0.0
    sums = {"own choice": [0.0, 0.0, 0.0], "kernel's choice": [0.0, 0.0, 0.0]}  # max, squares of error and of reference
    differing = total = 0
    farthest = 0.0
    out = htree_attention(q, k, v, seq_offsets, tokens, **options, backend="triton")
    chosen = chosen_nodes(q, k, v, seq_offsets, tokens, **options)
    for begin in range(0, tokens, chunk):
        rows = torch.arange(begin, min(begin + chunk, tokens), device=q.device)
        nodes = [x[rows] for x in chosen]
        for name, choices in (("own choice", None), ("kernel's choice", nodes)):
            arguments = (q[rows].double(), rows, tree, options["scale"], options["rope_base"])
            exact, walk = attend_queries(*arguments, leaders=q[leaders[rows]].double(), choices=choices)
            error = (out[rows].double() - exact).abs()
            entry = sums[name]
            entry[0] = max(entry[0], error.max().item())
            entry[1] += error.square().sum().item()
            entry[2] += exact.square().sum().item()
            if choices is None:
                largest = max(largest, exact.abs().max().item())
                by_position = error.amax((1, 2))
                top = by_position.topk(min(5, len(rows)))
                worst += [(e, begin + i, int(error[i].amax(1).argmax())) for e, i in zip(*(x.tolist() for x in top))]
                worst = sorted(worst, reverse=True)[:10]
                for layer in walk:
                    if layer.number:
                        different = (layer.chosen != nodes[layer.number - 1]).any(-1)
                        differing += int(different.sum())
                        total += different.numel()
            else:
                for layer in walk:
                    if layer.number:
                        farthest = max(farthest, misplaced(layer).max().item())
    lines = [f"{tokens} positions, largest output {largest:.3e}"]
    for name, (top, error, exact) in sums.items():
        relative = math.sqrt(error / max(exact, 1e-300))
        lines.append(f"against the reference with {name}: largest error {top:.3e}, relative (norms) {relative:.3e}")
    lines.append(f"different choices: {differing} of {total} (position, key/value head, layer)")
    lines.append(f"a node that should have been chosen is more important than one that was by at most {farthest:.1e}")
    lines += ["worst positions, with the reference's own choice:"]
    lines += [f"  position {t}, head {h}: off by {e:.3e}" for e, t, h in worst]
    return lines


def misplaced(layer: Walk) -> Tensor:
    """Return [P, Hkv]: how much more important, relatively, the best node outside the choice is than the least in it.

    `layer` is from a walk with the kernel's choice; 0 if the choice is right. The last candidate does not count.
    """
    valid = layer.nodes >= 0
    last = valid & ~torch.nn.functional.pad(valid[..., 1:], (0, 1))
    least = layer.importance.masked_fill(~valid | layer.enters | last, torch.inf).amin(-1)
    best = layer.importance.masked_fill(~layer.enters, 0.0).amax(-1)
    return ((best - least) / best.clamp(min=1e-30)).clamp(min=0.0).nan_to_num(0.0)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of the one sequence")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--head-size", type=int, default=32)
    parser.add_argument("--value-size", type=int, default=32)
    parser.add_argument("--compression-rate", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--selection-group", type=int, default=1)
    parser.add_argument("--rope-base", type=float, default=10000.0)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)

    dtype = getattr(torch, args.dtype)
    shapes = ((args.heads, args.head_size), (args.kv_heads, args.head_size), (args.kv_heads, args.value_size))
    q, k, v = (
        make_jagged((args.tokens,), shape, dtype=dtype, device=args.device, seed=3 * args.seed + i)
        for i, shape in enumerate(shapes)
    )
    offsets = make_offsets((args.tokens,), device=args.device)
    options = dict(
        compression_rate=args.compression_rate,
        top_k=args.top_k,
        selection_group=args.selection_group,
        scale=args.head_size**-0.5,
        rope_base=args.rope_base,
    )
    with torch.no_grad():
        print("\n".join(compare_all(q, k, v, offsets, options)))


if __name__ == "__main__":
    main()
