"""Which ids of a model stand for something else than text."""

from transformers import PreTrainedModel


def special_tokens(model: PreTrainedModel) -> set[int]:
    """Ids that stand for something else than text: padding, ends, places of pictures."""
    configs = model.config, model.config.get_text_config()
    values = (
        v for c in configs for n, v in vars(c).items() if n.endswith(("token_id", "token_index"))
    )
    return {
        token
        for value in values
        for token in (value if isinstance(value, list | tuple) else [value])
        if isinstance(token, int)
    }


def placeholders(model: PreTrainedModel) -> tuple[int, ...]:
    """Ids that stand in prompts where pictures and sound are, ascending."""
    names = tuple(f"{kind}_token_{of}" for kind in ("image", "video", "audio") for of in _ID)
    values = {vars(model.config).get(name) for name in names}
    return tuple(sorted(value for value in values if type(value) is int and value >= 0))


_ID = "id", "index"
