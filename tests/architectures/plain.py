"""Describe models with full causal attention, and separate K and V in every layer."""

from __future__ import annotations

from tests.architectures.description import Architecture, model
from tests.architectures.groups import (
    GRANITE,
    MOE,
    MULTIMODAL_ROPE,
    SHARED_EXPERT,
    SHARED_LENGTH,
    SIGMOID_ROUTER,
)

PLAIN: tuple[Architecture, ...] = (
    # The first three have multi-head, grouped-query and multi-query attention; head sizes are
    # common ones.
    model("llama", (4, 4, 32), name="llama-mha"),
    model("llama", (4, 2, 64), name="llama-gqa"),
    model("llama", (4, 1, 128), name="llama-mqa"),
    model("llama", (6, 2, 80), name="llama-80"),
    model("llama", (3, 1, 96), name="llama-96"),
    model("llama", (4, 2, 20), name="llama-20"),
    model("llama", (4, 2, 32), MOE, name="llama-moe"),
    model(
        "apertus",
        (4, 2, 32),
        {"xielu.alpha_n": 1.0, "xielu.alpha_p": 1.0, "xielu.beta": 1.0, "xielu.eps": 1e-7},
    ),
    model("arcee", (4, 2, 32)),
    model("arctic", (4, 2), MOE),
    model("baichuan", (4, 2)),
    model("bailingmoe", (4, 2, 32), MOE | SHARED_EXPERT),
    model("bailingmoe2", (4, 2), MOE | SHARED_EXPERT | SIGMOID_ROUTER),
    model("bitnet", (4, 2)),
    model("chatglm", (4, 2), {"rope.dimension_count": 8}),
    model("codeshell", (4, 2)),
    model("cogvlm", (4, 4)),
    model("command-r", (4, 2), {"logit_scale": 0.5}),
    model("dbrx", (4, 2), MOE | {"attention.clamp_kqv": 4.0}),
    model("deci", ((4, 2, 4, 8), (2, 1, 4, 2), 32)),  # Numbers of heads differ between layers.
    model("deepseek", (4, 2), MOE | SHARED_EXPERT),
    model("deepseek2-ocr", (4, 4), MOE | SHARED_EXPERT),
    model("dots1", (4, 4, 32), MOE | SHARED_EXPERT | SIGMOID_ROUTER),
    model("ernie4_5", (4, 2, 32)),
    model(
        "ernie4_5-moe",
        (4, 2, 32),
        MOE | SHARED_EXPERT | SHARED_LENGTH | {"interleave_moe_layer_step": 2},
    ),
    model("exaone", (4, 2, 32)),
    model("exaone4", (4, 2)),
    model("falcon", (4, 1), width=128),
    model("gemma", (2, 1, 256)),
    model("glm4", (4, 2, 32), {"rope.dimension_count": 16}),
    model("glm4moe", (4, 2, 32), MOE | SHARED_EXPERT | {"rope.dimension_count": 16}),
    model("gpt2", (4, 4)),
    model("gptneox", (4, 4), {"use_parallel_residual": True, "rope.dimension_count": 8}),
    model("granite", (4, 2, 32), GRANITE),
    model("granitemoe", (4, 2, 32), MOE | SHARED_LENGTH | GRANITE),
    model(
        "graniteswitch",
        (4, 2, 32),
        GRANITE
        | {
            "adapters.count": 1,
            "adapters.lora_rank": 4,
            "adapters.token_ids_activate": (5,),
            "adapters.token_ids_substitute": (6,),
        },
    ),
    model("grovemoe", (4, 2, 32), MOE | {"expert_group_scale": 1.0, "experts_per_group": 1}),
    # This model has two stacks of one layer each, which are run six times.
    model(
        "hrm_text",
        (4, 2, 32),
        {"hrm.layers_per_stack": 1, "hrm.h_cycles": 2, "hrm.l_cycles": 2},
        layers=6,
    ),
    model("hunyuan-dense", (4, 2, 32)),  # Its keys are normed after RoPE.
    model("hunyuan-moe", (4, 2, 32), MOE | SHARED_LENGTH),
    model("hunyuan_vl", (4, 2, 32), MULTIMODAL_ROPE),
    model("hy_v3", (4, 2, 32), MOE | SIGMOID_ROUTER),
    model("internlm2", (4, 2)),
    model("jais2", (4, 4, 32)),
    model("maincoder", (4, 2, 32)),
    model(
        "minicpm", (4, 2, 32), {"logit_scale": 1.0, "residual_scale": 0.7, "embedding_scale": 4.0}
    ),
    # K and V of all heads come from one compressed row, but are cached separately.
    model(
        "minicpm3",
        (4, 4, 32),
        {"attention.q_lora_rank": 32, "attention.kv_lora_rank": 32, "rope.dimension_count": 16},
    ),
    model("minimax-m2", (4, 2, 32), MOE | SIGMOID_ROUTER),
    model("mistral3", (4, 1, 128)),
    model("nanbeige", (4, 2, 32)),
    model("nemotron", (4, 2), {"rope.dimension_count": 8}),
    model("olmo", (4, 2), {"attention.clamp_kqv": 4.0}),
    model("olmo2", (4, 2)),
    model("olmoe", (4, 4), MOE),
    model("openelm", ((4, 2, 4, 8), (2, 1, 4, 2), 32)),  # Numbers of heads differ between layers.
    model("orion", (4, 2)),
    model("paddleocr", (4, 2, 32), {"rope.dimension_sections": (4, 4, 4, 4)}),
    model("pangu-embedded", (4, 2, 32)),
    model("phi2", (2, 2), {"rope.dimension_count": 32}, width=160),  # Its heads have 80 values.
    model("phi3", (2, 1), width=192, layers=2),  # Its heads have 96 values.
    model("phimoe", (4, 2), MOE),
    model("plamo", (4, 2)),
    model("pockettts", (4, 4)),
    model("qwen", (4, 4)),
    model("qwen2", (7, 1), width=112),
    model("qwen2moe", (4, 2), MOE | SHARED_LENGTH),
    model("qwen2vl", (4, 2), {"rope.dimension_sections": (2, 3, 3, 0)}),
    model("qwen3", (4, 2, 128)),
    model("qwen3moe", (8, 1, 64), MOE),
    model("qwen3tts", (4, 2, 32), MULTIMODAL_ROPE, n_vocab=3072),
    model("qwen3vl", (4, 2, 32), MULTIMODAL_ROPE),
    model("qwen3vlmoe", (4, 2, 32), MOE | MULTIMODAL_ROPE),
    model("seed_oss", (4, 2, 32)),
    model("smallthinker", (4, 2, 32), MOE | SIGMOID_ROUTER, name="smallthinker-full"),
    model("smollm3", (4, 2, 32)),  # Every fourth layer has no RoPE.
    model("stablelm", (4, 4), {"rope.dimension_count": 4, "use_parallel_residual": True}),
    model("starcoder", (4, 1)),
    model("starcoder2", (4, 2)),
    model("talkie", (4, 4, 32), {"logit_scale": 1.0}),
    model("xverse", (4, 4)),
)
