"""Compute vectors of items from texts in a CSV, in the files that data.features.items reads: NAME.npy, NAME.ids.npy.

python examples/vectors.py ITEMS.csv titles.npy --text title --size 64
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cli.command import Parser, run_main


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("items", help="a CSV file with a row for each item")
    parser.add_argument("out", type=Path, help="the file of vectors to write, NAME.npy")
    parser.add_argument("--id", default="item", help="the column with the ids; by default item")
    parser.add_argument("--text", action="append", help="a column with text, by default title; several are joined")
    parser.add_argument("--words", action="store_true", help="count whole words, in place of parts of words")
    parser.add_argument("--size", type=int, default=64, help="the size of a vector; by default 64")
    options = parser.parse_args()
    if options.out.suffix != ".npy":
        parser.error(f"{options.out}: expected a name that ends in .npy")
    import numpy as np
    import polars as pl

    try:
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer
    except ImportError:
        parser.error("scikit-learn is not installed: pip install scikit-learn")
    columns = options.text or ["title"]
    try:
        items = pl.read_csv(options.items, columns=[options.id, *columns], infer_schema=False)
    except (pl.exceptions.PolarsError, OSError) as error:
        parser.error(f"{options.items}: {str(error).splitlines()[0]}")
    texts = items.select(pl.concat_str(columns, separator=" ", ignore_nulls=True)).to_series().to_list()
    how = {"token_pattern": r"\S+"} if options.words else {"analyzer": "char_wb", "ngram_range": (3, 5)}
    parts = HashingVectorizer(n_features=2**18, alternate_sign=False, **how)
    weights = TfidfTransformer(sublinear_tf=True).fit_transform(parts.transform(texts))
    size = min(options.size, weights.shape[0] - 1)  # a small catalogue has fewer directions
    vectors = TruncatedSVD(size, random_state=0).fit_transform(weights).astype(np.float32)
    np.save(options.out, vectors)
    np.save(options.out.with_name(f"{options.out.stem}.ids.npy"), items[options.id].to_numpy().astype(str))
    print(f"Written: {options.out} ({len(vectors):,} vectors of {size}) and {options.out.stem}.ids.npy")


if __name__ == "__main__":
    run_main(main)
