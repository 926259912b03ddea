"""Faults of what users of Hugging Face, of the trainer and of saved files meet first."""

from mutation import Mutant

HABITS = [
    Mutant(
        name="the hook keeps HF's streamer waiting",
        source="an iterator's consumer that waits for ever, seen in a trial",
        file="generator.py",
        old="streamer = call.streamer if streamer is None else streamer",
        new="streamer = streamer",
        caught_by="request/test_hf_habits.py::"
        "test_a_streamer_behind_the_hook_gets_what_hf_would_put[one]",
    ),
    Mutant(
        name="an error leaves the stream open",
        source="an iterator's consumer that waits for ever, seen in a trial",
        file="generator.py",
        old="                streamer.end()\n        raise",
        new="                pass\n        raise",
        caught_by="request/test_hf_habits.py::"
        "test_an_error_ends_the_stream_so_that_nobody_waits[in the middle-native]",
    ),
    Mutant(
        name="all sequences of a prompt share its seed",
        source="transformers' num_return_sequences, seen in a trial",
        file="request/call.py",
        old="return (seed + copy) % 2**64 if is_seed else seed",
        new="return seed",
        caught_by="request/test_hf_habits.py::"
        "test_several_sequences_of_a_prompt_have_a_seed_each[native]",
    ),
    Mutant(
        name="scores of rejected tokens are kept",
        source="transformers' output_scores, seen in a trial",
        file="loop/collector.py",
        old="rows[number].append(table[index, :count].clone())",
        new="rows[number].append(table[index, -count:].clone())",
        caught_by="request/test_hf_habits.py::"
        "test_scores_and_logits_of_emitted_tokens_are_hfs[plain-0]",
    ),
    Mutant(
        name="enumeration fails a rule that it cannot enumerate",
        source="a lossless rule that failed, seen in a trial",
        file="certify/sampler/exact.py",
        old="        if reason is not None:",
        new="        if reason is not None and report.failures:",
        caught_by="certify/test_certify.py::"
        "test_a_lossless_rule_without_thresholds_is_inconclusive_and_certified_by_draws",
    ),
    Mutant(
        name="draws are compared with the draft's law",
        source="a certificate that cannot fail",
        file="certify/sampler/draws.py",
        old="token = torch.where(place <= verdict.num_accepted, emitted, own)",
        new="token = own",
        caught_by="certify/test_certify.py::test_a_lossy_rule_without_thresholds_fails_by_draws",
    ),
    Mutant(
        name="weights that the last update broke are saved",
        source="a head of NaN that was saved, seen in a trial",
        file="training/loop.py",
        old="    if not torch.stack([weight.isfinite().all() for weight in weights]).all():",
        new="    if not weights:",
        caught_by="training/test_training_resume.py::"
        "test_weights_that_the_last_update_broke_are_not_saved[60]",
    ),
    Mutant(
        name="an interrupt breaks a step off",
        source="a run that lost its last minutes, seen in a trial",
        file="training/interruption.py",
        old="        if self._is_immediate or is_second:",
        new="        if True:",
        caught_by="training/test_training_resume.py::test_an_interrupt_saves_the_step_under_way[2]",
    ),
    Mutant(
        name="a speculators file lacks the target's embeddings",
        source="speculators reads them into memory that nobody has written",
        file="checkpoints/eagle_export.py",
        old="        if not config.has_embed_tokens:\n            tensors[",
        new="        if False:\n            tensors[",
        caught_by="checkpoints/test_eagle_export.py::"
        "test_a_speculators_file_holds_embeddings_and_names_its_target[False]",
    ),
    Mutant(
        name="names of tensors reach the terminal as they are",
        source="control characters of a foreign file, seen in a trial",
        file="checkpoints/files.py",
        old="    named = {printable(tensor.name): tensor for tensor in tensors}",
        new="    named = {tensor.name: tensor for tensor in tensors}",
        caught_by="checkpoints/test_checkpoint_safety.py::"
        "test_names_that_differ_in_control_characters_only_are_refused",
    ),
    Mutant(
        name="a model that was compiled in place runs instead of its view",
        source="torch.compile of a module, seen in review",
        file="target/view.py",
        old='            if name == "_compiled_call_impl":',
        new='            if name == "":',
        caught_by="target/test_wrappers.py::test_a_model_compiled_in_place_is_not_run_by_its_view",
    ),
]
