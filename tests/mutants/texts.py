"""Laws 7, 9, 10 and 13, and where texts end: what is read, kept and committed."""

from dataclasses import replace

from mutation import Edit, Fault, Swap

_LAWS = "drafters/test_laws.py::{}".format
_NEVER = _LAWS("test_a_drafter_that_is_always_right_is_never_rejected")
_FRESH = _LAWS("test_a_state_built_up_by_drafts_of_any_lengths_proposes_what_a_fresh_one_would")
_POISON = _LAWS("test_what_must_not_be_read_changes_nothing")
_ATTENTION = "target/test_slot_attention.py::{}".format
_CONTRACT = "generator/test_generate_contract.py"
_CACHE = "target/test_slot_cache.py::TestCacheAgainstLists"
_MASKS = "drafters/test_parity.py"
_COMMIT = "loop.state:TokenBuffer.commit"


def _rolled(name, shift):
    """A context whose tokens or features are one column late."""

    def faulty(right):
        def context(self):
            found = right(self)
            table = getattr(found, name)
            return found if table is None else replace(found, **{name: table.roll(shift, dims=1)})

        return context

    return faulty


def _keeps_values_in_order(right):
    def keep(self, rows):
        kept, other = right(self, rows), right(self, sorted(rows, reverse=True))
        kept.values = other.values
        return kept

    return keep


