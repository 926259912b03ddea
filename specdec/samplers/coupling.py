"""`CouplingSampler`: drafter and target draw with the same noise and are compared."""

from torch import Tensor

from specdec.kernels.verify.verdict import verify_points
from specdec.samplers.base import Sampler
from specdec.samplers.logits_filter import LogitsFilter
from specdec.samplers.noise import StepNoise
from specdec.samplers.races import draw_by_race
from specdec.types import Draft, Verdict


class CouplingSampler(Sampler):
    """Lets the target draw at every position, and accepts the draft tokens that equal its draws.

    Both sides draw by an exponential race (the Gumbel-max trick) whose noise belongs to the seed
    and the position in the text. So the text is that of plain decoding with the same seed, token
    for token, for every drafter and every K; and similar distributions mostly draw the same token:
    they differ with probability at most 2 TV / (1 + TV), where rejection reaches TV.

    Example:
        >>> from specdec import CouplingSampler, SpeculativeGenerator, zoo
        >>> target = zoo.load_target()
        >>> ids = zoo.load_tokenizer()("import ", return_tensors="pt").input_ids
        >>> options = dict(max_new_tokens=8, do_sample=True, seed=1)
        >>> texts = [
        ...     SpeculativeGenerator(target, drafter, CouplingSampler()).generate(ids, **options)
        ...     for drafter in (None, zoo.load_drafter("model", target))
        ... ]
        >>> bool((texts[0].sequences == texts[1].sequences).all())
        True

    Reference: Daliri et al., arXiv:2408.07978 (Gumbel sampling; drafter-invariant decoding).
    """

    lossless = True
    takes_trees = True
    draw_draft = staticmethod(draw_by_race)
    uses_draft_probs = False
    uses_accept_draws = False

    def accept(
        self, draft: Draft, target_logits: Tensor, logits_filter: LogitsFilter, noise: StepNoise
    ) -> Verdict:
        """Compares draws."""
        noise = noise.at_depths(draft.depths)
        return verify_points(draft, noise.race(target_logits, logits_filter, index=0))
