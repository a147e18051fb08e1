"""Say which tests of llama.cpp's server are run, and which ones entropykv is meant to fail."""

from __future__ import annotations

FILES = (
    *("test_basic", "test_completion", "test_chat_completion", "test_template", "test_tokenize"),
    *("test_security", "test_ctx_shift", "test_ignore_eos", "test_infill", "test_speculative"),
    *("test_tool_call", "test_compat_oai_responses", "test_compat_anthropic", "test_slot_save"),
    *("test_metrics", "test_sleep"),
)
"""The test files about features that entropykv has."""

NOT_RUN = {
    "test_embedding": "embeddings are refused",
    "test_rerank": "ranks are refused",
    "test_lora": "requests change no adapters",
    "test_vision_api": "its models are at the Hub; tests/integration/test_server_images.py",
    "test_router": "its models are at the Hub; tests/integration/test_server_models.py",
    "test_kv_keep_only_active": "it is about llama.cpp's cells; a pool swaps out who is idle",
    "test_stream": "streams that go on without their client are not kept",
    "test_proxy": "the server is no proxy",
    "test_mcp_servers": "the server runs no tools",
    "test_tools_builtin": "the server runs no tools",
    "test_compat_gcp": "Vertex AI's routes are not offered",
}
"""The test files that are left out, and why."""

_TOKENS = "it expects numbers of tokens of a model that only the Hub has"
_HUB = "its model or its images are only at the Hub"
_CONTEXT = "with letters as tokens its text does not fit into the context that it asks for"
_EVICTION = "the budget takes the place of context shifts; a text ends where the context does"
_BOS = "prompts are told without the token that begins them"
_CORS = "no page of another origin may use the server unless --cors-origins names it"
_PREFLIGHT = "Starlette answers the preflight of an origin that is not allowed with 400, not 200"
_MEDIA = "there is no --media-path: clients send images as data: URLs"
_METRICS = "/metrics is always there, and its figures have names of their own (entropykv_...)"
_SLOTS = "conversations are found by their text, not by the slot that had them"
_NO_IMAGES = "images without a projector are refused with 400 and a sentence of our own"
_SYNTHETIC = "drafts are those of a drafter; there is no --spec-synth-len"

DIFFERENCES: tuple[tuple[str, str], ...] = (
    (r"test_basic.py::test_server_multiple_addresses", "--host takes one address"),
    (r"test_basic.py::test_server_slots", "/slots is always there; a user sees only its own"),
    (r"test_basic.py::test_load_split_model", _HUB),
    (
        r"test_basic.py::test_server_model_aliases_and_tags",
        "the first name of --alias is the model's, and aliases has the others",
    ),
    (r"test_completion.py::test_completion_response_fields\[.*-32-.*", _BOS),
    (r"test_completion.py::test_n_probs_post.*", "post_sampling_probs is refused by name"),
    (r"test_completion.py::test_completion_prompt_cache", _TOKENS),
    (
        r"test_chat_completion.py::test_chat_completion\[.*This is not a chat template.*",
        "a --chat-template without Jinja is the name of one of llama.cpp's",
    ),
    (
        r"test_chat_completion.py::test_chat_completion_(stream.*|with_timings_per_token)",
        "the first chunk has no content instead of null, which clients would add to a text",
    ),
    (r"test_chat_completion.py::test_chat_completion_cached_tokens", _TOKENS),
    (r"test_chat_completion.py::test_chat_template", _BOS),
    (
        r"test_chat_completion.py::test_chat_template_assistant_prefill\[prefill1.*",
        "parts of a message are joined by one line end",
    ),
    (
        r"test_chat_completion.py::test_return_progress\[64-2-True\]",
        "nothing of a prompt that was read is read again, not even its last tokens",
    ),
    (
        r"test_template.py::test_reasoning\[(deepseek|Qwen-QwQ|Cohere).*-auto-.*",
        "--reasoning auto leaves the template as it is; llama.cpp's copies expect enable_thinking",
    ),
    (
        r"test_template.py::test_date_inside_prompt\[meta-llama.*",
        "templates are told date_string only by chat_template_kwargs, as in transformers",
    ),
    (
        r"test_template.py::test_date_inside_prompt\[fireworks.*",
        "the template adds functions and datetime to a text, which are variables of its maker",
    ),
    (
        r"test_security.py::test_access_static_assets_without_api_key",
        "the page at / has other files than llama-server's",
    ),
    (r"test_security.py::test_cors_options\[.*", _CORS),
    (r"test_security.py::test_cors_origins_localhost_rejects\[.*", _PREFLIGHT),
    (
        r"test_security.py::test_cors_origins_defaults_to_localhost_with_tools_enabled",
        "the server runs no tools",
    ),
    (r"test_security.py::test_cors_proxy_.*", "the server is no proxy"),
    (r"test_security.py::test_local_media_file.*", _MEDIA),
    (r"test_ctx_shift.py::test_ctx_shift_enabled", _EVICTION),
    (r"test_ctx_shift.py::test_ctx_shift_disabled_short_prompt\[-1.*", _TOKENS),
    (r"test_speculative.py::test_with_and_without_draft", _SYNTHETIC),
    (r"test_speculative.py::test_synth_.*", _SYNTHETIC),
    (r"test_speculative.py::test_slot_ctx_not_exceeded", _CONTEXT),
    (r"test_speculative.py::test_with_ctx_shift", _EVICTION),
    (
        r"test_compat_oai_responses.py::test_responses_stream_with_llama_telemetry",
        "return_progress is refused at /v1/responses; chats and completions have it",
    ),
    (
        r"test_compat_anthropic.py::test_anthropic_(tool_result_with_image|vision_format.*)",
        _NO_IMAGES,
    ),
    (r"test_compat_anthropic.py::test_anthropic_vision_base64_.*", _HUB),
    (
        r"test_compat_anthropic.py::test_anthropic_empty_messages",
        "a chat has a message, as at Anthropic",
    ),
    (r"test_slot_save.py::test_slot_(save_restore|erase)", f"{_TOKENS}; {_SLOTS}"),
    (
        r"test_slot_save.py::test_slot_restore_legacy_token_list",
        "files of slots are sessions of entropykv",
    ),
    (r"test_slot_save.py::.*", _HUB),
    (
        r"test_metrics.py::test_metrics_(disabled|prometheus.*|prompt_processed.*|predicted_.*)",
        _METRICS,
    ),
    (r"test_sleep.py::test_server_sleep_(read_only_endpoints|metrics_buckets)", _METRICS),
    (r"test_metrics.py::test_metrics_timings_on_prompt_progress", _CONTEXT),
    (r"test_metrics.py::test_metrics_embedding_prompt_is_counted", "embeddings are refused"),
)
"""Patterns of tests, as FILE.py::TEST, each with the reason for the difference."""

OF_THE_CLASS = {
    "tests/test_llama.py::test_llama_cpp_tokenization": "a vocabulary alone (vocab_only) has no "
    "cache, and is refused by name; llama_cpp.Llama reads it"
}
"""Tests of llama-cpp-python that EntropyLlama is meant to fail, each with the reason."""
