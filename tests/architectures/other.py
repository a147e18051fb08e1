"""Describe models with recurrent layers, latent, sparse or unfused attention, ALiBi or no cache."""

from __future__ import annotations

from tests.architectures.description import Architecture, model
from tests.architectures.groups import (
    DELTA_NET,
    GRANITE,
    HYPER_CONNECTIONS,
    INDEXER,
    KIMI_DELTA,
    LATENT,
    MAMBA,
    MAMBA_2,
    MOE,
    MULTIMODAL_ROPE,
    RWKV_6,
    RWKV_7,
    SHARED_EXPERT,
    SHARED_LENGTH,
    SIGMOID_ROUTER,
    WINDOW_LAYERS,
    latent,
)

EVERY_SECOND = (4, 0, 4, 0)  # Numbers of query heads by layer; recurrent layers have none.

# Some layers attend, the others carry a state.
HYBRID: tuple[Architecture, ...] = (
    model("falcon-h1", (4, 2, 32), MAMBA_2),  # Every layer attends and carries a state.
    model("granitehybrid", (EVERY_SECOND, (2, 0, 2, 0), 32), MAMBA_2 | GRANITE),
    model("jamba", (EVERY_SECOND, (2, 0, 2, 0)), MAMBA),
    model("lfm2", (EVERY_SECOND, (2, 0, 2, 0)), {"shortconv.l_cache": 3}),
    model(
        "lfm2",
        (EVERY_SECOND, (2, 0, 2, 0)),
        {"shortconv.l_cache": 3, "attention.sliding_window": 32},
        name="lfm2-window",
    ),
    model(
        "lfm2moe",
        (EVERY_SECOND, (2, 0, 2, 0)),
        MOE | SIGMOID_ROUTER | {"shortconv.l_cache": 3, "leading_dense_block_count": 1},
    ),
    model("minimax-01", (4, 2, 32), MOE | {"full_attention_interval": 2, "residual_scale": 0.7}),
    model(
        "nemotron_h",
        (4, (0, 2, 0, 2, 0, 0), 32),
        MAMBA_2 | {"feed_forward_length": (0, 0, 64, 0, 0, 64)},
        layers=6,
    ),
    model(
        "nemotron_h_moe",
        (4, (0, 2, 0, 2, 0, 0), 32),
        MOE | SHARED_LENGTH | MAMBA_2 | {"feed_forward_length": (0, 0, 64, 0, 0, 64)},
        layers=6,
    ),
    model(
        "plamo2", (EVERY_SECOND, (2, 0, 2, 0), 32), MAMBA | {"ssm.group_count": 0}, rounding=1e-2
    ),
    model("qwen35", (4, 2, 32), DELTA_NET | MULTIMODAL_ROPE),
    model("qwen35moe", (4, 2, 32), MOE | SHARED_LENGTH | DELTA_NET | MULTIMODAL_ROPE),
    model("qwen3next", (4, 2, 32), MOE | SHARED_LENGTH | DELTA_NET),
)

RECURRENT: tuple[Architecture, ...] = (
    model("arwkv7", (1, 1), RWKV_7 | {"token_shift_count": 1}),
    model("mamba", (4, 4), MAMBA),
    model("mamba2", (4, 4), MAMBA_2),
    model("rwkv6", (1, 1), RWKV_6 | {"rescale_every_n_layers": 2}),
    model("rwkv6qwen2", (1, 1), RWKV_6 | {"token_shift_count": 1}, without=("*time_mix_first*",)),
    model("rwkv7", (1, 1), RWKV_7),
)

# V is a view of K, which all query heads share.
LATENT_ATTENTION: tuple[Architecture, ...] = (
    model("deepseek2", (4, 1), MOE | SHARED_EXPERT | SIGMOID_ROUTER | LATENT),
    model(
        "deepseek2",
        (2, 1),
        MOE | SHARED_EXPERT | SIGMOID_ROUTER | latent(512, 64),
        name="deepseek2-576",
        layers=2,
    ),
    model("mistral4", (4, 1), MOE | SHARED_EXPERT | LATENT),
)

# Some layers have latent attention, the others are recurrent.
LATENT_HYBRID: tuple[Architecture, ...] = (
    model(
        "bailingmoe3",
        ((2, 0, 2, 0), (1, 0, 1, 0)),
        MOE
        | SHARED_EXPERT
        | SIGMOID_ROUTER
        | LATENT
        | KIMI_DELTA
        | {"rope.dimension_sections": (2, 3, 3, 0)},
    ),
    model(
        "kimi-k3",
        ((2, 0, 2, 0), (1, 0, 1, 0)),
        MOE
        | SHARED_EXPERT
        | SIGMOID_ROUTER
        | LATENT
        | KIMI_DELTA
        | {
            "expert_latent_length": 64,
            "attn_res.block_size": 12,
            "activation.situ_beta": 4.0,
            "activation.situ_linear_beta": 25.0,
        },
        rounding=1e-2,
    ),
    model(
        "kimi-linear",
        ((2, 0, 2, 0), (1, 0, 1, 0)),
        MOE | SHARED_EXPERT | SIGMOID_ROUTER | LATENT | KIMI_DELTA,
    ),
)

