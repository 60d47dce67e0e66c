"""Compare kernel and reference: all positions of large random data, or a trace of chosen positions layer by layer.

    python -m tests.support.htree_compare --tokens 65536 --heads 64 --kv-heads 4
    python -m tests.support.htree_compare --tokens 5000 --positions 0,15,16,4999

Without --positions: absolute and relative error of the output, the worst positions, and how often kernel and reference
choose different nodes, which is correct for importances that differ by rounding only. The error is computed twice:
against the reference with its own choice, and with the kernel's choice, which leaves only arithmetic errors. With
--positions: candidates, scores, choice, running maximum, sum and output of every layer, and the first difference.

Without a GPU set TRITON_INTERPRET=1 and keep to some hundred tokens in fp32.

Letters: P positions, Hq query heads, Hkv key/value heads, G query heads of each, V value head size, S top_k, M the
greatest number of candidates of a layer.
"""

import argparse
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hstu_sparse.htree.reference import Tree, Walk, attend_queries, group_leaders, weighted_values
from tests.support.budgets import make_jagged, make_offsets


@dataclass
class KernelWalk:
    """The kernel's walk at P positions; scores, maxima and sums in natural units."""

    out: Tensor  # [P, Hq, V]
    choices: list[Tensor]  # of the layers 1, 2, ...: [P, Hkv, S] int64 nodes, ascending, -1 last
    scores: Tensor | None  # [P, Hkv, layers, G, M], NaN if the kernel computed none
    state: Tensor | None  # [P, Hkv, layers, G, V + 2]: output before its division, maximum, sum after each layer


def walk_kernel(
    q, k, v, seq_offsets, max_seq_len, *, compression_rate, top_k, scale, rope_base, positions, selection_group=1,
    trace=True,
):  # fmt: skip
    """Run the forward kernel at some tokens (`positions` [P], indices into T) and return its walk.

    With a selection_group above 1 all tokens run, and scores and state are None.
    """
    from hstu_sparse.core.rows import as_rows
    from hstu_sparse.htree import launch

    if selection_group > 1:
        options = compression_rate, top_k, selection_group, scale, rope_base
        return walk_groups(q, k, v, seq_offsets, max_seq_len, *options, positions)

    launch.check_supported(q, k, v, compression_rate, top_k)
    problem = launch.Problem(q, k, v, seq_offsets, max_seq_len, compression_rate, top_k, scale, rope_base)
    count, kv_heads, group = len(positions), k.shape[1], q.shape[1] // k.shape[1]
    shape = (count, kv_heads, problem.top + 1, group)
    choices = torch.full((count, kv_heads, problem.top, top_k), -1, dtype=torch.int32, device=q.device)
    scores = state = None
    if trace:
        candidates = problem.constants["CANDIDATES"]
        scores = torch.full((*shape, candidates), torch.nan, device=q.device)
        state = torch.full((*shape, problem.BV + 2), torch.nan, device=q.device)
    out, _ = launch.attend(
        problem,
        *as_rows(q, align=False),
        launch.build_tree(problem, k, True),
        launch.build_tree(problem, v, False),
        positions,
        choices,
        scores,
        state,
    )
    if trace:
        scores = scores * math.log(2.0)
        state = torch.cat([state[..., : v.shape[2]], state[..., -2:-1] * math.log(2.0), state[..., -1:]], -1)
    return KernelWalk(out, [x.long() for x in choices.unbind(2)], scores, state)


def walk_groups(q, k, v, seq_offsets, max_seq_len, rate, top_k, group, scale, rope_base, positions) -> KernelWalk:
    """Do the work of `walk_kernel` for groups of tokens."""
    from hstu_sparse.htree import launch
    from hstu_sparse.htree.group_launch import launch_group_forward

    launch.check_supported(q, k, v, rate, top_k)
    out, _, table = launch_group_forward(q, k, v, seq_offsets, max_seq_len, rate, top_k, group, scale, rope_base)
    sequence = torch.searchsorted(seq_offsets.long(), positions, right=True) - 1
    start = seq_offsets.long()[sequence]
    slots = q.shape[0] // group + len(seq_offsets) - 1
    place = start // group + sequence + (positions - start) // group
    choices = table[:-1, :top_k].unflatten(0, (slots, k.shape[1], -1))[place]
    return KernelWalk(out[positions], [x.long() for x in choices.unbind(2)], None, None)


def states(tree: Tree, walk: list[Walk]) -> list[Tensor]:
    """Return [P, Hkv, G, V + 2]: output before its division, maximum and sum after each layer of the reference's
    walk.
    """
    after_layers, entered = [], []
    for layer in walk:
        entered.append(layer.scores.masked_fill(~layer.enters.unsqueeze(-2), -torch.inf))
        top = torch.cat(entered, -1).amax(-1, keepdim=True)
        parts = [(x - top.masked_fill(top == -torch.inf, 0.0)).exp() for x in entered]
        out = sum(weighted_values(tree, x, part) for x, part in zip(walk, parts))
        after_layers.append(torch.cat([out, top, sum(part.sum(-1, keepdim=True) for part in parts)], -1))
    return after_layers


def kernel_candidates(choices: list[Tensor], walk: list[Walk], layer: int, place: int, head: int, t: int, rate: int):
    """Return the kernel's candidates in a layer: the children of its choice above, or the top layer's nodes."""
    rightmost = t // rate**layer
    above = [w for w in walk if w.number == layer + 1 and bool(w.active[place])]
    if not above:
        return list(range(rightmost + 1))
    parents = [p for p in choices[layer][place, head].tolist() if p >= 0]
    return [p * rate + i for p in parents for i in range(rate) if p * rate + i <= rightmost]