TEXTS = [
    # Law 7.
    Fault(
        "features are those of the position before",
        "mlc-llm#2664",
        _NEVER,
        Swap("loop.state:StepState.context", _rolled("features", 1)),
    ),
    Fault(
        "the token before the bonus token is drafted after",
        "vllm#4212, vllm#5765",
        _NEVER,
        Swap(
            "heads.window:ContextRows.last",
            lambda right: lambda self, out: right(replace(self, counts=self.counts - 1), out),
        ),
    ),
    Fault(
        "a step without draft tokens reads nothing",
        "a trial of draft lengths 4, 0",
        _LAWS("test_steps_without_a_draft_that_are_replayed_read_what_was_committed"),
        Edit("loop.step:propose", "if most > 0", "if num_draft_tokens > 0"),
    ),
    # Law 9.
    Fault(
        "the draft model skips the token before the bonus token",
        "vllm#4212",
        _FRESH,
        Edit("drafters.model:ModelDrafter.propose", "state.offsets", "state.offsets[1:].expand(2)"),
    ),
    Fault(
        "a recurrent draft model reads the last token but one twice",
        "a trial of recurrent draft models",
        "drafters/test_recurrent_drafter.py",
        Edit("drafters.model:ModelDrafter._read", "(not self._slot_model.is_recurrent)", "1"),
    ),
    Fault(
        "draft tokens lie one slot behind their positions",
        "lablup/mlxcel#994",
        "drafters/test_parity.py",
        Edit("heads.window:read_context", "context.start + counts", "context.start + counts + 1"),
    ),
    Fault(
        "later passes are fed the hidden state of the first",
        "vllm#36531",
        "drafters/test_parity.py",
        Edit(
            "drafters.eagle:EagleDrafter.propose",
            "self.head.feedback(out)",
            "hidden if i > 1 else self.head.feedback(out)",
        ),
    ),
    Fault(
        "the normalised state is fed to the next pass",
        "ROCm/ATOM#882",
        "drafters/test_parity.py",
        Swap(
            "heads.eagle:EagleHead.feedback",
            lambda right: lambda self, out: self.norm(out) if self.config.output_norm else out,
        ),
    ),
    Fault(
        "rows of a block see only what precedes them",
        "vllm's DFlash",
        _MASKS,
        Edit(
            "drafters.mask_token:MaskTokenDrafter._read",
            "if not config.is_causal:",
            "if False:",
        ),
    ),
    Fault(
        "stale entries of later depths are never computed again",
        "vllm#33561",
        "drafters/test_mtp_repair.py",
        Edit("heads.shift_window:shift_window", "index >= -num_past", "index >= 0"),
    ),
    Fault(
        "depths trained as a chain read the target's state",
        "sgl-project/sglang-jax#1256",
        "drafters/test_mtp_repair.py",
        Edit("drafters.mtp:MTPDrafter._run_depths", '== "chain"', '== "none"'),
    ),
    Fault(
        "lookup does not remember the last committed token",
        "vllm#4212",
        "drafters/test_ngrams.py",
        Edit(
            "drafters.lookup:PromptLookupDrafter.prefill", "offsets <= context", "offsets < context"
        ),
    ),
    Fault(
        "a remembered text goes on into the next one",
        "vllm#25784",
        "drafters/test_ngrams.py",
        Edit("drafters.suffix:SuffixDrafter._in_memory", "(tokens >= 0)", "(tokens >= PAD_TOKEN)"),
    ),
    Fault(
        "a row that takes an n-gram keeps the probabilities of the head",
        "vllm#24344",
        "drafters/test_joined_drafters.py",
        Edit("drafters.join:_first_of", "torch.where(has_any[:, None, None], *pair)", "like"),
    ),
    Fault(
        "a head does not read the prompt beside n-grams",
        "vllm#24344",
        "drafters/test_joined_drafters.py",
        Edit(
            "drafters.join:FirstMatch.prefill",
            "self.drafters, state.parts,",
            "self.drafters[:1], state.parts[:1],",
        ),
    ),
    # Law 10.
    Fault(
        "a cache that is used again keeps its old entries",
        "vllm#41841",
        _CACHE,
        Swap("target.cache:SlotCache.reset", lambda right: lambda self: None),
    ),
    Fault(
        "rows that are kept get the values of other rows",
        "vllm#14645",
        _CACHE,
        Swap("target.cache:SlotCache.keep", _keeps_values_in_order),
    ),
    Fault(
        *(
            "all rows advance as the slowest one",
            "arXiv 2510.22876",
            "loop/test_generation_machine.py",
        ),
        Edit(
            _COMMIT,
            "self.anchor_position += self.num_new",
            "self.anchor_position += self.num_new.amin()",
        ),
    ),
    Fault(
        "a row that is dropped leaves the wrong row behind",
        "vllm#14645, sglang#8726",
        "loop/test_generation_machine.py",
        Swap(
            "loop.state:TokenBuffer.keep",
            lambda right: lambda self, rows: right(self, list(range(len(rows)))),
        ),
    ),
    # Law 13.
    Fault(
        "a token sees the slot behind its own",
        "transformers#48280",
        _ATTENTION("test_garbage_in_slots_that_nobody_sees_changes_nothing_bit_for_bit"),
        Edit("target.attention:sees", "keys <= queries", "keys <= queries + 1"),
    ),
    Fault(
        "lookup matches stale tokens behind a row's end",
        "vllm#46899",
        _POISON,
        Edit(
            "drafters.lookup:PromptLookupDrafter._scores",
            "(length - 1 - ends)",
            "(text.shape[1] - 1 - ends).expand(text.shape)",
        ),
    ),
    Fault(
        *(
            "rows of rejected tokens are written",
            "vllm#26498",
            "heads/test_mask_window.py",
        ),
        Edit(
            "heads.mask_window:expand_window",
            "columns < counts[:, None]",
            "columns < committed.shape[1] + 0 * counts[:, None]",
        ),
    ),
    # The end of a text.
    Fault(
        "the length limit does not cut a block",
        "SafeAILab/EAGLE",
        _CONTRACT,
        Edit(
            _COMMIT,
            "torch.minimum(num_accepted + 1, self.remaining)",
            "(num_accepted + 1) * (self.remaining > 0)",
        ),
    ),
    Fault(
        "tokens behind an end of sequence are kept",
        "transformers#47912",
        _CONTRACT,
        Edit(
            _COMMIT,
            "torch.minimum(num_kept, first_end + 1, out",
            "torch.minimum(num_kept, num_kept, out",
        ),
    ),
    Fault(
        "a row that has ended goes on",
        "LostRuins/koboldcpp#1276",
        _CONTRACT,
        Edit(_COMMIT, "self.remaining.masked_fill_(is_eos, 0)", "pass"),
    ),
]
