"""Describes which picture takes most of memory beside a sequence, for sequences of any length: a
shorter one holds smaller pictures.
"""

from __future__ import annotations

from mtmd.base.errors import ImageError, OptionError
from mtmd.clip.encoder import Encoder
from mtmd.clip.token_budget import Budget
from mtmd.loaded.fitting.needed_memory import LargestPicture, largest_picture

MINIMUM = 64  # tokens of the shortest context that pictures are looked at in


class Pictures:
    """Pictures of a model with this encoder, None for one that takes no pictures. `size` (width,
    height) is of the pictures to be shown, None for the largest that is taken.
    """

    def __init__(
        self, encoder: Encoder | None, budget: Budget, context: int, size: tuple[int, int] | None
    ):
        self.encoder, self.budget, self.context, self.size = encoder, budget, context, size
        self._known: dict[int, LargestPicture | None] = {}

    @property
    def own(self) -> LargestPicture | None:
        """Return the size for the requested context; None where the model takes none, or none that
        its context holds. Raises ImageError and OptionError for a size that was asked for and is
        not taken.
        """
        return self.at(self.context)

    def at(self, context: int) -> LargestPicture | None:
        """Do what `own` does, for another context, which is long enough for a size that was asked
        for.
        """
        if self.encoder is None:
            return None
        if self.size is not None:
            context = self.context
        else:  # from there on it grows no more
            context = min(context, self.encoder.family.resolution.max_tokens(self.budget) + 1)
        if context not in self._known:
            try:
                result = largest_picture(self.encoder, self.budget, context, self.size)
            except (ImageError, OptionError):
                if self.size is not None:
                    raise
                result = None
            self._known[context] = result
        return self._known[context]

    @property
    def min_context(self) -> int:
        """The shortest that is worth looking at: it holds the picture that was asked for, or one
        of those that the model can be shown.
        """
        own = self.own
        if own is None:
            return 1
        if self.size is None:
            context = MINIMUM
            while context <= own.tokens:
                if self.at(context) is not None:
                    return context
                context *= 2
        return own.tokens + 1
