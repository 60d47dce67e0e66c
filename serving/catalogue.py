"""Define the part of `Recommender` that adds new items and exports item vectors."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from data.vocabulary import with_items
from serving.errors import ServingError
from serving.new_items import Additions, checked_items
from serving.search import Search
from serving.served import ServedRun
from training.outputs import export_items


class Catalogue(ServedRun):
    """The catalogue: the items that can be recommended."""

    def add_items(self, items, features: Mapping[str, Sequence]) -> int:
        """Add items that the run was not trained on, with their features; return how many are new.

        From then on they can be recommended and be in events. Items that exist already are not changed.

        Args:
            items: [n] ids.
            features: the run's features of items, name -> a value for each item: text, an integer or a boolean for a
                category, a list of these, a number, the numbers of a vector, or None.

        Raises InvalidRequest, with nothing changed, for example if the run has no features of items.

        Examples:
            >>> recommender.add_items(["s9", "s1"], {"brand": ["a", "b"]})  # s1 exists already
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
        """Return the new ones among items; strict: raise InvalidRequest for invalid items, otherwise leave them out."""
        return checked_items(self.items, self.vocabulary, items, features, strict)

    def add_checked(self, added: Additions) -> int:
        """Add the items that `check_items` returned; return their number."""
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
        """Write item vectors and ids into `folder` like `eval.py --export-items`; return (items, vector size).

        Raises ServingError if the head does not score by one vector for each item.

        Examples:
            >>> recommender.export("vectors")
            (9, 8)
        """
        if self.ranking or not self.config.model.head.has_item_vectors:
            raise ServingError("expected a retrieval run with model.head.kind=dot and without model.head.repeats")
        return export_items(Path(folder), self.model, self.items.ids)
