"""Convert the actions of events to codes of the run's action table."""

import numpy as np

from data.reading.formats import FORMATS
from data.types import shown
from data.vocabulary import Vocabulary
from serving.errors import InvalidRequest, MissingActions
from training.config import RunConfig


class ActionCodes:
    """The codes of actions: texts known to the run, or numbers in the units of the raw data, such as 4.5 stars."""

    def __init__(self, config: RunConfig, vocabulary: Vocabulary):
        self.count = vocabulary.num_actions or 0
        # In formats whose actions are flags, an action is given as the sum of its bits.
        self.scale = FORMATS[config.data.format].action_scale
        names = vocabulary.action_names
        self.texts = None if names is None else {text: code for code, text in enumerate(names) if text}

    def codes(self, actions: object, count: int) -> np.ndarray:
        """Return `count` actions as codes, [E] int32.

        Raises MissingActions for None, and InvalidRequest for actions that the run does not know.
        """
        if actions is None:
            raise MissingActions("actions: the run reads actions, expected one for each event")
        array = np.asarray(actions)
        if array.shape != (count,):
            raise InvalidRequest(f"actions: expected {count}, one for each event, got shape {list(array.shape)}")
        if not count:
            return np.zeros(0, np.int32)
        if array.dtype.kind not in ("iuf" if self.texts is None else "U"):
            expected = "numbers" if self.texts is None else "text"
            raise InvalidRequest(
                f"actions: expected {expected}, got {'text' if array.dtype.kind == 'U' else array.dtype}"
            )
        if self.texts is not None:
            values = array.tolist()
            if wrong := [text for text in values if text not in self.texts]:
                raise InvalidRequest(f"actions: {shown(wrong[0])} is none of {shown(', '.join(self.texts), 200)}")
            return np.array([self.texts[text] for text in values], np.int32)
        codes, known = self._codes_of_numbers(array)
        if not known.all():
            most = (self.count - 1) / self.scale
            raise InvalidRequest(
                f"actions: {shown(array[~known][0])} is not known to the run, expected 0 to {most:g}"
                + (f" in steps of {1 / self.scale:g}" if self.scale > 1 else "")
            )
        return codes

    def lookup(self, actions: list) -> tuple[np.ndarray, np.ndarray]:
        """Return (codes int32, mask of known actions) of numbers or texts; None is never known."""
        if self.texts is None:
            numbers = [action if isinstance(action, int | float) else np.nan for action in actions]
            return self._codes_of_numbers(np.array(numbers, np.float64))
        codes = np.array([self.texts.get(action, -1) for action in actions], np.int32)
        return codes, codes >= 0

    def _codes_of_numbers(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        codes = numbers.astype(np.float64) * self.scale
        known = (codes == np.round(codes)) & (codes >= 0) & (codes < self.count)
        return np.where(known, codes, 0).astype(np.int32), known
