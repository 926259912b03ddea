"""`load`: a folder of a head's files becomes a drafter; `save`: and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from specdec.checkpoints.export import save_head
from specdec.checkpoints.family import Family
from specdec.checkpoints.survey import survey_checkpoint
from specdec.drafters.head.drafter import HeadDrafter
from specdec.drafters.head.sharing import model_of
from specdec.drafters.proposal import Kind
from specdec.drafters.tree import Tree
from specdec.drafters.visible import Visible
from specdec.hf.forward import device_of
from specdec.targets import Target


def load(
    path_or_id: str | Path,
    target: PreTrainedModel | Target,
    num_draft_tokens: int | None = None,
    *,
    families: Sequence[Family] | None = None,
    proposal: Kind = "sample",
    draft_temperature: float | None = None,
    tree: Tree | str | None = None,
    visible: Visible | None = None,
    **options: Any,
) -> HeadDrafter:
    """Loads a public head into the drafter of its family; `specdec inspect` shows how it is read.

    Args:
        path_or_id: a folder, or a Hugging Face id.
        target: whose device and data type the head takes.
        families: that it may be of, your own for instance; `None` for all whose folders are known
            by their files.
        num_draft_tokens, proposal, draft_temperature, tree, visible: as for `HeadDrafter`.
        options: of the reading (`layouts`, `allow_pickle`, `layer_convention`, `rope_theta`, ...),
            see `survey_checkpoint` and the family's options.

    Raises:
        TypeError: an option that does not exist.
        ValueError: an unsafe, damaged, unsupported or contradictory checkpoint, or one of a
            head for another target.

    Example:
        >>> from specdec.lab import zoo
        >>> load(zoo.WEIGHTS_DIR / "eagle3", zoo.load_target(), 3).num_draft_tokens
        3
    """
    if families is None:
        from specdec.checkpoints.families import RECOGNISED  # which imports all of them

        families = RECOGNISED
    model = model_of(target)
    survey = survey_checkpoint(path_or_id, model, families=families, **options)
    head = survey.load(model).build().to(device_of(model.get_input_embeddings()))
    kinds: dict[str, Any] = {"proposal": proposal, "draft_temperature": draft_temperature}
    kinds |= {} if visible is None else {"visible": visible}
    return survey.family.drafter(head, target, num_draft_tokens, tree=tree, **kinds)


def save(
    drafter: HeadDrafter, folder: str | Path, layout: Any = None, verifier: str | None = None
) -> tuple[str, ...]:
    """Writes the head of a drafter; see `HeadDrafter.save_pretrained`."""
    if layout is None and drafter.family is not None:
        layout = next((record for record in drafter.family.layouts if record.name), None)
    target, options = drafter.borrowed, {"num_draft_tokens": max(drafter.num_draft_tokens, 1)}
    options |= {"verifier": verifier or target.name, "target_layers": target.num_layers}
    options |= {"embed_tokens": target.embeddings.weight, "lm_head": target.lm_head.weight}
    return save_head(drafter.head, folder, layout, **options)
