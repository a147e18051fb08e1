"""Converted Hugging Face checkpoints compute nearly what transformers' BitNetForCausalLM does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from entropykv import Session, UnsupportedModelError
from entropykv.convert import convert
from entropykv.llamacpp.distributions import mean_divergence
from tests.support.convert_reference import (
    _WHY,
    N_VOCAB,
    TOKENS,
    add_quantization,
    bitnet,
    make_ternary,
    pack_checkpoint,
    projections,
    reference_logits,
    safetensors_torch,
    save_checkpoint,
    torch,
    transformers,
)
from tests.support.exact_logits import exact_logits
from tests.support.logits import relative_error

# Compilation would take seconds, and needs a compiler.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


pytestmark = [
    pytest.mark.reference,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def random_model(hidden_act: str = "relu2", n_head_kv: int = 2, **changes: Any) -> Any:
    """Return a small BitNet model, whose logits vary by a few units."""
    config = transformers.BitNetConfig(
        vocab_size=N_VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=n_head_kv,
        hidden_act=hidden_act,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
        bos_token_id=1,
        eos_token_id=2,
        **changes,
    )
    model = transformers.BitNetForCausalLM(config).eval().float()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                weight.copy_(1.0 + 0.1 * noise)
            else:
                gain = 2.5 if "embed" in name else 1.3
                weight.copy_(noise * gain / weight.shape[1] ** 0.5)
    return model


def converted_weights(path: Path) -> dict[str, tuple[npt.NDArray[np.float32], np.float32]]:
    """Return (ternary values as floats, scale) of every projection by its name."""
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    weights = {}
    for name, tensor in tensors.items():
        if name.endswith(".scale"):
            weight = tensors[name.removesuffix("scale") + "weight"]
            values = dequantize(weight.data, weight.tensor_type)
            weights[name.removesuffix(".scale")] = (values, tensor.data[0])
    return weights


@pytest.mark.parametrize("n_head_kv", [1, 2, 4])
@pytest.mark.parametrize("hidden_act", ["silu", "relu2"])
def test_dense_weights_give_the_logits_of_transformers(
    tmp_path: Path, hidden_act: str, n_head_kv: int
) -> None:
    model = random_model(hidden_act, n_head_kv)
    save_checkpoint(model, tmp_path / "hf")
    target = tmp_path / "out.gguf"
    summary = convert(tmp_path / "hf", target, weight_type="f32", embedding_type="f32")
    assert summary.activation == hidden_act
    expected = reference_logits(model)
    assert expected.std() > 1.0
    assert np.abs(exact_logits(target, TOKENS) - expected).max() < 1e-4
    with Session(target, n_ctx=128, kv_type="f16", n_threads=2) as session:
        ours = session.decode(TOKENS, all_logits=True)
    assert relative_error(ours, expected) < 1e-2  # The cache is f16.
    other = {"silu": "relu2", "relu2": "silu"}[hidden_act]
    convert(tmp_path / "hf", target, weight_type="f32", activation=other, force=True)
    assert relative_error(exact_logits(target, TOKENS), expected) > 0.3


def test_shards_and_bf16_are_read(tmp_path: Path) -> None:
    model = random_model().bfloat16()
    save_checkpoint(model, tmp_path / "hf", max_shard_size="1MB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    target = tmp_path / "out.gguf"
    convert(tmp_path / "hf", target, weight_type="f32", embedding_type="keep")
    kinds = {t.name: t.tensor_type.name for t in GGUFReader(target).tensors}
    assert kinds["token_embd.weight"] == "BF16"  # noqa: S105
    convert(tmp_path / "hf", target, weight_type="f32", embedding_type="f32", force=True)
    logits = exact_logits(target, TOKENS)
    reference = transformers.BitNetForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert np.abs(logits - reference_logits(reference)).max() < 1e-4


@pytest.mark.parametrize("weight_type", ["tq2_0", "q4_0"])
@pytest.mark.parametrize("hidden_act", ["silu", "relu2"])
def test_ternary_weights_give_nearly_the_logits_of_transformers(
    tmp_path: Path, hidden_act: str, weight_type: str
) -> None:
    model = random_model(hidden_act)
    save_checkpoint(model, tmp_path / "hf")
    make_ternary(model)
    target = tmp_path / "out.gguf"
    convert(tmp_path / "hf", target, weight_type=weight_type, embedding_type="f32")
    expected, ours = reference_logits(model), exact_logits(target, TOKENS)
    assert relative_error(ours, expected) < 5e-2
    assert mean_divergence(expected, ours) < 2e-2


@pytest.mark.parametrize("config", ["none", "online"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_masters_are_quantised_as_transformers_does(
    tmp_path: Path, dtype: str, config: str
) -> None:
    model = random_model().to(getattr(torch, dtype))
    save_checkpoint(model, tmp_path / "hf")
    if config == "online":
        add_quantization(tmp_path / "hf", "autobitlinear", "online")
    convert(tmp_path / "hf", tmp_path / "out.gguf")
    weights = converted_weights(tmp_path / "out.gguf")
    modules = projections(model)
    assert weights.keys() == modules.keys()
    for name, (ternary, scale) in weights.items():
        expected = bitnet.WeightQuant.apply(modules[name].weight).float().detach().numpy()
        assert np.array_equal(ternary, np.sign(expected)), name
        # For float32, torch and numpy may sum the mean in a different order.
        tolerance = 1e-6 if dtype == "float32" else 0.0
        assert abs(scale - np.abs(expected).max()) <= tolerance * scale, name


@pytest.mark.parametrize("linear_class", ["autobitlinear", "bitlinear"])
def test_packed_weights_do_what_the_modules_of_transformers_do(
    tmp_path: Path, linear_class: str
) -> None:
    """Converted packed weights are those of the modules of transformers: a module that multiplies a
    unit vector, which int8 represents exactly, returns a column of its weight.
    """
    model = random_model()
    save_checkpoint(model, tmp_path / "hf")
    running = pack_checkpoint(tmp_path / "hf", model, linear_class)
    convert(tmp_path / "hf", tmp_path / "out.gguf", weight_type="q4_0")
    weights = converted_weights(tmp_path / "out.gguf")
    assert weights.keys() == running.keys()
    for name, (ternary, scale) in weights.items():
        module = running[name]
        with torch.no_grad():
            expected = module(127.0 * torch.eye(module.in_features))[:, :].numpy().T / 127.0
        unpacked = expected / np.abs(expected).max()
        assert np.array_equal(ternary, np.rint(unpacked)), name
        assert np.allclose(ternary * scale, expected, rtol=1e-5, atol=1e-7), name


def test_the_tokenizer_is_that_of_transformers(tmp_path: Path) -> None:
    """A byte-level BPE tokenizer with Llama 3's regular expression, trained here, gives the same
    tokens after conversion.
    """
    tokenizers = pytest.importorskip("tokenizers", reason=_WHY)
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    text = Path(__file__).read_text(encoding="utf-8")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(split), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=N_VOCAB - 4,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",  # noqa: S106
        eos_token="<|end|>",  # noqa: S106
    )
    fast.chat_template = "{% for m in messages %}User: {{ m['content'] }}{% endfor %}"
    random_model().save_pretrained(tmp_path / "hf")
    fast.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out.gguf")
    with Session(tmp_path / "out.gguf", n_ctx=128) as session:
        sample = "It's 12345 Ünïcödé things,\n\n  don't   you THINK?<|end|> yes"
        assert session.tokenize(sample, add_bos=False) == fast.encode(
            sample, add_special_tokens=False
        )
        assert session.model.chat_prompt("hi") == "User: hi"
        assert session.model.is_end(fast.eos_token_id)


def test_untied_heads_are_refused_and_equal_ones_dropped(tmp_path: Path) -> None:
    model = random_model()
    save_checkpoint(model, tmp_path / "hf")
    path, target = tmp_path / "hf" / "model.safetensors", tmp_path / "out.gguf"
    tensors = safetensors_torch.load_file(path)
    head = tensors["model.embed_tokens.weight"].clone()
    safetensors_torch.save_file({**tensors, "lm_head.weight": head}, path, {"format": "pt"})
    convert(tmp_path / "hf", target, weight_type="f32", embedding_type="f32")
    assert np.abs(exact_logits(target, TOKENS) - reference_logits(model)).max() < 1e-4
    head[-1, -1] += 1
    safetensors_torch.save_file({**tensors, "lm_head.weight": head}, path, {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="untied head"):
        convert(tmp_path / "hf", tmp_path / "other.gguf")
    assert not (tmp_path / "other.gguf").exists()
