"""Serves heads with vLLM and prints what each accepted. Runs in vLLM's environment, without
specdec: jobs come as JSON on standard input, results leave on the last line of standard output.
"""

import gc
import json
import os
import sys

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
COUNTS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "accepted": "vllm:spec_decode_num_accepted_tokens_per_pos",
}


def serve(target, speculative_config, prompts, max_tokens):
    """The greedy tokens of each prompt, and counts of drafts and of accepted tokens by position."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        target,
        speculative_config=speculative_config,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        disable_log_stats=False,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    done = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
    )
    found = {m.name: getattr(m, "values", getattr(m, "value", None)) for m in engine.get_metrics()}
    tokens = [list(output.outputs[0].token_ids) for output in done]
    engine.llm_engine.engine_core.shutdown()
    return {"tokens": tokens} | {name: found.get(key) for name, key in COUNTS.items()}


def main():
    os.environ |= SETTINGS  # before vLLM is imported
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    results = []
    for job in json.load(sys.stdin):
        try:
            results.append(serve(**job))
        except Exception as error:  # what vLLM says of a head is the result
            results.append({"error": f"{type(error).__name__}: {error}"})
        gc.collect()
        cleanup_dist_env_and_memory()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
