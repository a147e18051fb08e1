"""Write tiny models in place of those that llama.cpp's and llama-cpp-python's tests fetch."""

from __future__ import annotations

from pathlib import Path

from tests.support.tiny_writer import MINIMUM_VOCABULARY, FloatArray, TinyShape, TinyWriter

_SILENT = range(3, 259)
"""The byte tokens, most of which are no text alone."""
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_FIM = ("pre", "suf", "mid", "rep", "sep")
"""The names of the tokens for filling in text, as metadata has them."""


class _Talkative(TinyWriter):
    """Write a model with random weights that never ends a text, and writes only letters.

    The first value of the residual stream is the same for every token, so that the output head can
    exclude tokens by it.
    """

    def _add_metadata(self) -> None:
        super()._add_metadata()
        self.writer.add_chat_template(_CHATML)
        for place, name in enumerate(_FIM):
            self.writer.add_uint32(
                f"tokenizer.ggml.fim_{name}_token_id", MINIMUM_VOCABULARY + place
            )

    def _add_matrix(self, name: str, weights: FloatArray) -> None:
        kind = name.rpartition(".")[2]
        if kind == "token_embd":
            weights[:, 0] = 4.0
        elif kind in ("attn_output", "ffn_down"):
            weights[0, :] = 0.0
        elif kind == "output":
            weights[:, 0] = 0.0
            weights[[0, 1, 2, *_SILENT, *range(MINIMUM_VOCABULARY, len(weights))], 0] = -16.0
        super()._add_matrix(name, weights)


def write_talkative(path: Path) -> None:
    """Write the model unless the file exists; its vocabulary is that of tests/support, which spells
    any text.
    """
    if path.exists():
        return
    shape = TinyShape(
        "llama",
        n_layer=2,
        n_head=4,
        n_head_kv=2,
        head_dim=32,
        n_ff=64,
        n_vocab=352,
        n_ctx_train=16384,
        weight_type="Q8_0",
        rope_freq_base=10000.0,
    )
    _Talkative(path, shape, 0, None).write()
