"""A model's shape, as its config.json tells, against what a run asks of it."""

import json
from pathlib import Path

from megarl.settings import AgentConfig


def check_model(key: str, agent: AgentConfig, longest: int) -> None:
    """Refuse a layout or lengths that the model's own shape cannot take, where its config.json is at hand."""
    file = Path(agent.model) / "config.json"
    if not file.is_file():
        return  # a hub name: the backend checks it once it is loaded
    try:
        model = json.loads(file.read_text(encoding="utf-8"))
        model = model.get("text_config", model)
        heads, layers = int(model["num_attention_heads"]), int(model["num_hidden_layers"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{key}.model={agent.model}: {file} does not describe a language model ({error!r})") from error
    groups, wide = model.get("num_key_value_heads", heads), model.get("intermediate_size", 0)
    for field, tp in (("layout.tp", agent.layout.tp), ("engine.tp", agent.engine.tp)):
        if heads % tp or wide % tp:
            part, size = ("num_attention_heads", heads) if heads % tp else ("intermediate_size", wide)
            raise ValueError(f"{key}.{field}={tp} does not divide {part}={size} of {agent.model}")
        if groups % tp and tp % groups:
            raise ValueError(
                f"{key}.{field}={tp} and num_key_value_heads={groups} of {agent.model}: one must divide the other"
            )
    if agent.layout.pp > layers:
        raise ValueError(f"{key}.layout.pp={agent.layout.pp} stages, but {agent.model} has num_hidden_layers={layers}")
    positions = model.get("max_position_embeddings")
    if positions is not None and longest > positions:
        raise ValueError(
            f"{key}: a sequence may have {longest} tokens (prompt + response), but {agent.model} has "
            f"max_position_embeddings={positions}: lower data.max_prompt_tokens or max_tokens"
        )
