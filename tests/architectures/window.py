"""Describe models whose layers attend to a window, or to the K and V of an earlier layer."""

from __future__ import annotations

from tests.architectures.description import Architecture, model
from tests.architectures.groups import (
    GRANITE,
    MOE,
    SHARED_EXPERT,
    SIGMOID_ROUTER,
    WINDOW,
    WINDOW_LAYERS,
)

WINDOWED: tuple[Architecture, ...] = (
    model("afmoe", (4, 2, 32), MOE | SHARED_EXPERT | WINDOW),
    model("cohere2", (4, 2), WINDOW | {"logit_scale": 0.5}),
    model("cohere2moe", (4, 2, 32), MOE | SHARED_EXPERT | WINDOW_LAYERS | {"logit_scale": 0.5}),
    model("exaone-moe", (4, 2, 32), MOE | SHARED_EXPERT | SIGMOID_ROUTER | WINDOW),
    model("gemma2", (4, 2, 64), WINDOW),  # It caps attention logits.
    model("gemma3", (2, 1, 96), WINDOW),
    model("gpt-oss", (8, 1, 64), MOE | WINDOW),  # It has attention sinks.
    model("granite_swa", (4, 2, 32), GRANITE | WINDOW_LAYERS),
    # Numbers of heads differ between layers.
    model("laguna", ((8, 4, 8, 4), 2, 32), MOE | SHARED_EXPERT | SIGMOID_ROUTER | WINDOW),
    # Windows are chunks of 8192 positions, which do not slide.
    model(
        "llama4",
        (4, 2, 32),
        MOE | {"interleave_moe_layer_step": 2, "attention.sliding_window_pattern": 2},
    ),
    model("maple", (4, 2, 32), MOE | WINDOW_LAYERS | {"swiglu_clamp_exp": 7.0}),
    model("mellum", (4, 2, 32), MOE | WINDOW),
    # KV heads and sinks differ between windowed and full layers; K is wider than V.
    model(
        "mimo2",
        (4, (1, 2, 1, 2), 48),
        MOE
        | SIGMOID_ROUTER
        | WINDOW_LAYERS
        | {"attention.value_length": 32, "rope.dimension_count": 16, "rope.freq_base_swa": 5000.0},
    ),
    model("muse-glimmer", (4, 2, 32), WINDOW_LAYERS | {"logit_scale": 1.0}),
    model("olmo2", (4, 2), WINDOW, name="olmo3"),
    model("plamo3", (4, 2, 32), WINDOW),
    # The window is 4096, whatever the file says.
    model("smallthinker", (4, 2, 32), MOE | SIGMOID_ROUTER | WINDOW),
    model("spark2_5", (4, 2, 32), WINDOW_LAYERS),
    model("step35", ((4, 8, 4, 8), 2, 32), MOE | SHARED_EXPERT | SIGMOID_ROUTER | WINDOW_LAYERS),
)

# Later layers attend to the K and V that an earlier layer cached.
SHARED_KEYS: tuple[Architecture, ...] = (
    # llama.cpp requires more than 20 layers, whose rounding errors add up.
    model(
        "gemma3n",
        (2, 1, 16),
        WINDOW | {"attention.shared_kv_layers": 2},
        layers=22,
        width=32,
        rounding=5e-2,
    ),
    # Full layers have heads of 64 values, windowed ones of 32.
    model(
        "gemma4",
        (4, 2, 64),
        {
            "attention.sliding_window": 32,
            "attention.sliding_window_pattern": (True, True, False, True, True, False),
            "attention.shared_kv_layers": 3,
            "attention.key_length_swa": 32,
            "attention.value_length_swa": 32,
            "rope.dimension_count_swa": 32,
            "rope.freq_base_swa": 5000.0,
            "embedding_length_per_layer_input": 32,
            "final_logit_softcapping": 30.0,
        },
        layers=6,
    ),
)
