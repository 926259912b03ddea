"""Five ordinary programs of users, which type checkers read: `test_mypy.py` and `test_types.py`."""

PROGRAMS = {
    "generates": """
from specdec import SpeculativeGenerator, zoo

target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
generator = SpeculativeGenerator(target, zoo.load_drafter("model", target))
ids = tokenizer("def main():", return_tensors="pt").input_ids
result = generator.generate(ids, max_new_tokens=8, top_k=None, eos_token_id=None, seed=[0])
print(result.stats.acceptance_length, result.sequences.shape, result.texts[0], result.to_dict())
for record in generator.stream(ids, temperature=0.5, top_p=0.9):
    print(record.rows[0].new_tokens)
""",
    "evaluates": """
import specdec
from specdec import Evaluation, SpeculativeGenerator, evaluate, zoo
from specdec.lab.evaluation import compare

target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
generator = SpeculativeGenerator(target, "lookup")
found: Evaluation = evaluate(generator, ["x"], tokenizer=tokenizer, max_new_tokens=8, top_k=None)
print(found.stats.acceptance_length, specdec.evaluate(generator, [[1, 2]]).rows[0].new_tokens)
""",
    "samples": """
from specdec.drafters import Drafter, NoDrafter, PromptLookupDrafter
from specdec.samplers import BlockSampler, CouplingSampler, LogitsFilter, Sampler, StepNoise

samplers: list[Sampler] = [BlockSampler(), CouplingSampler()]
drafters: list[Drafter] = [NoDrafter(), PromptLookupDrafter(4)]
print([sampler.lossless for sampler in samplers], drafters[1].num_draft_tokens)
print(LogitsFilter(2, temperature=[0.5, 1.0]).is_greedy, StepNoise)
""",
    "drafts": """
import torch
from specdec import Context, Draft, Drawing, NoDrafter, SpeculativeGenerator, zoo


class LastToken(NoDrafter):
    def __init__(self, num_draft_tokens: int = 4):
        super().__init__()
        self.num_draft_tokens = num_draft_tokens

    def propose(self, context: Context, state: object, drawing: Drawing) -> Draft:
        last = context.tokens.gather(1, context.num_new[:, None])
        return Draft(last.expand(-1, drawing.num_draft_tokens), None)


generator = SpeculativeGenerator(zoo.load_target(), LastToken(), "block")
print(generator.generate(torch.tensor([[5, 6]]), max_new_tokens=4).stats.totals.steps)
""",
    "certifies": """
from specdec import RejectionSampler, SpeculativeGenerator, certify, zoo

report = certify(RejectionSampler(), sizes=((3, 1, 4),))
print(report.is_exact, report.failures)
generator = SpeculativeGenerator(zoo.load_target(), "suffix")
assert certify(generator, [[1, 2, 3]], num_samples=4, max_new_tokens=8).passed
""",
}
WRONG = """
from specdec import SpeculativeGenerator, evaluate, zoo

generator = SpeculativeGenerator(zoo.load_target(), "lookup")
evaluate("lookup", ["x"])
generator.generate(temperature="hot")
print(generator.generate().stats.acceptance_lenght)
"""
"""The control: each of its last three lines has an error."""
