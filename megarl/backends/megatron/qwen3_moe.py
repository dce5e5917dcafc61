"""Qwen3-MoE: Qwen3 with a mixture of experts in every layer, spread over ``layout.ep`` ranks."""

from typing import Any

from megarl.backends.megatron.family import Family, Values, refuse_unless


def _settings(hf: Any) -> dict[str, Any]:
    # Bridge would add the pretraining's balancing loss to the gradient
    return {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}


def _refuse(values: Values) -> None:
    refuse_unless(
        values,
        "Qwen3-MoE",
        hidden_act="silu",
        attention_bias=False,
        use_sliding_window=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


FAMILY = Family(refuse=_refuse, settings=_settings)
