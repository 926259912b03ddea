"""EAGLE-1, 2 and 3 checkpoints of every public layout."""

from __future__ import annotations

from specdec.checkpoints.eagle_layouts import EAGLES
from specdec.checkpoints.family import Family, Source, recognise
from specdec.checkpoints.feature_heads import canonical, translate
from specdec.checkpoints.files import CheckpointFolder
from specdec.checkpoints.layer_ids import CONVENTIONS
from specdec.checkpoints.marks import Clues
from specdec.checkpoints.refusals import other_designs
from specdec.drafters.eagle import EagleConfig, EagleDrafter, EagleHead


def detect(folder: CheckpointFolder) -> Source | None:
    """The producer: `"SafeAILab"` (yuhuili), `"SpecForge"` (lmsys), `"speculators"` (RedHatAI),
    `"NVIDIA"` (Model-Optimizer), `"DeepSpec"`, or `"vLLM"`: names and keys as vLLM reads them,
    without a mark of the producer. The kind is `"EAGLE-1"` (and 2) or `"EAGLE-3"`.
    """
    folder.fields.section("eagle_config")  # an object, or an error
    source, clues = recognise(folder, EAGLES, canonical), Clues(folder, canonical)
    is_other = any(is_so for is_so, _ in other_designs(folder.fields, clues.eagle))
    return source and source._replace(is_sure=not is_other)


EAGLE = Family(
    name="EAGLE",
    marks="tensors midlayer.*, layers.0.hidden_norm, or fc beside layers.0.*",
    detect=detect,
    translate=translate,
    drafter=EagleDrafter,
    head=EagleHead,
    options={
        "layer_convention": CONVENTIONS,
        "feature_layers": (),
        "rope_theta": (),
        "layer": (),
        "norm_before_residual": (True, False),
        "feedback_norm": (True, False),
        "sees_pictures": (True, False),
    },
    config=EagleConfig,
)
"""EAGLE-1, EAGLE-2 and EAGLE-3.

The options are what a caller may know better than a checkpoint's configuration says.
`layer_convention`: explicit layer ids are `"hidden_state"` or `"layer_output"` numbers, whatever
the producer usually means. `feature_layers`: the hidden states themselves (or `"final"`).
`rope_theta`: base of the rotary embedding. `layer`: a dict of fields of `LayerConfig` (`rope`,
`windows`, ...).
`norm_before_residual`, `feedback_norm` and `sees_pictures`: as in `EagleConfig`.
"""
