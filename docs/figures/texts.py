"""What the zoo writes, as one hash: texts, acceptance and an interval of its drafters, greedy and
sampled. Figures of acceptance alone are as old as it, and not as the code of the library
(`made.py`). Another processor or torch may round otherwise, and write another text.

    python docs/figures/texts.py
"""

from hashlib import sha256

import torch

from specdec import SelfDrafter, SpeculativeGenerator, evaluate, zoo
from specdec.drafters import Recent, Sinks

RULES = (
    {"do_sample": False},
    {"do_sample": True, "temperature": 1.0, "seed": 7},
    {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 7},
)


def texts(prompts: int = 4, tokens: int = 32) -> str:
    """The hash, of so many prompts and new tokens of each drafter: sixteen hexadecimal digits."""
    torch.set_num_threads(1)
    target, found = zoo.load_target(), sha256()
    drafters = {name: zoo.load_drafter(name, target) for name in sorted(zoo.DRAFTERS)}
    drafters |= {"none": None, "lookup": "lookup"}
    drafters["self"] = SelfDrafter(target, 4, visible=Sinks(4) + Recent(28))
    drafters["tree"] = zoo.load_drafter("eagle3", target, tree="8x3")
    generators = [SpeculativeGenerator(target, drafter) for drafter in drafters.values()]
    for rule in ("coupling", "rejection"):
        generators.append(SpeculativeGenerator(target, drafters["eagle3"], rule))
    encode, given = zoo.load_tokenizer(), list(zoo.heldout_prompts(prompts))
    ids = encode(given, padding=True, return_tensors="pt")
    for generator in generators:
        for rule in RULES:
            result = generator.generate(**ids, max_new_tokens=tokens, **rule)
            found.update(repr(result.sequences.tolist()).encode())
            found.update(repr(result.stats.acceptance_length).encode())
    measured = evaluate(generators[0], ids.input_ids, ids.attention_mask, max_new_tokens=tokens)
    measures = measured.stats.acceptance_length, round(measured.acceptance_error, 12)
    found.update(repr(measures).encode())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    print(texts())
