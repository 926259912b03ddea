"""EAGLE-1, 2 and 3 checkpoints of every public layout."""

from __future__ import annotations

from specdec.checkpoints.eagle_layouts import EAGLES
from specdec.checkpoints.feature_heads import family_of_layouts
from specdec.checkpoints.layer_ids import CONVENTIONS
from specdec.drafters.eagle import EagleDrafter, EagleHead

EAGLE = family_of_layouts(
    "EAGLE",
    EAGLES,
    EagleDrafter,
    EagleHead,
    marks="tensors midlayer.*, layers.0.hidden_norm, or fc beside layers.0.*",
    yields=True,
    options={
        "layer_convention": CONVENTIONS,
        "feature_layers": (),
        "rope_theta": (),
        "layer": (),
        "norm_before_residual": (True, False),
        "feedback_norm": (True, False),
        "sees_pictures": (True, False),
    },
)
"""EAGLE-1, EAGLE-2 and EAGLE-3. The producer is `"SafeAILab"` (yuhuili), `"SpecForge"` (lmsys),
`"speculators"` (RedHatAI), `"NVIDIA"` (Model-Optimizer), `"DeepSpec"`, `"AngelSlim"`, or `"vLLM"`:
names and keys as vLLM reads them, without a mark of the producer. The kind is `"EAGLE-1"` (and 2)
or `"EAGLE-3"`.

The options are what a caller may know better than a checkpoint's configuration says.
`layer_convention`: explicit layer ids are `"hidden_state"` or `"layer_output"` numbers, whatever
the producer usually means. `feature_layers`: the hidden states themselves (or `"final"`).
`rope_theta`: base of the rotary embedding. `layer`: a dict of fields of `LayerConfig` (`rope`,
`windows`, ...).
`norm_before_residual`, `feedback_norm` and `sees_pictures`: as in `EagleConfig`.
"""
