"""Laws 11, 12, 14 and 15: kernels, graphs, code of users, checkpoints and training."""

from mutation import Edit, Fault, Swap

_ATTENTION = "kernels/test_kernels_attention.py"
_STEPS = "graphs/test_captured_steps.py"


_RECURRENT = "target/test_recurrent.py::test_greedy_text_is_hfs_whatever_is_rejected"

DEVICES = [
    # Law 11.
    Fault(
        "values beyond a row's length are loaded",
        "flash-attention#1745",
        _ATTENTION,
        Edit(
            "kernels.attention.triton:_attend_kernel",
            "is_slot, 0, padded_value_width",
            "local >= 0, 0, padded_value_width",
        ),
    ),
    Fault(
        "a tile without a visible slot is NaN",
        "pegainfer#21",
        _ATTENTION,
        Edit(
            *(
                "kernels.attention.triton:_attend_kernel",
                "tl.where(new_max == -INFINITY, 0.0, new_max)",
            ),
            "new_max",
        ),
    ),
    Fault(
        *(
            "every row's keys are written into row 0",
            "vllm#14645",
            "kernels/test_kernels_write_slots.py",
        ),
        Edit(
            *(
                "kernels.write_slots.triton:_copy",
                "_start_of(copy.target, row, head, slot)",
            ),
            "_start_of(copy.target, 0, head, slot)",
        ),
    ),
    Fault(
        "a sliding window is one slot too wide",
        "transformers#48280, transformers#46629",
        "target/test_slot_attention.py",
        Edit(
            "target.attention:first_seen",
            "queries - sliding_window + 1",
            "queries - sliding_window",
        ),
    ),
    Fault(
        "a chunk of attention begins with the last position of the one before",
        "a trial of Llama 4",
        "target/test_chunked_attention.py",
        Edit(
            *("target.attention:first_seen", "queries - queries % sliding_window.size"),
            "(queries - queries % sliding_window.size - 1).clamp(min=0)",
        ),
    ),
    Fault(
        "the temperature of queries counts one position less",
        "a trial of Llama 4",
        "target/test_chunked_attention.py",
        Edit("target.attention:_tempered", ".float() + 1.0)", ".float())"),
    ),
    # Law 12.
    Fault(
        "lengths get a new tensor in every step",
        "TensorRT-LLM#17110",
        _STEPS,
        Edit(
            "loop.state:TokenBuffer.commit",
            "self.anchor_position += self.num_new",
            "self.anchor_position = self.anchor_position + self.num_new",
        ),
    ),
    Fault(
        "rows that fill a bucket commit tokens",
        "vllm#43682",
        _STEPS,
        Edit("loop.state:StepState.load", "self.buffer.remaining[num_real:] = 0", "pass"),
    ),
    Fault(
        "a captured function takes inputs of another shape",
        "xLLM-AI/xllm#1939",
        "graphs/test_capture.py",
        Swap("graphs.capture:_check_alike", lambda right: lambda *args: None),
    ),
    Fault(
        "every step waits for the device",
        "xLLM-AI/xllm#1939",
        "loop/test_no_host_sync.py",
        Swap(
            "loop.state:TokenBuffer.note_longest",
            lambda right: lambda self, longest: right(self, int(self.anchor_position.max()) + 1),
        ),
    ),
    # Law 14.
    Fault(
        "stopping criteria are asked at the end of a block",
        "onnxruntime-genai#2528",
        "generator/test_generate_contract.py",
        Edit(
            "loop.host:OutputCollector._ask_criteria",
            "column + 1)",
            "len(self.new_tokens[row]))",
        ),
    ),
    Fault(
        "processors see one committed token of each step",
        "sglang#33643",
        "request/test_rows_alone.py",
        Edit(
            "loop.processors:process_step",
            "tokens[start:end]",
            "tokens[start:end][:1] * (end - start)",
        ),
    ),
    Fault(
        "rows see the padding of their batch",
        "a review of this project",
        "request/test_rows_alone.py",
        Edit(
            *(
                "request.call:Request.shown_prompts",
                "self.prompts.alone() if self.is_alone else [self.prompts.padded]",
            ),
            "[self.prompts.padded]",
        ),
    ),
    Fault(
        "NaN logits are emitted",
        "sglang#27883",
        "target/test_bad_models.py",
        Swap(
            "kernels.verify.reference:find_target_faults",
            lambda right: lambda logits, count: 0 * count,
        ),
    ),
    Fault(
        "a model itself is switched to specdec's attention",
        "hooks that stay",
        "target/test_views.py",
        Swap("target.view:private_view", lambda right: lambda model: model),
    ),
    # Law 15.
    Fault(
        "d2t is read as absolute ids",
        "verl-SpeCo#67, SpecForge#534",
        "checkpoints/test_eagle_checkpoints.py",
        Edit("checkpoints.vocab_map:read_vocab_map", "own + d2t.long()", "d2t.long()"),
    ),
    Fault(
        "the raw state is passed on where a normalised one was trained",
        "vllm#47448",
        "drafters/test_mtp_hf.py",
        Swap("heads.mtp:MTPHead.feedback", lambda right: lambda self, depth, out: out),
    ),
    Fault(
        "norms of modules multiply by 1 + weight, whatever the target's do",
        "jundot/omlx#1507",
        "drafters/test_mtp_hf.py",
        Swap("checkpoints.hf_layers:has_centred_norms", lambda right: lambda model: True),
    ),
    Fault(
        "norms of modules multiply by the weight where it is stored without the 1",
        "jundot/omlx#3750",
        "drafters/test_mtp_qwen.py",
        Swap("checkpoints.hf_layers:has_centred_norms", lambda right: lambda model: False),
    ),
    Fault(
        "layers of a tower of images are taken for the decoder's",
        "a trial of prediction modules",
        "drafters/test_mtp_qwen.py",
        Edit(
            "target.features:decoder_layers",
            'getattr(model.base_model, "language_model", model.base_model)',
            "model.base_model",
        ),
    ),
    Fault(
        "DFlash's rows predict the next token",
        "deepseek-ai/DeepSpec",
        "drafters/test_mask_token_foreign.py",
        Swap(
            "heads.mask_token:MaskTokenConfig.rows",
            lambda right: (
                lambda self: (
                    right(self)._replace(first_row=right(self).first_row - 1)
                    if self.alignment == "same-position"
                    else right(self)
                )
            ),
        ),
    ),
    Fault(
        "recurrent state is a token ahead of what was kept",
        "a trial of recurrent targets",
        _RECURRENT,
        Edit("target.memory:Memory.open", "minimum(self.count))", "minimum(self.count) + 1)"),
    ),
    Fault(
        "recurrent layers read what another row kept",
        "a trial of recurrent targets",
        _RECURRENT,
        Edit(
            "target.memory:Line.__init__",
            "(order < behind, order",
            "(order < behind.flip(0), order",
        ),
    ),
]