# Attention logits fall linearly with the distance.
ALIBI: tuple[Architecture, ...] = (
    model("bloom", (4, 4)),
    model("jais", (4, 4), {"attention.max_alibi_bias": 8.0}),
    model("mpt", (4, 4), {"attention.max_alibi_bias": 8.0}),
    model("refact", (6, 1, 32)),
)

# The graph computes which positions are attended to, or what they are compressed to.
SPARSE: tuple[Architecture, ...] = (
    model("deepseek32", (4, 1), MOE | SHARED_EXPERT | SIGMOID_ROUTER | LATENT | INDEXER),
    model(
        "deepseek4",
        (8, 1, 64),
        MOE
        | SHARED_EXPERT
        | INDEXER
        | HYPER_CONNECTIONS
        | {
            "attention.q_lora_rank": 64,
            "attention.sliding_window": 32,
            "attention.output_group_count": 8,
            "attention.output_lora_rank": 32,
            "attention.compress_ratios": (0, 0, 4, 128),
            "attention.compress_rope_freq_base": 160000.0,
            "rope.dimension_count": 32,
            "hash_layer_count": 0,
            "swiglu_clamp_exp": 10.0,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": True,
            "expert_gating_func": 4,
        },
        width=128,
    ),
    model(
        "dots3note",
        (4, 1),
        MOE
        | SHARED_EXPERT
        | SIGMOID_ROUTER
        | LATENT
        | INDEXER
        | WINDOW_LAYERS
        | {
            "attention.kv_lora_rank_swa": 64,
            "attention.key_length_swa": 80,
            "attention.value_length_swa": 64,
            "attention.key_length_mla_swa": 32,
            "attention.value_length_mla_swa": 16,
            "attention.indexer.types": (1, 0, 1, 0),
            "rope.freq_base_swa": 10000.0,
        },
    ),
    model("glm-dsa", (4, 1), MOE | SHARED_EXPERT | SIGMOID_ROUTER | LATENT | INDEXER),
    model(
        "glm5-next",
        (2, (1, 0, 1, 0)),
        MOE
        | SHARED_EXPERT
        | LATENT
        | KIMI_DELTA
        | INDEXER
        | HYPER_CONNECTIONS
        | {
            "attention.key_length": 64,
            "attention.indexer.kpool": 4,
            "attention.indexer.kpool_select_tail": True,
            "rope.dimension_count": 0,
        },
    ),
    model(
        "hy_v4",
        (4, 1),
        MOE
        | SHARED_EXPERT
        | SIGMOID_ROUTER
        | LATENT
        | INDEXER
        | HYPER_CONNECTIONS
        | {
            "hyper_connection.magnitude": 2.0,
            "swiglu_clamp_exp": 10.0,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": True,
            "attention.indexer.types": (1, 0, 1, 0),
        },
    ),
    model(
        "minimax-m3",
        (4, 2, 32),
        MOE
        | SHARED_EXPERT
        | SIGMOID_ROUTER
        | INDEXER
        | {
            "attention.indexer.head_count": 2,
            "attention.indexer.block_size": 4,
            "attention.indexer.local_blocks": 1,
            "rope.dimension_count": 32,
        },
    ),
    model(
        "qwen4exp",
        (4, 2, 32),
        MOE
        | SHARED_LENGTH
        | DELTA_NET
        | MULTIMODAL_ROPE
        | INDEXER
        | HYPER_CONNECTIONS
        | {
            "attention.compress_ratios": (4, 4, 4, 4),
            "attention.indexer.key_length": 32,
            "ple.layers": (0,),
            "ple.ngram_size": 3,
            "ple.heads_per_ngram": 2,
            "ple.conv_kernel": 4,
            "ple.eos_token_id": 0,
            "ple.layer_multipliers": (1, 3, 5),
            "ple.head_offsets": (0, 320, 640, 960),
            "ple.head_vocab_sizes": (320, 320, 320, 320),
            "embedding_length_per_layer_input": 16,
        },
    ),
)

# Attention consists of separate nodes, even with flash attention enabled.
UNFUSED: tuple[Architecture, ...] = (
    model("grok", (4, 2), MOE | {"logit_scale": 1.0, "embedding_scale": 4.0}),
)

# Every position attends to every other one of its micro-batch, and nothing is cached.
DIFFUSION: tuple[Architecture, ...] = (
    model("dream", (4, 2)),
    model("llada", (4, 2, 32)),
    model("llada-moe", (4, 2), MOE),
    model("rnd1", (4, 2, 32), MOE),
)
