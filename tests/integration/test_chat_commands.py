"""Commands of `entropykv chat` remove a turn, or begin anew."""

from __future__ import annotations

from pathlib import Path

from tests.support.chats import Chat


def test_regen_gives_the_greedy_answer_again(tiny_llama: Path, chat: Chat) -> None:
    once, _ = chat(tiny_llama, "the cat\n")
    twice, _ = chat(tiny_llama, "the cat\n/regen\n")
    assert twice == once * 2


def test_undo_leaves_a_conversation_that_never_heard_the_turn(tiny_llama: Path, chat: Chat) -> None:
    """With a budget that evicts, the remaining text is read again."""
    for budget in ("1.0", "40"):
        options = ("-c", "512", "--kv-budget", budget)
        out, err = chat(tiny_llama, "the cat\n/undo\na dog\n", *options)
        assert "Taken back: the cat" in err
        expected, _ = chat(tiny_llama, "the cat\n/reset\na dog\n", *options)
        assert out == expected


def test_edit_says_something_else_instead(tiny_llama: Path, chat: Chat) -> None:
    out, _ = chat(tiny_llama, "the cat\n/edit a dog\n")
    expected, _ = chat(tiny_llama, "the cat\n/undo\na dog\n")
    assert out == expected


def test_system_begins_anew(tiny_llama: Path, chat: Chat) -> None:
    out, err = chat(tiny_llama, "the cat\n/system in the end\na dog\n/history\n")
    assert "All turns are forgotten" in err
    assert "> the cat" not in err
    expected, _ = chat(tiny_llama, "a dog\n", "-sys", "in the end")
    assert out.endswith(expected)


def test_nothing_to_take_back_is_one_sentence(tiny_llama: Path, chat: Chat) -> None:
    for command in ("/undo", "/regen", "/edit a dog"):
        out, err = chat(tiny_llama, f"{command}\n")
        assert out == ""
        assert "no turn to remove" in err


def test_save_asks_before_it_replaces_a_file(tiny_llama: Path, chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "talk.ekv"
    chat(tiny_llama, f"the cat\n/save {path}\n")
    before = path.read_bytes()
    _, err = chat(tiny_llama, f"a dog\n/save {path}\nn\n")
    assert "stays as it is" in err
    assert path.read_bytes() == before
    chat(tiny_llama, f"a dog\n/save {path}\ny\n")
    assert path.read_bytes() != before
