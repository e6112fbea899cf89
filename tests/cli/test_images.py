"""Images on the command line: `--image FILE`, and `/image FILE` in a chat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.models.eyes import file_of, picture

from foredraft.cli.main import run
from foredraft.types import PicturePrompt, pictures_of

ARGS = ("generate", "-m", "seeing", "-p", "what?", "-n", "8", "--ignore-eos")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for seed in (1, 2):
        (tmp_path / f"{seed}.png").write_bytes(file_of(picture(seed, 16)))
    (tmp_path / "broken.png").write_bytes(file_of(picture(1))[:100])
    (tmp_path / "text.png").write_text("no image")
    return [str(tmp_path / name) for name in ("1.png", "2.png", "broken.png", "text.png", "missing.png")]


def test_generate_shows_images_before_the_text(tiny, files: list[str], capsys) -> None:
    assert run([*ARGS, "--image", files[0], "--image", files[1]]) == 0
    (prompt,) = tiny[-1].prompts
    assert isinstance(prompt, PicturePrompt)
    first, second = prompt.pictures
    assert (first.start, first.end, second.end) == (1, 3, 5)
    assert first.key != second.key
    assert bytes(id for id in prompt if id < 256) == b"what?"
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.parametrize(
    ("index", "problem"),
    [(2, "is a broken image"), (3, "is no image: PNG, JPEG, WEBP, GIF are read"), (4, "cannot be read: No such file")],
)
def test_bad_files_are_named(tiny, files: list[str], index: int, problem: str, capsys) -> None:
    assert run([*ARGS, "--image", files[0], "--image", files[index]]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert f"--image {files[index]} {problem}" in line


def test_a_model_of_text_says_so(tiny, files: list[str], capsys) -> None:
    for model in ("tiny", "templateless"):
        assert run([*ARGS[:2], model, *ARGS[3:], "--image", files[0]]) == 2
        assert f"--image {files[0]} is an image, and this model takes text only" in capsys.readouterr().err


def test_raw_text_has_no_place_for_images(tiny, files: list[str], capsys) -> None:
    assert run([*ARGS, "--raw", "--image", files[0]]) == 2
    assert "leave --raw out" in capsys.readouterr().err
    assert not tiny


def test_nothing_is_fetched(tiny, capsys) -> None:
    assert run([*ARGS, "--image", "https://example.org/a.png"]) == 2
    assert "none is fetched" in capsys.readouterr().err


def test_a_chat_keeps_its_images(tiny, files: list[str], stdin: Callable[[bytes], None], capsys) -> None:
    stdin(f"what?\n/image {files[1]}\nand this?\nthanks\n".encode())
    assert run(["chat", "-m", "seeing", "-n", "4", "--image", files[0]]) == 0
    turns = [len(pictures_of(prompt)) for prompt in tiny[-1].prompts]
    assert turns == [1, 2, 2]
    stdin(f"/image {files[4]}\nwhat?\n".encode())
    assert run(["chat", "-m", "seeing", "-n", "4"]) == 2
    assert f"--image {files[4]} cannot be read" in capsys.readouterr().err