def gap(importance: Tensor, nodes: list[int], first: set[int], second: set[int]) -> float:
    """Return the greatest relative difference of importance among nodes that only one of both chose."""
    values = {n: float(importance[nodes.index(n)]) for n in first ^ second if n in nodes}
    if not values:
        return 0.0
    return (max(values.values()) - min(values.values())) / max(max(values.values()), 1e-30)


def trace(kernel: KernelWalk, tree: Tree, walk: list[Walk], positions: list[int], tolerance: float) -> list[str]:
    """Return lines that compare the kernel's walk with the reference's, layer by layer, at one sequence's positions."""
    lines = []
    expected = states(tree, walk)
    for place, t in enumerate(positions):
        for head in range(walk[0].nodes.shape[1]):
            lines.append(f"position {t}, key/value head {head}")
            first = None
            for layer, state in zip(walk, expected):
                if not bool(layer.active[place]):
                    continue
                number = layer.number
                nodes = [n for n in layer.nodes[place, head].tolist() if n >= 0]
                had = kernel_candidates(kernel.choices, walk, number, place, head, t, tree.rate)
                same = nodes == had
                checks = {"candidates": (0.0 if same else math.inf, f"{len(had)} of {len(nodes)}")}
                got = kernel.scores[place, head, number, :, : len(nodes)]
                if same and not bool(got.isnan().any()):
                    error = (got - layer.scores[place, head, :, : len(nodes)]).abs().max().item()
                    checks["scores"] = (error, f"off by {error:.1e}")
                elif same:
                    checks["scores"] = (0.0, "all expanded, not needed")
                if number:
                    ours = {n for n in kernel.choices[number - 1][place, head].tolist() if n >= 0}
                    theirs = {n for n in layer.chosen[place, head].tolist() if n >= 0}
                    relative_gap = gap(layer.importance[place, head], nodes, ours, theirs)
                    text = f"{len(ours)} nodes"
                    if ours != theirs:
                        text += f", kernel alone {sorted(ours - theirs)}, reference alone {sorted(theirs - ours)}"
                        text += f", importances {relative_gap:.1e} apart"
                    checks["choice"] = (math.inf if ours != theirs else 0.0, text)
                mine, right = kernel.state[place, head, number], state[place, head].to(kernel.state.dtype)
                for name, part in (("maximum", slice(-2, -1)), ("sum", slice(-1, None)), ("output", slice(0, -2))):
                    a, b = mine[:, part], right[:, part]
                    if torch.equal(a, b):
                        error = 0.0
                    else:
                        error = ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()
                    checks[name] = (error, f"off by {error:.1e}")
                for name, (error, text) in checks.items():
                    differs = not error <= tolerance
                    mark = "   <- first difference" if differs and first is None else ""
                    first = first or (name if differs else None)
                    lines.append(f"  layer {number}  {name:<10}  {'differs' if differs else 'agrees '}  {text}{mark}")
            if first is None:
                lines.append("  no difference")
    return lines


def reference_walk(q, k, v, seq_offsets, max_seq_len, positions, options, choices=None):
    """Return (tree, output, walk) of the reference in fp64 at the tokens `positions`."""
    tree = Tree(k.double(), v.double(), seq_offsets, max_seq_len, options["compression_rate"], options["top_k"])
    out, walk = attend_queries(
        q[positions].double(), positions, tree, options["scale"], options["rope_base"], choices=choices
    )
    return tree, out, walk


def compare_all(q, k, v, seq_offsets, options, chunk: int = 512) -> list[str]:
    """Return lines: errors over all positions, the worst positions, differing choices."""
    tokens = q.shape[0]
    tree = Tree(k.double(), v.double(), seq_offsets, tokens, options["compression_rate"], options["top_k"])
    leaders = group_leaders(tree.offsets, tokens, options["selection_group"])
    worst, largest = [], 0.0
    sums = {"own choice": [0.0, 0.0, 0.0], "kernel's choice": [0.0, 0.0, 0.0]}  # max, squares of error and of reference
    differing = total = 0
    farthest = 0.0
    for begin in range(0, tokens, chunk):
        rows = torch.arange(begin, min(begin + chunk, tokens), device=q.device)
        kernel = walk_kernel(q, k, v, seq_offsets, tokens, **options, positions=rows, trace=False)
        for name, choices in (("own choice", None), ("kernel's choice", kernel.choices)):
            arguments = (q[rows].double(), rows, tree, options["scale"], options["rope_base"])
            exact, walk = attend_queries(*arguments, leaders=q[leaders[rows]].double(), choices=choices)
            error = (kernel.out.double() - exact).abs()
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
                        different = (layer.chosen != kernel.choices[layer.number - 1]).any(-1)
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
    parser.add_argument("--positions", type=lambda x: [int(t) for t in x.split(",")], help="trace these")
    args = parser.parse_args(arguments)
    if args.positions is not None and args.selection_group > 1:
        parser.error("--positions is about selection_group 1, where a kernel walks and attends at once")

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
        if args.positions is None:
            lines = compare_all(q, k, v, offsets, options)
        else:
            wrong = [t for t in args.positions if not 0 <= t < args.tokens]
            if wrong:
                parser.error(f"positions must lie in 0 .. {args.tokens - 1}, got {wrong}")
            rows = torch.tensor(args.positions, device=args.device)
            kernel = walk_kernel(q, k, v, offsets, args.tokens, **options, positions=rows)
            tree, _, walk = reference_walk(q, k, v, offsets, args.tokens, rows, options)
            lines = trace(kernel, tree, walk, args.positions, 64 * torch.finfo(dtype).eps)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
