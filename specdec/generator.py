"""`SpeculativeGenerator`: the loop that joins target, drafter and sampler.

context -> propose -> verify -> verdict -> commit -> context
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from specdec.arguments import check_integer, shown
from specdec.drafters import Drafter
from specdec.drafters.settable import Settable
from specdec.loop.host import Generation, OutputCollector, StepRecord
from specdec.loop.outcome import Outcome, PendingOutcome
from specdec.loop.pool import StoragePool
from specdec.loop.state import Parts
from specdec.request import GenerateOptions
from specdec.request.call import Request, read_request
from specdec.request.keywords import with_options
from specdec.results import GenerationResult
from specdec.samplers import Sampler
from specdec.targets import Target

if TYPE_CHECKING:
    from specdec.lab.trace import Trace
    from specdec.loop.lengths import ChooseLength
    from specdec.request.hook import HookOutput


class SpeculativeGenerator(Settable):
    """Generates with a target's exact distribution, several tokens per pass of the target.

    Args:
        target: an HF causal LM in eval mode, or a `Target`. `torch.compile` and PEFT wrappers are
            taken off, see `specdec.targets.wrappers.unwrap`.
        drafter: proposes K tokens per step; `None` decodes plainly through the same loop. A name,
            such as `"lookup"`, `"zoo:eagle3"` or `"mine.py:make"`, is loaded by `load_drafter`.
        sampler: decides what is accepted; `"auto"` is `BlockSampler()`, which for point masses is
            `RejectionSampler()`. A name is loaded by `load_sampler`.
        prefill_chunk_size: prompts are read in chunks of so many tokens, which bounds the memory
            that reading takes.
        graphs: whether steps are captured as CUDA graphs, one for each set of options in use (rows
            up to a bucket, draft length, which sampling options), and replayed from then on, also
            by later calls of any length that fits. A longer call makes the storage grow. `"auto"`
            captures on a GPU what can be captured, and `explain` says what cannot and why; `True`
            raises `CaptureError` instead, and on a CPU replays the same function under the same
            checks; `False` captures nothing.
        kept_bytes: how many bytes of tensors and graphs are kept for later calls, besides those of
            calls under way; `release` frees them. `None` is a quarter of the device's memory, 0
            keeps nothing.
        draft_length: how many tokens each step drafts. `None` is always the drafter's K; `"auto"`
            the length of most expected tokens per millisecond, from what the call's earlier steps
            accepted and from what steps cost, which the first call of a size measures
            (`AutoLength`; `explain` has the costs); or a function of one's own (`ChooseLength`).
            All rows of a batch share it. A call that names `num_draft_tokens` has that length, and
            who steps by hand sets `generation.num_draft_tokens`.
        steps_ahead: how many steps are issued before the host reads the outcome of one. `None` is 1
            on a GPU, which works on the next step meanwhile, and 0 on a CPU, which would only wait
            longer. None is issued ahead of steps that may bring all rows to their length. Rows that
            have ended leave the batch only with 0.

    Attributes:
        last_result: of the call that finished last, in any thread; `None` before.

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

    _not_set = ("kept_bytes",)
    _set_once = ("target", "drafter", "sampler", "graphs", "prefill_chunk_size", "steps_ahead")
    _set_once += ("draft_length",)

    def __init__(
        self,
        target: nn.Module | Target,  # also a model that PEFT or accelerate has wrapped
        drafter: Drafter | str | None,
        sampler: Sampler | str = "auto",
        *,
        graphs: bool | Literal["auto"] = "auto",
        prefill_chunk_size: int = 2048,
        kept_bytes: int | None = None,
        steps_ahead: int | None = None,
        draft_length: ChooseLength | Literal["auto"] | None = None,
    ):
        from specdec.loop.join import joined

        self.target, self.drafter, self.sampler = joined(
            *(target, drafter, sampler),
            graphs=graphs,
            prefill_chunk_size=prefill_chunk_size,
            kept_bytes=kept_bytes,
            steps_ahead=steps_ahead,
            draft_length=draft_length,
        )
        if steps_ahead is None:
            steps_ahead = int(self.target.device.type == "cuda")
        self.graphs, self.prefill_chunk_size = graphs, int(prefill_chunk_size)
        self.steps_ahead, self.draft_length = steps_ahead, draft_length
        self._lengths: Any = None
        self._forget_costs()
        self._storages = StoragePool(self.target, graphs=graphs, kept_bytes=kept_bytes)
        self.last_result: GenerationResult | Any = None

    @torch.inference_mode()
    def warm_up(self, rows: int, tokens: int, **options: Unpack[GenerateOptions]) -> None:
        """Compiles and captures all that calls of a size need, so that none of it falls into their
        time: steps of every draft length in use, prompt chunks, and with `draft_length="auto"` the
        costs of its lengths. Other options (sampled, not greedy) have other steps: warm each up.

        Args:
            rows: prompts of a call.
            tokens: most tokens of a row, those of the prompt and `max_new_tokens` together.
            options: as the calls will have them; their values (temperatures, seeds) do not matter.

        Raises:
            TypeError, ValueError: as `start`; also where `kept_bytes` is too small to keep anything
                for later calls.

        Example:
            >>> from specdec import SpeculativeGenerator, zoo
            >>> generator = SpeculativeGenerator(zoo.load_target(), "lookup", graphs=True)
            >>> generator.warm_up(rows=1, tokens=256, do_sample=True)
            >>> sum("captured in" in line for line in generator.explain().splitlines())
            5
        """
        from specdec.loop.warming import inert_request, warm_up

        request = inert_request(self.target, rows, tokens, options)
        choose = self._chooser(request)  # which measures the costs that it does not know
        generation = self._begin(request)
        warm_up(
            generation,
            choose,
            is_measured=self.draft_length == "auto",
            chunk_size=self.prefill_chunk_size,
            kept_bytes=self._storages.kept_bytes,
        )

    def step(self, generation: Generation) -> Outcome:
        """One step for every row. Nothing in it waits for the device (logits processors do).

        Between steps `generation.synchronize()` may be called, so that the next ones attend over no
        more slots than they need. Rows that have ended commit nothing, so a step after the end of
        all rows costs its time and changes neither tokens nor lengths.

        Args:
            generation: from `start`; updated in place.

        Returns:
            What happened, still on the device: inference tensors, to be cloned for autograd.
            `outcome.fetch().read()` waits for it, and says what drafter and sampler did wrong.

        Raises:
            TypeError, ValueError: another generator started the generation, or it was closed;
                drafter or sampler returned no draft or verdict of the step's sizes.
        """
        target = self.target
        if not isinstance(generation, Generation) or generation.owner is not self:
            from specdec.loop.refusals import refuse_generation

            refuse_generation(generation)
        if target.hooks or target.num_handles != RemovableHandle.next_id:
            from specdec.loop.refusals import check_hooks

            check_hooks(target, generation)
        return generation.run_step()

    def refresh(self) -> None:
        """Reads the models of target and drafter again, after edits for which calls raise an error:
        weights replaced where products are joined, another data type, other modules, adapters
        switched, scaled or merged. No generation may be under way. Plain numbers that a module
        holds, such as a `scaling`, are read here too, and no call notices that they were edited.

        Raises:
            ValueError: a model can no longer be decoded.
        """
        from specdec.loop.join import models_of

        for model in (self.target, *models_of(self.drafter)):
            model.refresh()
        self._forget_costs()
        self.release()

    def _forget_costs(self) -> None:
        if self.draft_length is not None:
            from specdec.loop.lengths import MeasuredLengths

            self._lengths = MeasuredLengths()

    def release(self) -> None:
        """Frees the tensors and graphs that are kept for later calls."""
        self._storages.clear()

    def __repr__(self) -> str:
        from specdec.loop.capturing import headline

        return headline(self.target, self.drafter, self.sampler)

    def __getstate__(self) -> dict:
        """The result of the last call is no part of a pickled generator."""
        return {**vars(self), "last_result": None}

    def explain(self) -> str:
        """How the steps run: what is captured, what is not, and why.

        Example:
            >>> from specdec import SpeculativeGenerator, zoo
            >>> print(SpeculativeGenerator(zoo.load_target(), None).explain())
            steps are eager: the target is on a CPU (graphs=True replays there, too, for tests)
        """
        from specdec.loop.capturing import describe

        lengths = () if self._lengths is None else self._lengths.describe()
        return "\n".join([*describe(self._storages), *self.target.notes, *lengths])

    @with_options
    def start(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Reads the prompts and returns the generation that `step` advances.

        Args:
            input_ids: `[B, T]` prompts, padded left or right; or all that a tokenizer or the
                target's processor returns, as one object; `None` beside `inputs_embeds`. Of an
                encoder-decoder the source, as in HF, with `decoder_input_ids` among the options.
            attention_mask: `[B, T]`, 1 for real tokens; `None` when all are real (or, as in HF,
                when left padding is recognised by `pad_token_id`).
            options: see `GenerateOptions`; and what the target's own `generate` takes of a prompt
                (`pixel_values`, `input_features`, `inputs_embeds`, ...), padded on the left.

        Raises:
            TypeError, ValueError: a prompt or an option that cannot be right; nothing has been
            computed then.
        """
        request = read_request(self.target, input_ids, attention_mask, options)
        return self._begin(request)

    @with_options
    def stream(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[StepRecord]:
        """Generates step by step; may be abandoned at any point.

        Args and Raises: as `start`, checked when the method is called, not at the first step.

        Yields:
            A record per step, in order.
        """
        request = read_request(self.target, input_ids, attention_mask, options)
        choose = self._chooser(request)
        generation = self._begin(request)
        return self._run(generation, OutputCollector(generation), choose)

    @overload
    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        streamer: BaseStreamer | None = None,
        trace: Literal[True],
        check: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> GenerationResult[Trace]: ...

    @overload
    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        streamer: BaseStreamer | None = None,
        trace: bool = False,
        check: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> GenerationResult: ...

    @with_options
    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        streamer: BaseStreamer | None = None,
        trace: bool = False,
        check: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> GenerationResult:
        """Generates until every row has ended.

        A row that meets a stopping criterion ends there, whatever its neighbours do. (HF lets it
        run on with the others where no end-of-sequence id is set.)

        Args:
            input_ids, attention_mask: as in `start`.
            streamer: an HF streamer; gets the prompt and then each new token once, in order.
            trace: keep in the result every step of every row with its probabilities, draws,
                entropies and times (`specdec.lab.trace.Trace`). Steps take longer then.
            check: run every step eagerly, too, on tensors of its own, and compare: tokens,
                acceptance by position, lengths. Costs both, and waits for the device.
            options: as in `start`.

        Returns:
            Sequences as HF `generate` returns them, and the numbers that explain them.

        Raises:
            TypeError, ValueError: as `start`; also when the target's logits are not finite, and for
                `check=True` where steps are eager anyway.
            ReplayMismatchError: with `check=True`, where a replayed step and the eager one differ.
        """
        with nullcontext() if streamer is None else _ending(streamer):
            for name, flag in (("trace", trace), ("check", check)):
                if not isinstance(flag, bool):
                    raise TypeError(f"{name} must be True or False, got {shown(flag)}")
            request = read_request(self.target, input_ids, attention_mask, options)
            if check and (reason := self._storages.why_eager(request, is_traced=trace)):
                raise ValueError(f"check=True has no replay to compare with: {reason}")
            if streamer is not None:
                streamer.put(request.padded.cpu())
            return self._generate(request, streamer=streamer, trace=trace, check=check)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        stop_strings: str | list[str] | None = None,
        seed: int | list[int] | None = None,
        output_logprobs: bool = False,
        **model_kwargs: Any,
    ) -> Tensor | HookOutput:
        """HF's decoding hook: `model.generate(**inputs, custom_generate=generator)`.

        Args are HF's for a decoding method; `seed=` and `output_logprobs=` may be passed to
        `model.generate` as well, and `stop_strings=` with `tokenizer=`. HF passes neither its
        `streamer` nor its `tokenizer` on, so they are taken from the call of `generate` itself.
        `last_result` is what `generate` of this class would have returned, with the statistics.

        Returns:
            Sequences, or with `return_dict_in_generate=True` HF's output record, which has
            log-probabilities besides.

        Raises:
            ValueError: another model than the generator's target, or inputs that specdec does not
            know.
        """
        from specdec.loop.hook import generate_for_hf

        return generate_for_hf(
            *(self._generate, self.target, model, input_ids, logits_processor),
            *(stopping_criteria, generation_config, model_kwargs),
            synced_gpus=synced_gpus,
            streamer=streamer,
            stop_strings=stop_strings,
            seed=seed,
            output_logprobs=output_logprobs,
        )

    def _generate(
        self,
        request: Request,
        *,
        streamer: BaseStreamer | None = None,
        trace: bool = False,
        check: bool = False,
    ) -> GenerationResult:
        started_s = time.perf_counter()
        choose = self._chooser(request, trace=trace)
        generation = self._begin(request, trace=trace)
        collector = OutputCollector(generation, streamer)
        tracer = None
        if trace:
            from specdec.loop.tracer import StepTracer

            generation.stepper = tracer = StepTracer(generation)
        elif check:
            from specdec.loop.check import EagerTwin

            generation.stepper = EagerTwin(generation, self.prefill_chunk_size)
        for record in self._run(generation, collector, choose):
            if tracer is not None:
                tracer.add(record)
        wall_s = time.perf_counter() - started_s
        traced = tracer.trace(generation.max_draft_tokens) if trace else None
        result = vars(self)["last_result"] = collector.result(traced, wall_s=wall_s)
        if streamer is not None:
            streamer.end()
        return result

    @torch.inference_mode()
    def _begin(self, request: Request, *, trace: bool = False) -> Generation:
        target = self.target  # the drafter may have been changed since it was joined
        most = check_integer("num_draft_tokens", self.drafter.num_draft_tokens, 0)
        self.drafter.validate(vocab_size=target.vocab_size, device=target.device)
        self.drafter.check_target(target)
        if self.drafter.feature_layers not in ((), target.feature_layers):
            from specdec.loop.refusals import refuse_features

            refuse_features(target, self.drafter)
        if (asked := request.num_draft_tokens) is not None:
            advice = "the drafter's own is the largest; make it with a larger one"
            check_integer("num_draft_tokens", asked, 0, most, advice=advice)
        if request.row_inputs:
            from specdec.request.row_inputs import read_by

            read_by(request, target, self.drafter)
        parts = Parts(self.target, self.drafter, self.sampler)
        reason = self._storages.why_eager(request, is_traced=trace)
        storage = self._storages.take(parts, request, why_eager=reason)
        stepper = storage.stepper
        if request.processors:
            from specdec.loop.processors import step_with_processors

            stepper = partial(step_with_processors, request, parts)
        generation = Generation(self, request, storage, stepper, give_back=self._storages.give)
        if target.runs_users_code:
            from specdec.targets.trial.users_code import try_call

            sizes = storage.chunk_sizes(request, self.prefill_chunk_size)
            try_call(target, request, storage.state.signature.batch_size, most, sizes)
        storage.prefill(request, self.prefill_chunk_size)
        return generation

    def _chooser(self, request: Request, *, trace: bool = False) -> ChooseLength | None:
        """What chooses the draft lengths of a call; with costs of its size, which are measured if
        they are not known. Processors and criteria, host code of users, have no part in them.
        """
        is_fixed = self.draft_length is None or request.num_draft_tokens is not None
        if is_fixed or not self.drafter.num_draft_tokens:
            return None
        reason = self._storages.why_eager(request, is_traced=trace)
        parts = Parts(self.target, self.drafter, self.sampler)
        begin = partial(self._begin, trace=reason is not None)
        return self._lengths.chooser_of(self.draft_length, parts, request, reason, begin)

    def _run(
        self,
        generation: Generation,
        collector: OutputCollector,
        choose: ChooseLength | None,
    ) -> Iterator[StepRecord]:
        """Steps until all outputs are complete; the host reads `steps_ahead` steps late, but where
        those under way may be the last: one more in vain takes longer than to wait for them.
        """
        unread: deque[tuple[PendingOutcome, int]] = deque()
        k, depth = generation.state.signature.num_draft_tokens, generation.parts.drafter.tree_depth
        chosen: Any = None
        if choose is not None:
            from specdec.loop.lengths import ChosenLengths

            chosen = ChosenLengths(choose, k, is_tree=depth is not None)

        def may_be_last() -> bool:
            most = sum(min(asked, depth or asked) + 1 for _, asked in unread)
            return collector.most_left <= most

        while not collector.is_done:
            if chosen is not None:
                chosen.set(generation, collector.longest)
            outcome, asked = self.step(generation), generation.num_draft_tokens
            unread.append((outcome.fetch(), asked))
            while len(unread) > self.steps_ahead or (unread and may_be_last()):
                read, asked = unread.popleft()
                record = collector.add(read)
                if chosen is not None:
                    chosen.note(record.rows, asked)
                if self.steps_ahead == 0:  # else the rows of those under way have to stay
                    generation.drop_ended()
                longest = collector.longest + (k + 1) * len(unread)
                generation.state.buffer.note_longest(longest)
                yield record
                if collector.is_done:
                    break
        generation.close()


def _ending(streamer: BaseStreamer | None) -> AbstractContextManager[None]:
    from specdec.loop.columns import ending

    return ending(streamer)
