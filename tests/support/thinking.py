"""Provide short chat templates of thinking models."""

from __future__ import annotations

_MESSAGES = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[user]{{ m.content }}[/user]"
    "{% elif m.role == 'assistant' %}[bot]{{ (m.content or '').split('</think>')[-1] }}[/bot]"
    "{% else %}[system]{{ m.content }}[/system]{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[bot]"
)
OPENING = (
    _MESSAGES + "{% if enable_thinking is not defined or enable_thinking %}{{ '<think>\n' }}"
    "{% endif %}{% endif %}"
)
"""A template like DeepSeek's: the prompt begins a thought, and earlier thoughts are left out."""
CLOSING = (
    _MESSAGES + "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
"""A template like Qwen 3's: the model begins a thought, or the prompt has an empty one."""
CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}"
    "<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""A template like gpt-oss's: every message names its channel."""
