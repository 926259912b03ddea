"""Short runs of TRL's GRPO and RLOO whose rollouts are written by HF's own `generate` or through
`speculate`, with the same draws in both. `torchrun --nproc-per-node 2 tests/rollout_runs.py FILE`
is one in two processes, of the options of `run` in that file.
"""

import copy
import hashlib
import json
import sys
from pathlib import Path

import torch
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback

from specdec import CouplingSampler, zoo
from specdec.lab.integrations.trl import speculate
from specdec.lab.training import FollowTarget, TrainingTimeTest
from specdec.samplers import LogitsFilter, Noise

STEPS, GROUP, NEW_TOKENS = 4, 4, 16
PROMPTS = zoo.heldout_prompts(16)
KINDS = "GRPO", "RLOO"


def reward(completions, **_):
    """Not constant in a group, so that there is something to learn."""
    return [float(len(set(text))) for text in completions]


def trainer_of(kind, model, folder, *, rewards=reward, more=None, prompts=PROMPTS, **settings):
    """A trainer on a CPU with settings that change the model's text within a few steps."""
    import datasets
    import trl

    options = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": GROUP,
        "num_generations": GROUP,
        "max_completion_length": NEW_TOKENS,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        **settings,
    }
    return getattr(trl, f"{kind}Trainer")(
        model,
        args=getattr(trl, f"{kind}Config")(**options),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=zoo.load_tokenizer(),
        reward_funcs=rewards,
        **(more or {}),
    )


class Races(LogitsProcessor):
    """Leaves HF's greedy search the winner of the race that the coupling sampler runs for a row's
    seed at that position.
    """

    def __init__(self, seeds, attention_mask):
        self.noise, self.logits_filter = Noise(seeds), LogitsFilter(len(seeds), temperature=1.0)
        self.padding = (1 - attention_mask).sum(dim=1)

    def __call__(self, input_ids, scores):
        numbers = self.noise.at(input_ids.shape[1] - 1 - self.padding, width=1)
        winner = numbers.race(scores[:, None], self.logits_filter, index=0)
        return torch.full_like(scores, -torch.inf).scatter(1, winner, 0.0)


def draw_by_races(model):
    """HF's own `generate`, with the draws that `speculate` makes with a coupling sampler."""
    plain = model.generate

    def generate(*, input_ids, attention_mask, generation_config):
        seeds = torch.randint(2**63 - 1, (len(input_ids),)).tolist()
        config = copy.deepcopy(generation_config)
        assert (config.temperature, config.top_k, config.top_p) == (1.0, 0, 1.0)
        config.do_sample = False
        config.temperature = config.top_k = config.top_p = None
        processor = LogitsProcessorList([Races(seeds, attention_mask)])
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        return plain(**inputs, generation_config=config, logits_processor=processor)

    model.generate = generate


class DrafterOfSteps(TrainerCallback):
    """Notes a checksum of the drafter's weights after every step."""

    def __init__(self, generator):
        self.generator, self.checksums = generator, []

    def on_step_end(self, args, state, control, **_):
        self.checksums.append(checksum(self.generator.drafter))


def run(kind, drafter, folder, *, resume=None, sampler=None, follows=False, **settings):
    """Trains the zoo's target; `drafter=None` is HF's own `generate`, `resume` a checkpoint, the
    sampler that of HF's draws where none is passed, and a drafter that follows is of EAGLE-3.

    Returns:
        Completions and their rewards by step, a checksum of the weights, tokens per step, and
        checksums of the drafter's weights by step.
    """
    completions, rewards = [], []

    def noted(completion_ids, **options):
        completions.append(completion_ids)
        rewards.append(reward(**options))
        return rewards[-1]

    model = zoo.load_target()
    trainer = trainer_of(kind, model, folder, rewards=noted, **settings)
    generator = noted_drafters = None
    if drafter is None:
        draw_by_races(trainer.model)
    else:
        generator = speculate(trainer, drafter, sampler or CouplingSampler())
        if follows:
            trainer.add_callback(FollowTarget(generator, TrainingTimeTest))
        noted_drafters = DrafterOfSteps(generator)
        trainer.add_callback(noted_drafters)
    trainer.train(resume_from_checkpoint=resume)
    stats = generator and generator.last_result.stats
    return {
        "completions": completions,
        "rewards": rewards,
        "weights": checksum(trainer.model),
        "acceptance_length": stats and stats.acceptance_length,
        "drafters": noted_drafters and noted_drafters.checksums,
    }


def checksum(module):
    """Of its weights."""
    weights = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
    return hashlib.sha256(weights).hexdigest()


if __name__ == "__main__":
    options = Path(sys.argv[1])
    found = run(**json.loads(options.read_text(encoding="utf-8")))
    file = options.with_suffix(f".{torch.distributed.get_rank()}")
    file.write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()
