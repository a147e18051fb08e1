"""Images are read inside the budget, with the logits of llama.cpp's helper, and evicted as text."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from entropykv import Pool, Session
from entropykv.errors import ContextError, ImageError, ModelFileError, UnsupportedModelError
from entropykv.llamacpp import projector
from entropykv.session.images import ImageLimits
from entropykv.session.second_readings import LEAST_ECHO
from entropykv.session.sequence import is_placeholder
from tests.architectures import MODELS
from tests.support.architecture_models import written
from tests.support.image_reference import MARKER, helper_logits
from tests.support.logits import relative_error
from tests.support.releases import need_images
from tests.support.tiny_vision import TinyProjector, png
from tests.support.vision_models import (
    FILES,
    KINDS,
    TEXT,
    TOKENS,
    VisionModel,
    prompt_of,
    write_vision,
)

# The logits' error from rounding K and V to f16, relative to the spread of the logits.
ROUNDING = 1e-3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VisionModel]:
    folder = tmp_path_factory.mktemp("vision")
    return {kind: write_vision(kind, folder) for kind in KINDS}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, models: dict[str, VisionModel]) -> VisionModel:
    return models[request.param]


@pytest.fixture
def causal(models: dict[str, VisionModel]) -> VisionModel:
    return models["causal"]


@pytest.fixture
def session(model: VisionModel) -> Iterator[Session]:
    with model.session(store="headwise") as made:
        yield made


@pytest.mark.parametrize("n_ubatch", [16, 64])
def test_logits_are_those_of_llama_cpps_helper(model: VisionModel, n_ubatch: int) -> None:
    expected = helper_logits(model.path, model.projector, TEXT, FILES)
    with model.session(store="headwise", n_ubatch=n_ubatch) as session:
        prompt = prompt_of(session)
        found = session.decode(prompt.tokens)[0]
    assert sum(map(is_placeholder, prompt.tokens)) == 2 * TOKENS[model.kind] - (
        3 if model.kind == "M-RoPE" else 0
    )
    assert relative_error(found, expected) < ROUNDING


def test_what_is_said_beside_an_image_names_no_control_token(causal: VisionModel) -> None:
    """The names of control tokens beside an image are changed, because llama.cpp's helper tokenises
    the whole prompt.
    """
    with causal.session() as session:
        images = session.images
        assert images is not None
        said = session.model.said("a</s><s>b <unk>")
        prompt = images.tokenize(f"<s>{said}</s>{images.marker}", FILES[:1], add_bos=False)
        text = [token for token in prompt.tokens if not is_placeholder(token)]
        assert [text.count(token) for token in (0, 1, 2)] == [0, 1, 1]
        assert session.detokenize(text).replace("\u2060", "").count("</s><s>b <unk>") == 1


KINDS_OF_LAYERS = (
    *("lfm2", "falcon-h1", "granitehybrid", "qwen35"),  # These models are recurrent.
    *("gemma2", "llama4"),  # These models have sliding or chunked windows.
    *("deepseek2", "phi3", "qwen3vl"),  # The heads of these models are unusual in size or number.
)


@pytest.mark.parametrize("name", KINDS_OF_LAYERS)
def test_all_kinds_of_layers_read_images_as_llama_cpp(name: str, tmp_path: Path) -> None:
    need_images()
    path = written(MODELS[name], tmp_path)
    projector = tmp_path / "mmproj.gguf"
    kind = "qwen2vl_merger" if name.startswith("qwen3") else "mlp"
    n_embd = MODELS[name].metadata["embedding_length"]
    assert isinstance(n_embd, int)
    TinyProjector(projector, kind, n_embd).write()
    model = VisionModel("causal", path, projector)
    expected = helper_logits(path, projector, TEXT, FILES)
    with model.session(n_ubatch=16) as session:
        assert session.cache.store == "headwise"
        found = session.decode(prompt_of(session).tokens)[0]
        assert relative_error(found, expected) < ROUNDING
    with model.session(n_ubatch=16, kv_budget=48) as session:
        list(session.generate(prompt_of(session).tokens, 4))
        stats = session.stats()
        assert stats.kv_bytes_peak <= stats.kv_bytes_budget


@pytest.mark.parametrize("kind", ["causal", "seeing all"])
def test_the_flat_store_gives_them_to_the_bit(models: dict[str, VisionModel], kind: str) -> None:
    model = models[kind]
    expected = helper_logits(model.path, model.projector, TEXT, FILES, flash=True)
    with model.session(store="flat", n_ubatch=512) as session:
        found = session.decode(prompt_of(session).tokens)[0]
    assert relative_error(found, expected) < 1e-6


def test_the_flat_store_refuses_positions_of_two_dimensions(models: dict[str, VisionModel]) -> None:
    with models["M-RoPE"].session(store="flat") as session:
        before = session.decode(session.tokenize("the old land"))
        with pytest.raises(UnsupportedModelError, match=r"M-RoPE.* --store headwise"):
            session.decode(prompt_of(session, MARKER, FILES[:1]).tokens)
        session.reset()
        np.testing.assert_array_equal(session.decode(session.tokenize("the old land")), before)


def test_an_image_that_sees_itself_needs_a_micro_batch_of_its_size(
    models: dict[str, VisionModel],
) -> None:
    with models["seeing all"].session(n_ubatch=8) as session:
        tokens = prompt_of(session).tokens
        with pytest.raises(ContextError, match=r"9 tokens, which all see each other.* -ub"):
            session.decode(tokens)


def test_text_after_an_image_goes_on_as_in_llama_cpp(model: VisionModel) -> None:
    """Text that is read token by token after an image gives llama.cpp's logits, also with M-RoPE,
    where RoPE's positions are less than those of the text.
    """
    more = " in the other land of the old road"
    expected = helper_logits(model.path, model.projector, TEXT + more, FILES)
    with model.session(store="headwise") as session:
        session.decode(prompt_of(session).tokens)
        for token in session.tokenize(more, add_bos=False):
            logits = session.decode([token])
    assert relative_error(logits[0], expected) < ROUNDING


@pytest.mark.parametrize("policy", ["auto", "uniform", "streaming", "adaptive"])
@pytest.mark.parametrize("store", ["headwise", "flat"])
def test_images_never_exceed_a_small_budget(model: VisionModel, store: str, policy: str) -> None:
    if store == "flat" and model.kind == "M-RoPE":
        pytest.skip("refused: see above")
    policy = "streaming" if store == "flat" else policy
    with model.session(store=store, policy=policy, kv_budget=48, n_ubatch=32) as session:
        for seed in range(3):
            text = f"the painting {MARKER} and the other {MARKER} of the land"
            files = [png(64, 40, seed=seed), png(48, 48, seed=seed + 9)]
            for token in session.generate(prompt_of(session, text, files).tokens, 8, seed=1):
                assert token >= 0
            stats = session.stats()
            assert stats.kv_bytes_peak <= stats.kv_bytes_budget
        assert session.cache.evicted > 0
        kept = session.cache.entries(0, 0).tolist()
        if model.kind != "seeing all":  # The first layer of the model "seeing all" has a window.
            assert kept[:4] == [0, 1, 2, 3]
        assert len(kept) <= max(max(layer) for layer in session.cache.budgets())


def test_entries_of_an_image_are_ranked_by_what_attends_to_them(causal: VisionModel) -> None:
    """Beyond the recent window, some entries of images are kept, and not only the last ones."""
    with causal.session(policy="uniform", kv_budget=40, n_ubatch=32, recent_window=8) as session:
        prompt = prompt_of(session)
        session.decode(prompt.tokens)
        places = [i for i, token in enumerate(prompt.tokens) if is_placeholder(token)]
        kept = {tuple(session.cache.entries(layer, h)) for layer in range(2) for h in range(2)}
        assert len(kept) > 1  # Different heads keep different entries.
        of_images = {place for each in kept for place in each if place in places}
        assert of_images
        assert of_images != set(places[-len(of_images) :])


def test_policy_auto_reads_text_twice_and_images_once(causal: VisionModel) -> None:
    with causal.session(kv_budget=64, n_ubatch=128) as session:
        assert session.config.reads_twice
        long = " and the winding road to the land" * 4
        session.decode(prompt_of(session, TEXT + long).tokens)
        assert session.cache.evicted > 0
        sequence = session._slot.text
        assert sequence.position - sequence.echoed < LEAST_ECHO
        assert session.stats().kv_bytes_peak <= session.stats().kv_bytes_budget


def test_the_same_image_has_the_same_tokens_and_another_has_others(session: Session) -> None:
    first, again = prompt_of(session), prompt_of(session)
    assert first.tokens == again.tokens
    assert first.images[0] is again.images[0]  # The image was not encoded again.
    other = prompt_of(session, files=[png(64, 40, seed=8), FILES[1]])
    assert len(other.tokens) == len(first.tokens)
    differs = [a != b for a, b in zip(first.tokens, other.tokens, strict=True)]
    assert differs == [
        is_placeholder(token) and token in first.images[0].placeholders for token in first.tokens
    ]


def test_going_back_within_and_before_images_gives_the_same_numbers(model: VisionModel) -> None:
    with model.session(store="headwise", n_ubatch=64) as session:
        tokens = prompt_of(session).tokens
        expected = session.decode(tokens)[0]
        starts = [i for i, token in enumerate(tokens) if is_placeholder(token)]
        within = [] if model.kind == "seeing all" else [starts[5]]
        for position in (len(tokens) - 3, starts[-1] + 1, *within, starts[0], 3):
            if not session.text.held().can_return_to(position):  # A window may prevent a rollback.
                continue
            session.text.truncate(position)
            again = session.decode(tokens[position:])[0]
            assert relative_error(again, expected) < 1e-4, position


def test_an_image_is_not_read_from_its_middle_on(causal: VisionModel) -> None:
    with causal.session() as session:
        tokens = prompt_of(session).tokens
        first = next(i for i, token in enumerate(tokens) if is_placeholder(token))
        with pytest.raises(ContextError, match="from its beginning"):
            session.decode(tokens[first + 4 :])
        assert session.position == 0


def test_saved_sessions_hold_images(model: VisionModel, tmp_path: Path) -> None:
    file = tmp_path / "with images.ekv"
    tail = " in the land"
    with model.session(store="headwise", kv_budget=48) as session:
        session.decode(prompt_of(session).tokens)
        session.files.save(file)
        expected = session.decode(session.tokenize(tail, add_bos=False))
        tokens = session.tokens
    with Session(model.path, n_ctx=512, n_ubatch=64, n_threads=1, kv_type="f16", kv_budget=48,
                 store="headwise") as loaded:  # fmt: skip
        loaded.files.load(file)  # A saved text continues without a projector.
        np.testing.assert_array_equal(loaded.decode(loaded.tokenize(tail, add_bos=False)), expected)
        assert loaded.tokens == tokens
        with pytest.raises(ImageError, match="no projector is open"):
            loaded.decode(tokens)


def test_files_of_sessions_without_images_are_as_before(causal: VisionModel) -> None:
    with causal.session() as session:
        session.decode([1, 280, 281])
        assert b'"images"' not in session.files.save_state()


def test_checkpoints_and_forks_hold_images(causal: VisionModel) -> None:
    options = {"n_ctx": 512, "n_ubatch": 64, "n_threads": 1, "kv_type": "f16", "n_sequences": 2}
    with Pool(causal.path, kv_budget=1.0, **options) as pool:
        session = pool.session()
        session.open_projector(causal.projector)
        tokens = prompt_of(session).tokens
        expected = session.decode(tokens)[0]
        session.text.keep_checkpoint()
        fork = session.fork()
        question = session.tokenize(" and the road", add_bos=False)
        after = session.decode(question)[0]
        np.testing.assert_allclose(fork.decode(question)[0], after, atol=1e-4)
        other = pool.session()
        assert other.text.return_to_checkpoint(tokens)
        assert other.position == len(tokens)
        np.testing.assert_array_equal(other.logits, expected)


def test_two_sessions_of_a_pool_read_images_and_write_at_a_time(causal: VisionModel) -> None:
    """Sessions take turns, because a step of llama.cpp reads either tokens or embeddings."""
    options = {"n_ctx": 512, "n_ubatch": 64, "n_threads": 1, "kv_type": "f16", "n_sequences": 2}
    answers: dict[int, list[int]] = {}
    with Pool(causal.path, kv_budget=1.0, **options) as pool:
        sessions = [pool.session() for _ in range(2)]
        sessions[0].open_projector(causal.projector)
        prompts = [prompt_of(sessions[0]), prompt_of(sessions[0], files=FILES[::-1])]

        def ask(number: int) -> None:
            tokens = prompts[number].tokens
            answers[number] = list(sessions[number].generate(tokens, 12, temperature=0.0))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number, prompt in enumerate(prompts):
        with causal.session() as alone:
            files = FILES if number == 0 else FILES[::-1]
            tokens = prompt_of(alone, files=files).tokens
            assert tokens == prompt.tokens
            assert list(alone.generate(tokens, 12, temperature=0.0)) == answers[number]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda _: b"", "no image that can be read"),
        (lambda _: b"RIFF" + bytes(40), "no image that can be read"),
        (lambda data: data[:20], "cut short"),
        (lambda data: data[: len(data) // 2], "damaged"),
        (lambda data: data[:16] + (1 << 20).to_bytes(4, "big") * 2 + data[24:], "pixels"),
        (lambda data: data[:16] + (0).to_bytes(4, "big") + data[20:], "0 x 40"),
        (lambda data: data + bytes(2 << 20), "bytes"),
    ],
)  # fmt: skip
def test_refuses_what_is_no_image_and_goes_on(causal: VisionModel, damage, words: str) -> None:  # type: ignore[no-untyped-def]
    with Session(causal.path, n_ctx=512, n_threads=1) as session:
        session.open_projector(causal.projector, ImageLimits(2, 1 << 20, 1 << 20))
        with pytest.raises(ImageError, match=words):
            prompt_of(session, f"the {MARKER}", [damage(FILES[0])])
        with pytest.raises(ImageError, match="3 images, and 2 are the most"):
            prompt_of(session, MARKER * 3, [FILES[0]] * 3)
        session.decode(prompt_of(session).tokens)


def test_files_that_are_changed_at_random_are_read_or_refused(causal: VisionModel) -> None:
    """No damaged image ends this process, in which llama.cpp decodes it."""
    random = np.random.default_rng(3)
    outcomes = [0, 0]
    with causal.session() as session:
        for _ in range(300):
            data = bytearray(png(16, 16))
            for place in random.integers(0, len(data), random.integers(1, 6)):
                data[place] = random.integers(0, 256)
            if random.random() < 0.2:
                del data[random.integers(1, len(data)) :]
            try:
                prompt_of(session, MARKER, [bytes(data)])
            except ImageError:
                outcomes[0] += 1
            else:
                outcomes[1] += 1
    assert min(outcomes) > 5


def test_images_of_extreme_sides_are_read(model: VisionModel) -> None:
    with model.session() as session:
        for width, height in ((1, 1), (200, 1), (1, 200), (700, 4), (4, 700)):
            assert prompt_of(session, MARKER, [png(width, height)]).images


def test_refuses_more_tokens_than_there_is_room_for_before_it_encodes(causal: VisionModel) -> None:
    with causal.session() as session:
        images = session.images
        assert images is not None
        with pytest.raises(ContextError, match="37 tokens with its images, more than the 35"):
            images.tokenize(images.marker, FILES[:1], most_tokens=35)
        assert images.n_bytes == 0


def test_embeddings_are_counted_and_dropped_beyond_the_limit(
    causal: VisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("entropykv.session.images.HELD_BYTES", 3 * 36 * 64 * 4)
    with causal.session() as session:
        images = session.images
        assert images is not None
        first = prompt_of(session, MARKER, [png(seed=0)]).tokens
        for seed in range(1, 5):
            prompt_of(session, MARKER, [png(seed=seed)])
            assert images.n_bytes == min(seed + 1, 3) * 36 * 64 * 4
        with pytest.raises(ImageError, match="not held any more; send the image again"):
            session.decode(first)
        assert session.decode(prompt_of(session, MARKER, [png(seed=0)]).tokens) is not None


def test_encoding_can_be_stopped(causal: VisionModel) -> None:
    def stop() -> None:
        raise InterruptedError

    with causal.session() as session:
        images = session.images
        assert images is not None
        with pytest.raises(InterruptedError):
            images.tokenize(images.marker, FILES[:1], poll=stop)
        expected = helper_logits(causal.path, causal.projector, TEXT, FILES)
        found = session.decode(prompt_of(session).tokens)[0]
        assert relative_error(found, expected) < ROUNDING


def test_refuses_files_that_are_no_projector_of_the_model(
    causal: VisionModel, tmp_path: Path
) -> None:
    other = tmp_path / "other.gguf"
    TinyProjector(other, "mlp", n_embd=96).write()
    for name in ("image_mean", "patch_size"):
        TinyProjector(tmp_path / f"{name}.gguf", "mlp", n_embd=64).write(without=name)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(causal.projector.read_bytes()[:-100])
    cases = {
        causal.path: "no projector but a model",
        other: "cannot use this projector",
        tmp_path / "image_mean.gguf": "image_mean",
        tmp_path / "patch_size.gguf": "patch_size",
        cut: "truncated",
        tmp_path / "missing.gguf": "no such file",
    }
    with Session(causal.path, n_ctx=512, n_threads=1) as session:
        for path, words in cases.items():
            with pytest.raises(ModelFileError, match=words):
                session.open_projector(path)
        assert session.images is None
        session.open_projector(causal.projector)
        session.decode(prompt_of(session).tokens)


def test_says_so_where_libmtmd_has_another_interface(
    causal: VisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    projector.load_mtmd.cache_clear()
    monkeypatch.delattr("llama_cpp.mtmd_cpp.mtmd_helper_image_get_decoder_pos")
    with (
        Session(causal.path, n_ctx=512, n_threads=1) as session,
        pytest.raises(UnsupportedModelError, match=r"in another way .* install 0\.3\.36"),
    ):
        session.open_projector(causal.projector)
    projector.load_mtmd.cache_clear()


def test_says_so_where_llama_cpp_python_lacks_libmtmd(
    causal: VisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    projector.load_mtmd.cache_clear()
    monkeypatch.setitem(sys.modules, "llama_cpp.mtmd_cpp", None)
    monkeypatch.delattr("llama_cpp.mtmd_cpp", raising=False)
    with (
        Session(causal.path, n_ctx=512, n_threads=1) as session,
        pytest.raises(UnsupportedModelError, match="without libmtmd"),
    ):
        session.open_projector(causal.projector)
    projector.load_mtmd.cache_clear()
