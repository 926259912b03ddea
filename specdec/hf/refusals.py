"""Types of models that are not supported, and why."""

from transformers import PreTrainedModel

_ONE_LENGTH = (
    "its decoder counts positions from one length of all rows, and takes no position_ids; load it "
    "with its encoder (AutoModelForSpeechSeq2Seq, AutoModelForSeq2SeqLM)"
)
_FROM_IDS = (
    "it counts positions from the padding ids in one call, so that they depend on how a text is cut"
)
_OWN_CACHE = "its state lives outside of HF's cache, which specdec puts its slots in the place of"
_FROM_OFFSET = (
    "its biases and the temperature of its queries count positions from the offset of HF's cache, "
    "one for all rows"
)
_ON_HOST = (
    "its indexer goes through the queries one by one on the host, with positions that it keeps in "
    "a layer of HF's cache"
)
CAUSES = {
    "git": "its attention adds a mask of its own, which it makes from the tokens of one call",
    "roformer": "it rotates by positions from one length of all rows, and takes no position_ids",
    **dict.fromkeys(("bart", "mbart", "marian", "pegasus", "plbart", "mvp", "trocr"), _ONE_LENGTH),
    **dict.fromkeys(("bigbird_pegasus", "blenderbot", "blenderbot-small", "whisper"), _ONE_LENGTH),
    **dict.fromkeys(("roberta", "roberta-prelayernorm", "camembert", "xlm-roberta"), _FROM_IDS),
    **dict.fromkeys(("xlm-roberta-xl", "xmod", "data2vec-text"), _FROM_IDS),
    "cpmant": "it puts learned tokens before the text, and reads the whole text in every call",
    "doge": "layers choose keys by their values, and add that mask to one of a sliding window",
    **dict.fromkeys(
        ("minimax", "recurrent_gemma", "rwkv", "xlnet", "reformer", "xlstm"), _OWN_CACHE
    ),
    "musicgen": "its tokens are of four codebooks, not single ids",
    "musicgen_melody": "its tokens are of four codebooks, not single ids",
    "prophetnet": "it reads one token in a call with a cache",
    "xlm": "it reads the whole text in every call",
    **dict.fromkeys(("inkling_text", "inkling_mm_model", "inkling2_text"), _FROM_OFFSET),
    **dict.fromkeys(("inkling2", "inkling2_loop", "inkling2_loop_text"), _FROM_OFFSET),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), _ON_HOST),
    "blt": "it cuts bytes into patches whose number depends on the text",
    "zaya": "its layers keep keys and values and a recurrent state beside them",
}
"""Model types that are not supported: why, as their modelling files show (transformers 5.24)."""


def cause_of_refusal(model: PreTrainedModel) -> str:
    """Why a model of this type cannot be decoded, for messages; empty if it is not known."""
    if hasattr(model, "reads_source"):  # these are of decoders alone
        return ""
    kinds = {model.config.model_type, model.config.get_text_config().model_type}
    return next((f": {CAUSES[kind]}" for kind in sorted(kinds & CAUSES.keys())), "")


def cause_of_difference(model: PreTrainedModel) -> str:
    """Why HF's forward of a whole text and its steps differ, for messages; empty if it is not
    known.
    """
    limits = {getattr(module, "time_step_limit", None) for module in model.modules()}
    if limits <= {None, (0.0, float("inf"))}:
        return ""
    return (
        ". HF differs from itself: its scan over several tokens clamps time steps at "
        f"time_step_limit, {sorted(limits - {None})[0]}, and its step of one token does not. With "
        "time_step_limit = (0.0, float('inf')) in each mixer neither does"
    )
