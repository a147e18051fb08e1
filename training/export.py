"""Make the shipped files from a checkpoint: `python -m training.export build/bitnet-facts`.

The checkpoint is written as a Hugging Face directory beside it, which `entropykv convert` then
converts to TQ2_0, as any other BitNet. Two more files are written: a document to ask about, and the
entropy profile of the heads, measured in documents with questions.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from entropykv import EntropyProfile
from entropykv.calibration.measure import CalibrationSettings, calibrate
from entropykv.convert import convert
from entropykv.evaluation.texts import Text
from training.facts import BOS, EOS, STOP_LINE, Writer
from training.model import Shape
from training.tokenizer import WordTokenizer

N_CTX = 2048
_SHIPPED = Path(__file__).resolve().parents[1] / "python" / "entropykv" / "demo"
# This is the regular expression of Llama 3; the merges of its tokenizer are replaced by whole
# words.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PARTS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj", "attn_sub_norm")}
_PARTS |= {"mlp": ("gate_proj", "up_proj", "down_proj", "ffn_sub_norm")}


def main() -> None:
    """Export one checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="folder of training.train")
    parser.add_argument("--output", type=Path, default=_SHIPPED, help="folder of the files")
    options = parser.parse_args()
    state = torch.load(options.checkpoint / "checkpoint.pt", weights_only=True)
    directory = options.checkpoint / "bitnet-facts"
    directory.mkdir(exist_ok=True)
    tensors = {_name(name): tensor.contiguous() for name, tensor in state["model"].items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer = WordTokenizer()
    for name, content in {
        "config.json": _config(Shape(n_vocab=len(tokenizer))),
        "tokenizer.json": _tokenizer(tokenizer),
        "tokenizer_config.json": _tokenizer_config(),
    }.items():
        (directory / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    model = options.output / "bitnet-facts.gguf"
    convert(directory, model, embedding_type="q8_0", force=True)
    _profile(model).save(options.output / "bitnet-facts.entropy.json")
    document, _ = Writer("demo 1").test_document(1400, 8)
    text = "".join([*document[1:-1], STOP_LINE])
    (options.output / "bitnet-facts.txt").write_text(text, encoding="utf-8")


def _profile(model: Path) -> EntropyProfile:
    texts = []
    for i in range(20):
        document = Writer(f"profile {i}").training_document(1024, n_filler=0.2, n_questions=0.3)
        # BOS and EOS are not text.
        words = (word for word in document.words if word not in (BOS, EOS))
        texts.append(Text(f"facts {i}", "".join(words)))
    settings = CalibrationSettings(max_length=1000, curve_length=1000, curve_texts=20)
    return calibrate(model, texts, settings)


def _name(name: str) -> str:
    """Return the name of a parameter in transformers' BitNetForCausalLM."""
    parts = name.split(".")
    for group, members in _PARTS.items():
        if len(parts) > 2 and parts[2] in members:
            parts.insert(2, group)
    return ".".join(["model", *parts])


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["BitNetForCausalLM"],
        "model_type": "bitnet",
        "hidden_act": "relu2",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head,
        "num_key_value_heads": shape.n_head,
        "max_position_embeddings": N_CTX,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_base,
        "vocab_size": shape.n_vocab,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
    }


def _tokenizer(tokenizer: WordTokenizer) -> dict[str, Any]:
    special = [
        {"id": i, "content": token, "special": True, "single_word": False}
        | {"lstrip": False, "rstrip": False, "normalized": False}
        for i, token in enumerate((BOS, EOS))
    ]
    split = {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, level | {"use_regex": False}],
        },
        "post_processor": None,
        "decoder": level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {token: i for i, token in enumerate(tokenizer.tokens)},
            "merges": [". Ċ"],  # llama.cpp requires at least one merge.
        },
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": True,
        "model_max_length": N_CTX,
    }


if __name__ == "__main__":
    main()
