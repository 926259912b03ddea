"""`SpeculativeGenerator`: the loop that joins target, drafter and sampler.

context -> propose -> verify -> verdict -> commit -> context
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Unpack

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from specdec.drafters.base import Drafter, NoDrafter
from specdec.loop.collector import OutputCollector, StepRecord
from specdec.loop.generation import Generation
from specdec.loop.outcome import Outcome, PendingOutcome
from specdec.loop.prefill import prefill
from specdec.loop.state import SLOT_BUCKET, Signature, StepState
from specdec.loop.step import Parts, device_step
from specdec.loop.tracer import StepTracer
from specdec.request import GenerateOptions, Request
from specdec.request.call import check_hook
from specdec.request.options import Options
from specdec.results import GenerationResult
from specdec.samplers import BlockSampler, Sampler, Warp
from specdec.target import Target


class SpeculativeGenerator:
    """Generates with a target's exact distribution, several tokens per pass of the target.

    Args:
        target: an HF causal LM in eval mode, or a `Target`.
        drafter: proposes K tokens per step; `None` decodes plainly through the same loop.
        sampler: decides what is accepted; `"auto"` is `BlockSampler()`, which for point masses is
            `RejectionSampler()`.
        prefill_chunk_size: prompts are read in chunks of so many tokens, which bounds the memory
            that reading takes.
        keep_storage: keep the tensors of the last call for the next one, which takes them over if
            it has the same signature (rows, length, options in use); `release` frees them.
        steps_ahead: how many steps are issued before the host reads the outcome of one. `None` is 1
            on a GPU, which works on the next step meanwhile, and 0 on a CPU, which would only wait
            longer. Rows that have ended leave the batch only with 0.

    Raises:
        TypeError, ValueError: the target cannot be decoded this way, or the drafter does not fit
        it.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> tokenizer, target = zoo.load_tokenizer(), zoo.load_target()
        >>> generator = SpeculativeGenerator(target, zoo.load_drafter("model", target))
        >>> inputs = tokenizer("def main():\\n", return_tensors="pt")
        >>> result = generator.generate(inputs.input_ids, max_new_tokens=16)
        >>> result.sequences.shape[1] - inputs.input_ids.shape[1] <= 16
        True

    Reference: Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318.
    """

    def __init__(
        self,
        target: PreTrainedModel | Target,
        drafter: Drafter | None,
        sampler: Sampler | str = "auto",
        *,
        prefill_chunk_size: int = 2048,
        keep_storage: bool = True,
        steps_ahead: int | None = None,
    ):
        self.target = target if isinstance(target, Target) else Target(target)
        self.drafter = NoDrafter() if drafter is None else drafter
        self.sampler = BlockSampler() if sampler == "auto" else sampler
        if not isinstance(self.drafter, Drafter):
            raise TypeError(
                f"drafter must be a specdec Drafter or None, got {type(drafter).__name__}; "
                "wrap a draft model as ModelDrafter(model)"
            )
        if not isinstance(self.sampler, Sampler):
            raise TypeError(f"sampler must be 'auto' or a specdec Sampler, got {sampler!r}")
        _check_count("prefill_chunk_size", prefill_chunk_size, 1)
        if steps_ahead is None:
            steps_ahead = int(self.target.device.type == "cuda")
        _check_count("steps_ahead", steps_ahead, 0)
        self.drafter.validate(vocab_size=self.target.vocab_size, device=self.target.device)
        if self.drafter.feature_layers not in ((), self.target.feature_layers):
            self.target = self.target.with_features(self.drafter.feature_layers)
        self.prefill_chunk_size = prefill_chunk_size
        self.keep_storage = keep_storage
        self.steps_ahead = steps_ahead
        # Appending and popping are atomic, so two threads never get the same tensors.
        self._idle_states: deque[StepState] = deque(maxlen=1)

    @torch.inference_mode()
    def step(self, generation: Generation) -> Outcome:
        """One step for every row. Nothing in it waits for the device (logits processors do).

        Between steps `generation.synchronize()` may be called, so that the next ones attend over no
        more slots than they need.

        Args:
            generation: from `start`; updated in place.

        Returns:
            What happened, still on the device: inference tensors, to be cloned for autograd.
            `outcome.fetch().read()` waits for it, and says what drafter and sampler did wrong.

        Raises:
            ValueError: another generator started the generation, or the drafter proposed another
                number of tokens than it was asked for.
        """
        if generation.owner is not self:
            raise ValueError(
                "this generation was started by another generator; step it with that one"
            )
        outcome = device_step(
            Parts(self.target, self.drafter, self.sampler),
            generation.state,
            num_attended=generation.num_attended,
            edit_logits=generation.edit_logits,
            mark=generation.mark,
        )
        generation.count_step()
        return outcome

    def release(self) -> None:
        """Frees the tensors that are kept for the next call."""
        self._idle_states.clear()

    def __getstate__(self) -> dict:
        """Tensors that are kept for the next call are no part of a pickled generator."""
        return {**vars(self), "_idle_states": deque(maxlen=1)}

    def start(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Reads the prompts and returns the generation that `step` advances.

        Args:
            input_ids: `[B, T]` prompts, padded left or right.
            attention_mask: `[B, T]`, 1 for real tokens; `None` when all are real (or, as in HF,
                when padding is recognised by `pad_token_id`).
            options: see `GenerateOptions`.

        Raises:
            TypeError, ValueError: a prompt or an option that cannot be right; nothing has been
            computed then.
        """
        return self._begin(Request.read(self.target, input_ids, attention_mask, options))

    def stream(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[StepRecord]:
        """Generates step by step; may be abandoned at any point.

        Args and Raises: as `start`, checked when the method is called, not at the first step.

        Yields:
            A record per step, in order.
        """
        request = Request.read(self.target, input_ids, attention_mask, options)
        generation = self._begin(request)
        return self._run(generation, OutputCollector(generation))

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        streamer: BaseStreamer | None = None,
        trace: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> GenerationResult:
        """Generates until every row has ended.

        A row that meets a stopping criterion ends there, whatever its neighbours do. (HF lets it
        run on with the others where no end-of-sequence id is set.)

        Args:
            input_ids: `[B, T]` prompts, padded left or right.
            attention_mask: as in `start`.
            streamer: an HF streamer; gets the prompt and then each new token once, in order.
            trace: keep in the result every step of every row with its probabilities, draws,
                entropies and times (`specdec.trace.Trace`). Steps take longer then.
            options: see `GenerateOptions`.

        Returns:
            Sequences as HF `generate` returns them, and the numbers that explain them.

        Raises:
            TypeError, ValueError: as `start`; also when the target's logits are not finite.
        """
        request = Request.read(self.target, input_ids, attention_mask, options)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        return self._generate(request, streamer=streamer, trace=trace)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        seed: int | list[int] | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """HF's decoding hook: `model.generate(**inputs, custom_generate=generator)`.

        Args are HF's for a decoding method; `seed=` may be passed to `model.generate` as well. HF
        5.23 keeps its streamer to itself when it calls such a method: stream with
        `generator.generate(..., streamer=...)`.

        Returns:
            Sequences, or HF's output record with `return_dict_in_generate=True`.

        Raises:
            ValueError: another model than the generator's target, or inputs that specdec does not
            know.
        """
        check_hook(self.target, model, synced_gpus, model_kwargs)
        resolved = Options.from_resolved(logits_processor, stopping_criteria, generation_config)
        mask = model_kwargs.get("attention_mask")
        request = Request.from_hook(self.target, input_ids, mask, resolved, seed)
        result = self._generate(request, streamer=streamer)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=result.sequences)
        return result.sequences

    def _generate(
        self, request: Request, *, streamer: BaseStreamer | None = None, trace: bool = False
    ) -> GenerationResult:
        generation = self._begin(request)
        collector = OutputCollector(generation, streamer)
        tracer = StepTracer(generation, self.sampler) if trace else None
        for _ in self._run(generation, collector, tracer):
            pass
        return collector.result(tracer.trace() if trace else None)

    @torch.inference_mode()
    def _begin(self, request: Request) -> Generation:
        state = self._state_for(request)
        state.load(request)
        parts = Parts(self.target, self.drafter, self.sampler)
        prefill(parts, state, request.prompts, self.prefill_chunk_size)
        return Generation(self, request, state)

    def _state_for(self, request: Request) -> StepState:
        """Tensors for a call: those of an earlier one if they are idle and fit, else new ones."""
        signature = self._signature(request)
        idle = self._idle_states.pop() if self._idle_states else None
        if idle is not None and idle.signature == signature:
            return idle
        del idle  # before as much is allocated again
        return StepState.allocate(signature, self.target, self.drafter, self.sampler, request)

    def _signature(self, request: Request) -> Signature:
        lengths, room = request.prompts.lengths, request.max_new_tokens
        # A step emits at least one token beyond the draft, so no more than room - 1 can be used.
        num_draft_tokens = max(0, min(self.drafter.num_draft_tokens, room - 1))
        num_slots = max(lengths) + room + num_draft_tokens + 1
        options = request.options
        return Signature(
            batch_size=len(lengths),
            num_draft_tokens=num_draft_tokens,
            num_slots=-(-num_slots // SLOT_BUCKET) * SLOT_BUCKET,
            warp=Warp(len(lengths), **options.warp).signature,
            wants_probs=options.draft_probs and self.sampler.uses_draft_probs,
            sampler=type(self.sampler).__name__,
            dtype=self.target.dtype,
        )

    def _run(
        self,
        generation: Generation,
        collector: OutputCollector,
        tracer: StepTracer | None = None,
    ) -> Iterator[StepRecord]:
        """Steps until all outputs are complete; the host reads `steps_ahead` steps late."""
        unread: deque[PendingOutcome] = deque()
        width = generation.state.signature.num_draft_tokens + 1
        while not collector.is_done:
            outcome = self.step(generation)
            unread.append(outcome.fetch())
            if tracer is not None:
                tracer.observe(outcome)
            if len(unread) > self.steps_ahead:
                record = collector.read(unread.popleft())
                if tracer is not None:
                    tracer.read(record)
                if not unread:  # with steps ahead there always is one under way
                    generation.drop_ended()
                generation.note_longest(collector.longest + width * len(unread))
                yield record
        if self.keep_storage:
            self._idle_states.append(generation.whole)


def _check_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
