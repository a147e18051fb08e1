"""Define groups of metadata that several architectures require."""

from __future__ import annotations

from tests.architectures.description import Value

Group = dict[str, Value]

# All experts are used, because the choice of a router could depend on rounding.
MOE: Group = {"expert_count": 2, "expert_used_count": 2, "expert_feed_forward_length": 32}
SHARED_EXPERT: Group = {"expert_shared_count": 1, "leading_dense_block_count": 1}
SHARED_LENGTH: Group = {"expert_shared_feed_forward_length": 32}
SIGMOID_ROUTER: Group = {"expert_gating_func": 2}
GRANITE: Group = {
    "logit_scale": 1.0,
    "residual_scale": 0.7,
    "embedding_scale": 4.0,
    "attention.scale": 0.25,
}
MULTIMODAL_ROPE: Group = {"rope.dimension_sections": (4, 4, 4, 4)}

# Two of four layers have a window of 32: either the first and third, or the second and fourth.
WINDOW: Group = {"attention.sliding_window": 32, "attention.sliding_window_pattern": 2}
WINDOW_LAYERS: Group = {
    "attention.sliding_window": 32,
    "attention.sliding_window_pattern": (0, 1, 0, 1),
}

MAMBA: Group = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
}
MAMBA_2: Group = {**MAMBA, "ssm.group_count": 2}
DELTA_NET: Group = {**MAMBA_2, "ssm.inner_size": 64, "full_attention_interval": 2}
KIMI_DELTA: Group = {"ssm.conv_kernel": 4, "kda.head_dim": 32, "kda.gate_lower_bound": -5.0}
RWKV_6: Group = {"time_mix_extra_dim": 16, "time_decay_extra_dim": 32, "wkv.head_size": 64}
RWKV_7: Group = {
    "wkv.head_size": 64,
    "attention.decay_lora_rank": 16,
    "attention.iclr_lora_rank": 16,
    "attention.value_residual_mix_lora_rank": 16,
    "attention.gate_lora_rank": 16,
}


def latent(rank: int, rope: int) -> Group:
    """Return metadata of latent attention: K has `rank` + `rope` values, V its first `rank`."""
    return {
        "attention.q_lora_rank": 32,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": 16 + rope,
        "attention.value_length_mla": 16,
        "rope.dimension_count": rope,
    }


LATENT = latent(64, 16)
INDEXER: Group = {
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 131072,
}
HYPER_CONNECTIONS: Group = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
    "hyper_connection.low_rank": 8,
}
