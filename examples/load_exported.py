"""Recommend with a file of `eval.py RUN --export-model OUT.pt2`, with torch alone: nothing of hstu_sparse is needed.

python examples/load_exported.py OUT.pt2 AT ITEM=TIME ...      the next items after a history, times in seconds
"""

import json
import os
import sys

import torch


def load(path):
    """Return a function: (items, their times, the time of the request) -> (the next items, their scores)."""
    model = torch._inductor.aoti_load_package(path)
    facts = model.get_metadata()
    ids, longest = json.loads(facts["item_ids"]), int(facts["max_seq_len"])
    rows = {str(item): row for row, item in enumerate(ids)}

    def recommend(items, times, at):
        known = [(rows[str(item)], int(time)) for item, time in zip(items, times) if str(item) in rows][-longest:]
        if not known:
            return [], []
        best, scores = model(*(torch.tensor(column) for column in zip(*known)), torch.tensor(int(at)))
        return [ids[row] for row in best[scores > -torch.inf].tolist()], scores[scores > -torch.inf].tolist()

    return recommend


def main():
    if len(sys.argv) < 4:
        sys.exit("error: expected OUT.pt2 AT ITEM=TIME ...")
    path, at, *events = sys.argv[1:]
    if not os.path.isfile(path):
        sys.exit(f"error: {path}: no such file")
    items, times = zip(*(event.rpartition("=")[::2] for event in events))
    if not all(time.isdecimal() for time in (at, *times)):
        sys.exit("error: AT and each TIME are whole seconds")
    for item, score in zip(*load(path)(items, times, at)):
        print(item, f"{score:.4f}")


if __name__ == "__main__":
    main()
