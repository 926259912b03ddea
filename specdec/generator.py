"""`SpeculativeGenerator`: the loop that joins target, drafter and sampler.

context -> propose -> verify -> verdict -> commit -> context
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
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

from specdec.cache import SlotCache
from specdec.drafters.base import Drafter, NoDrafter, check_state
from specdec.ledger import Ledger, StepRecord
from specdec.options import Options
from specdec.prefill import prefill
from specdec.processors import process_step
from specdec.request import GenerateOptions, Request, check_hook
from specdec.results import GenerationResult
from specdec.samplers import BlockSampler, Sampler
from specdec.state import GenerationState, Outcome, PendingOutcome
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
        keep_storage: keep key/value storage between calls, for calls of equal size.

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
        keep_storage: bool = False,
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
        if not isinstance(prefill_chunk_size, int) or prefill_chunk_size < 1:
            raise ValueError(
                f"prefill_chunk_size must be an integer >= 1, got {prefill_chunk_size!r}"
            )
        self.drafter.validate(vocab_size=self.target.vocab_size, device=self.target.device)
        if self.drafter.feature_layers not in ((), self.target.feature_layers):
            self.target = self.target.with_features(self.drafter.feature_layers)
        self.prefill_chunk_size = prefill_chunk_size
        self.keep_storage = keep_storage
        self._kept: tuple[SlotCache, Any] | None = None
        # A GPU works on the next step while the host reads the last one; a CPU would only wait.
        self._steps_ahead = int(self.target.device.type == "cuda")

    @torch.inference_mode()
    def step(self, state: GenerationState) -> Outcome:
        """One step for every row. Nothing in it waits for the device (logits processors do).

        Whoever steps by hand and reads lengths may tell the state with `state.bound(longest)`, so
        that the next step attends over no more slots than it needs.

        Args:
            state: from `start`; updated in place.

        Returns:
            What happened, still on the device: inference tensors, to be cloned for autograd.

        Raises:
            ValueError: the drafter proposed another number of tokens than its K.
        """
        noise = state.noise.at(state.cache.lengths, self.drafter.num_draft_tokens + 1)
        told = noise if state.options.draft_laws else noise.without_laws()
        draft = self.drafter.propose(state.context, state.drafter_state, state.warp, told)
        if draft.tokens.shape[1] != self.drafter.num_draft_tokens:
            raise ValueError(
                f"{type(self.drafter).__name__} proposed {draft.tokens.shape[1]} tokens per row, "
                f"its num_draft_tokens is {self.drafter.num_draft_tokens}; use num_valid for fewer"
            )
        if not state.options.draft_laws:  # a drafter may have laws that no noise told
            draft = replace(draft, probs=None)
        output = self.target.verify(state.cache, state.books.anchor, draft, longest=state.longest)
        logits = process_step(state, draft, output.logits)
        verdict = self.sampler(draft, logits, state.warp, noise)
        return state.commit(draft, verdict, logits, output.features)

    def start(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerationState:
        """Reads the prompts and returns the state that `step` advances.

        Args:
            input_ids: `[B, T]` prompts, padded left or right.
            attention_mask: `[B, T]`, 1 for real tokens; `None` when all are real (or, as in HF,
                when padding can be told by `pad_token_id`).
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
        state = self._begin(request)
        return self._run(state, self._open_ledger(state, request))

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
            trace: keep every step of every row in the result.
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
        state = self._begin(request)
        ledger = self._open_ledger(state, request, streamer)
        for _ in self._run(state, ledger):
            pass
        return ledger.result(trace=trace)

    def _open_ledger(
        self, state: GenerationState, request: Request, streamer: BaseStreamer | None = None
    ) -> Ledger:
        return Ledger(
            state,
            seeds=request.seeds,
            num_draft_tokens=self.drafter.num_draft_tokens,
            streamer=streamer,
        )

    @torch.inference_mode()
    def _begin(self, request: Request) -> GenerationState:
        rows, num_draft_tokens = len(request.prompts.lengths), self.drafter.num_draft_tokens
        room = request.options.max_length - request.prompts.padded.shape[1]
        cache, drafter_state = self._storage(
            rows, max(request.prompts.lengths) + room + num_draft_tokens + 1
        )
        state = GenerationState.begin(
            request.prompts,
            request.options,
            seeds=request.seeds,
            noise_type=self.sampler.noise_type,
            cache=cache,
            drafter_state=drafter_state,
            num_draft_tokens=num_draft_tokens,
            vocab_size=self.target.vocab_size,
            feature_width=self.target.feature_width,
            feature_dtype=self.target.dtype,
        )
        prefill(self.target, self.drafter, state, self.prefill_chunk_size)
        return state

    def _storage(self, rows: int, num_slots: int) -> tuple[SlotCache, Any]:
        """Empty storage: that of the last call if it was kept and fits, else new."""
        (kept, drafter_state), self._kept = self._kept or (None, None), None
        if kept is not None and (kept.num_rows, kept.num_slots) == (rows, num_slots):
            kept.reset()
            drafter_state.reset()
            return kept, drafter_state
        target = self.target
        drafter_state = self.drafter.init_state(
            rows, num_slots, vocab_size=target.vocab_size, device=target.device
        )
        return target.init_cache(rows, num_slots), check_state(self.drafter, drafter_state)

    def _run(self, state: GenerationState, ledger: Ledger) -> Iterator[StepRecord]:
        """Steps until the ledger is complete; on a GPU the host reads one step late."""
        width, storage = self.drafter.num_draft_tokens + 1, (state.cache, state.drafter_state)
        unread: deque[PendingOutcome] = deque()
        while not ledger.is_done:
            unread.append(self.step(state).fetch())
            if len(unread) > self._steps_ahead:
                record = ledger.read(unread.popleft())
                if not unread:  # on a GPU there always is a step under way
                    state.drop_ended()
                state.bound(ledger.longest + width * len(unread))
                yield record
        if self.keep_storage:
            self._kept = storage
