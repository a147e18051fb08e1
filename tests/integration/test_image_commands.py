"""`entropykv run` and `chat` show images to a model, with the option names of llama-mtmd-cli."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from entropykv.cli import request_options
from entropykv.cli.conversation import Conversation
from entropykv.settings.sampling import Sampling
from tests.support.command import assert_refused, entropykv
from tests.support.image_reference import MARKER
from tests.support.tiny_vision import png
from tests.support.vision_models import VisionModel, prompt_of, write_vision

OPTIONS = ("-c", 512, "-t", 1, "--kv-type", "f16", "--temp", 0, "-n", 8, "--no-chat")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    return write_vision("causal", tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "an image, of a land.png"
    path.write_bytes(png(64, 40))
    return path


def said(model: VisionModel, text: str, *files: bytes) -> str:
    with model.session() as session:
        tokens = prompt_of(session, text, list(files)).tokens
        return session.detokenize(list(session.generate(tokens, 8, temperature=0.0)))


def test_run_reads_images_before_the_text_or_where_it_says(model: VisionModel, image: Path) -> None:
    named = ("-m", model.path, "--mmproj", model.projector, "--image", image)
    first = entropykv("run", *named, *OPTIONS, "-p", "what is it")
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip() == said(model, f"{MARKER}what is it", png(64, 40)).strip()
    placed = entropykv("run", *named, *OPTIONS, "-p", "what is <__media__> to you")
    assert placed.stdout.strip() == said(model, f"what is {MARKER} to you", png(64, 40)).strip()


def test_run_stays_within_a_small_budget(model: VisionModel, image: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    named = ("-m", model.path, "-mm", model.projector, "--image", image, "--image", image)
    result = entropykv(
        "run", *named, *OPTIONS, "--kv-budget", 48, "-p", "what", "--stats-json", figures
    )
    assert result.returncode == 0, result.stderr
    stats = json.loads(figures.read_text(encoding="utf-8"))
    assert stats["kv_bytes_peak"] <= stats["kv_bytes_budget"]
    assert stats["evictions"] > 0


def test_sessions_and_prompt_caches_go_on_after_images(
    model: VisionModel, image: Path, tmp_path: Path
) -> None:
    named = ("-m", model.path, "--mmproj", model.projector, "--image", image, *OPTIONS)
    cache = ("--prompt-cache", tmp_path / "cache.ekv")
    first = entropykv("run", *named, *cache, "-p", "what is it")
    again = entropykv("run", *named, *cache, "-p", "what is it")
    assert again.stdout == first.stdout
    assert re.search(r"(\d+) of \1 tokens of the prompt are in", again.stderr)


def test_chat_shows_images_with_the_next_turn(model: VisionModel, image: Path) -> None:
    lines = f"/image {image}\nwhat is it\n/regen\n/image missing.png\n/undo\n/history\n"
    named = ("-m", model.path, "--mmproj", model.projector)
    result = entropykv("chat", *named, *OPTIONS, "--image", image, stdin="and you\n" + lines)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "missing.png: No such file" in result.stderr
    first, answer, again = (result.stdout.split("\n") + [""] * 3)[:3]
    assert first.strip() == said(model, f"{MARKER}and you", png(64, 40)).strip()
    assert answer == again != ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--image", "IMAGE"), ("--image needs", "--mmproj FILE")),
        (("--mmproj", "MODEL", "--image", "IMAGE"), ("is no projector but a model",)),
        (("--mmproj", "MMPROJ", "--image", "nowhere.png"), ("nowhere.png: No such file",)),
        (("--mmproj", "MMPROJ", "--image", "MODEL"), ("no image that can be read",)),
        (("--mmproj", "MMPROJ", "--image", "FOLDER"), ("is a directory",)),
        (("--mmproj-url", "https://example.com/m"), ("--mmproj-url", "--mmproj")),
        (("--audio", "a.wav"), ("--audio", "sound")),
    ],
)
def test_refuses_by_name(
    model: VisionModel, image: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    names = {"IMAGE": image, "MODEL": model.path, "MMPROJ": model.projector, "FOLDER": image.parent}
    given = [names.get(option, option) for option in options]
    for command in ("run", "chat"):
        assert_refused(entropykv(command, "-m", model.path, *given, *OPTIONS, "-p", "a"), *words)


def test_refuses_another_number_of_places_than_of_images(model: VisionModel, image: Path) -> None:
    named = ("-m", model.path, "--mmproj", model.projector, "--image", image)
    result = entropykv("run", *named, *OPTIONS, "-p", "<__media__> and <__media__>")
    assert_refused(result, "2 places (<__media__>) for 1 images")


def test_ctrl_c_while_an_image_is_encoded_ends_the_turn_alone(
    model: VisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model.session() as session:
        conversation = Conversation(session, Sampling(temperature=0.0), max_tokens=4)
        conversation.files = [png(64, 40)]

        def press(*_: object) -> None:
            signal.raise_signal(signal.SIGINT)

        # This function is called before the image is encoded.
        monkeypatch.setattr(request_options, "say", press)
        answer = conversation.ask("what is it")
        assert (answer.interrupted, answer.unread, session.position) == (True, None, 0)
        monkeypatch.setattr(request_options, "say", lambda _: None)
        assert conversation.ask("what is it").tokens
        assert len(conversation.turns) == 1
        assert conversation.files == []
