"""The part of `Recommender` that adds items to those that the run was trained on, and writes their vectors."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from data.vocabulary import with_items
from serving.errors import ServingError
from serving.new_items import Additions, checked_items
from serving.search import Search
from serving.served import ServedRun
from training.outputs import export_items


class Catalogue(ServedRun):
    """The items that can be recommended."""

    def add_items(self, items, features: Mapping[str, Sequence]) -> int:
        """Add items that the run was not trained on, known by their features; return how many are new.

        They are candidates at once, and events may have them. An item that there is already stays as it is.

        Args:
            items: [n] ids.
            features: the run's features of items by name, each with a value for every item: text, an integer or a
                boolean for a category, a list of these, a number, the numbers of a vector, or None.

        Raises InvalidRequest, with nothing changed, for a run without features of items among others.

        Examples:
            >>> recommender.add_items(["s9", "s1"], {"brand": ["a", "b"]})  # there is an s1
            1
            >>> recommender.score(["c3"], [["s9"]]).shape
            (1, 1)
            >>> recommender.add_items(["s10"], {"colour": ["red"]})
            Traceback (most recent call last):
            serving.errors.InvalidRequest: ...
        """
        with self._lock:
            return self.add_checked(self.check_items(items, features))

    def check_items(self, items, features: Mapping[str, Sequence], strict: bool = True) -> Additions:
        """Return the new ones of `add_items`. strict: otherwise what the run cannot know is left out."""
        return checked_items(self.items, self.vocabulary, items, features, strict)

    def add_checked(self, added: Additions) -> int:
        """Add what `check_items` returned; return the number of items."""
        if not len(added.ids):
            return 0
        with self._lock:
            self.vocabulary = with_items(self.vocabulary, added.ids, added.items)
            self.model.embedding.add_items(added.items)
            self.items = self.items.with_more(added.ids)
            self.filters = self.filters.with_items(self.items, self.vocabulary)
            self._facts["items"] = len(self.items)
            self._popularity.extend(len(self.items))
            self._engine.catalogue_changed()
            self._search = None if self.ranking else Search(self._engine, len(self.items))
        return len(added.ids)

    def export(self, folder: str | Path) -> tuple[int, int]:
        """Write item vectors and ids into `folder`, as `eval.py --export-items`; returns (items, size of a vector).

        Raises ServingError for a head that has no single vector for an item.

        Examples:
            >>> recommender.export("vectors")
            (9, 8)
        """
        if self.ranking or not self.config.model.head.has_item_vectors:
            raise ServingError("the run has no single vector for an item whose product is the score")
        return export_items(Path(folder), self.model, self.items.ids)
