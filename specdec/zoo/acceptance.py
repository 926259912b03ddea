"""Measures how much of a drafter's proposals the target accepts on text that no training saw."""

from __future__ import annotations

import json
from pathlib import Path

from tqdm import tqdm

from specdec import zoo
from specdec.generator import SpeculativeGenerator

NUM_PROMPTS = 32
NEW_TOKENS = 128
NUM_DRAFT_TOKENS = 4
TEMPERATURES = (0.0, 1.0)


def measure_acceptance(name: str) -> dict:
    """Generate from held-out prompts with one of the zoo's drafters and count.

    Args:
        name: The drafter, as `zoo.load_drafter` knows it.

    Returns:
        Per temperature the acceptance length and rate, and acceptance by position; conditions with
        them.
    """
    tokenizer, target = zoo.load_tokenizer(), zoo.load_target()
    drafter = zoo.load_drafter(name, target, num_draft_tokens=NUM_DRAFT_TOKENS)
    generator = SpeculativeGenerator(target, drafter)
    prompts = zoo.heldout_prompts(NUM_PROMPTS)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    measured = {}
    for temperature in tqdm(TEMPERATURES, desc=f"acceptance of {name}"):
        sampling = {"temperature": temperature, "seed": list(range(NUM_PROMPTS))}
        result = generator.generate(
            inputs.input_ids,
            inputs.attention_mask,
            max_new_tokens=NEW_TOKENS,
            do_sample=temperature > 0,
            **(sampling if temperature > 0 else {}),
        )
        stats = result.stats
        measured[f"temperature {temperature:g}"] = {
            "acceptance_length": round(stats.acceptance_length, 3),
            "acceptance_rate": round(stats.acceptance_rate, 3),
            "conditional_rates": [round(rate, 3) for rate in stats.conditional_rates],
            "joint_rates": [round(rate, 3) for rate in stats.joint_rates],
            "num_steps": sum(stats.steps),
        }
    conditions = {
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "prompts": f"heldout_prompts({NUM_PROMPTS}), {NEW_TOKENS} new tokens each",
        "seeds": f"0..{NUM_PROMPTS - 1}, one per prompt",
        "command": "python -m specdec.zoo.recipe measure",
    }
    return {**measured, "conditions": conditions}


def write_acceptance(name: str, weights_dir: Path) -> None:
    """Measure a drafter of the package and enter the figures in its card.

    Args:
        name: The drafter, as `zoo.load_drafter` knows it.
        weights_dir: The folder that holds the folders of the zoo's models.
    """
    path = weights_dir / zoo.DRAFTERS[name] / "card.json"
    card = json.loads(path.read_text(encoding="utf-8"))
    card["acceptance"] = measure_acceptance(name)
    path.write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
