"""`Route`: how a model is run over slots. It is found by trying (discovery.py), and private views
of the model are opened by it (views.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdec.slots.cache import SlotCache
from specdec.slots.layout import Compressor, Indexer, KeyValueShape, Stored
from specdec.targets.edits.edit import Faster

if TYPE_CHECKING:
    from specdec.slots.spans import Chunk
    from specdec.targets.edits.memory import MixerPlan


@dataclass(frozen=True, eq=False)
class Route:
    """How a model is run over slots; by default as it is. Routes are compared by identity.

    Args:
        attention: name of the attention function; `None` for the model's own, and for a dense mask.
        layer_windows: of each attention layer, `None` for full attention.
        shapes: what each layer stores of a token, and each indexer and compressor.
        attention_modules: names of the modules that call the attention function.
        mixers: recurrent ones, by name.
        returns_tuples: decoder layers return their hidden states inside of a tuple.
        has_streams: decoder layers hand on several hidden states of each token.
        fault_of_trees: what the model does wrong in the window of a tree, `None` for nothing.
        edits: what makes it faster.
        notes: a sentence on each edit that there was to choose, also on those that were given up.
        num_tried: tokens of the texts that the self-test has read where somebody's own code runs in
            the model; 0 where none does, which may act from some number of tokens on.
    """

    attention: str | None = None
    layer_windows: Mapping[int, int | Chunk | None] = field(default_factory=dict)
    shapes: Mapping[Stored, KeyValueShape] = field(default_factory=dict)
    attention_modules: tuple[str, ...] = ()
    mixers: Mapping[str, MixerPlan] = field(default_factory=dict)
    returns_tuples: bool = False
    has_streams: bool = False
    fault_of_trees: str | None = None
    edits: tuple[Faster, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    num_tried: int = 0

    def init_cache(self, batch_size: int, num_slots: int, **options: Any) -> SlotCache:
        """Storage for what the layers keep of rows; options as of `SlotCache`."""
        if self.mixers:
            from specdec.targets.edits.memory import RecurrentCache

            return RecurrentCache(batch_size, num_slots, self.shapes, mixers=self.mixers, **options)
        options.pop("max_window", None)
        return SlotCache(batch_size, num_slots, self.shapes, **options)

    def check_trees(self, name: str) -> None:
        """Raises `ValueError` for a model, of a class of this name, that takes chains only, since
        its forward over a tree is not the plain forward of each path.
        """
        if self.fault_of_trees:
            raise ValueError(
                f"{name} cannot read the window of a tree ({self.fault_of_trees}); use a drafter "
                "of chains (tree=None)"
            )

    def check_reads_ahead(self, name: str) -> None:
        """Raises `ValueError` for a model that cannot be run behind the text for a drafter, since
        some of its layers keep a state that every token changes.
        """
        if self.mixers:
            raise ValueError(
                f"{name} keeps a recurrent state ({', '.join([*self.mixers][:3])}), which no "
                "drafter can read ahead from; use a drafter with reads_target = False"
            )

    @property
    def why_reading_waits(self) -> str | None:
        """Why a forward of a prompt chunk makes the host wait; `None` if it does not."""
        return next(filter(None, (edit.why_not_in_chunks for edit in self.edits)), None)

    @property
    def is_compiled(self) -> bool:
        """Steps run compiled code."""
        return any(edit.is_compiled for edit in self.edits)

    @property
    def is_indexed(self) -> bool:
        """Some layers read the keys which an indexer chooses."""
        return any(isinstance(place, Indexer) for place in self.shapes)

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """What makes one entry of several tokens; empty where nothing does."""
        return tuple(place for place in self.shapes if isinstance(place, Compressor))

    @property
    def compared_modules(self) -> tuple[str, ...]:
        """Modules whose output, before the residual stream is added, is compared too."""
        return *self.attention_modules, *self.mixers
