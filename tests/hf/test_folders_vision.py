"""Folders of models that see through the library's front door, against the model's own `generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.errors import ForedraftError, ParameterError, PromptTooLongError
from foredraft.models.hf import model as hf_model
from foredraft.models.hf.encodings import Encodings
from foredraft.types import pictures_of
from tests.models.eyes import data_url, file_of, url_part
from tests.models.hf.folders import write_folder as write_text_folder
from tests.models.hf.vision_zoo import VOCAB, model, picture, processor, tokenizer, write_folder

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
NAMES = ("llava", "qwen2_vl", "qwen2_5_vl", "idefics3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NAME, and NAME-draft of the same processor; text-draft."""
    path = tmp_path_factory.mktemp("seeing")
    for name in (*NAMES, "qwen3_vl"):
        write_folder(path / name, name)
    for name in NAMES:
        write_folder(path / f"{name}-draft", name, amount=0.02)
    write_text_folder(
        path / "text-draft", seed=3, tokenizer=tokenizer("llava"), padding=VOCAB - len(tokenizer("llava"))
    )
    return path


def load(folders: Path, name: str, spec: str = "ngram", **options: Any) -> LLM:
    draft = {"seeing": f"model:{folders / name}-draft", "text": f"model:{folders / 'text-draft'}"}.get(spec, spec)
    return LLM(folders / name, draft, adaptive=False, num_speculative_tokens=4, **options)


def ask(text: str, *images: Any) -> list[dict[str, Any]]:
    """The text is cut where an image belongs."""
    first, *rest = text.split("|")
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
    for image, piece in zip(images, rest, strict=True):
        parts += [url_part(image), {"type": "text", "text": piece}]
    return [{"role": "user", "content": parts}]


CHATS = [
    (ask("what is |?", picture(1)), [picture(1)]),
    (ask("what is |?", picture(2)), [picture(2)]),
    ([{"role": "user", "content": "nothing to see"}], []),
    (ask("is | or | larger?", picture(1), picture(3, 40, 16)), [picture(1), picture(3, 40, 16)]),
]


def own_ids(name: str, messages: list[dict[str, Any]], images: list[Any], num_tokens: int = 20) -> list[int]:
    """Of the library, by its own template, processor and `generate`."""
    plain = [
        {**m, "content": [p if p["type"] == "text" else {"type": "image"} for p in m["content"]]}
        if isinstance(m["content"], list)
        else m
        for m in messages
    ]
    text = tokenizer(name).apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    inputs = processor(name)(text=text, images=images or None, return_tensors="pt")
    options = {"do_sample": False, "max_new_tokens": num_tokens, "eos_token_id": None}
    output = model(name).generate(**inputs, **options)
    return [int(token) for token in output[0, inputs["input_ids"].shape[1] :]]


@pytest.mark.parametrize(
    ("name", "spec"), [*((name, "seeing") for name in NAMES), ("qwen2_vl", "ngram"), ("llava", "text")]
)
def test_greedy_ids_are_generates(folders: Path, name: str, spec: str) -> None:
    wanted = [own_ids(name, *chat) for chat in CHATS]
    assert wanted[0] != wanted[1]
    with load(folders, name, spec) as llm:
        prompts = [llm.render_chat(messages) for messages, _ in CHATS]
        for _ in range(2):  # one after the other, then from the cache
            assert [list(llm.chat(messages, GREEDY)[0].token_ids) for messages, _ in CHATS] == wanted
        assert [list(c.token_ids) for c in llm.generate(prompts, GREEDY)] == wanted
        llm.engine.check_integrity()
    with load(folders, name, spec, enable_prefix_caching=False, kv_cache_tokens=256) as small:
        assert [list(c.token_ids) for c in small.generate([*prompts, *prompts], GREEDY)] == [*wanted, *wanted]


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_preempted_requests_keep_their_images(folders: Path, name: str) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    wanted = [own_ids(name, *chat, num_tokens=120) for chat in CHATS]
    with load(folders, name, "seeing", kv_cache_tokens=288) as llm:
        prompts = [llm.render_chat(messages) for messages, _ in CHATS]
        assert [list(c.token_ids) for c in llm.generate(prompts, long)] == wanted
        assert llm.snapshot().num_preemptions > 0


def test_a_later_turn_reuses_the_image(folders: Path) -> None:
    with load(folders, "llava") as llm:
        first = [{"role": "system", "content": "You are a painter." * 3}, *ask("what is |?", picture(1))]
        (answer,) = llm.chat(first, GREEDY)
        turn = [*first, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "and now?"}]
        (later,) = llm.chat(turn, GREEDY)
        assert later.usage.num_cached_tokens >= answer.usage.prompt_tokens // 32 * 32 > 32
        other = [first[0], *ask("what is |?", picture(2))]
        (picture_of_other,) = pictures_of(llm.render_chat(other))
        shared = picture_of_other.start // 32 * 32
        assert llm.chat(other, GREEDY)[0].usage.num_cached_tokens == shared > 0


def count_encodings(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by a name whenever the target or the draft looks at an image."""
    seen: list[str] = []
    read = hf_model.read_picture

    def count(model: Any, picture: Any, name: str) -> Any:
        seen.append(name)
        return read(model, picture, name)

    monkeypatch.setattr(hf_model, "read_picture", count)
    assert llm.model.name == "llava"
    return seen


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}], ids=["shared prefixes", "each alone"])
def test_an_image_is_encoded_once(folders: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By each model, for all turns and requests that show it."""
    with load(folders, "llava", "seeing", **options) as llm:
        seen = count_encodings(llm, monkeypatch)
        first = ask("what is |?", picture(1))
        (answer,) = llm.chat(first, GREEDY)
        assert sorted(seen) == ["llava", "llava-draft"]
        turn = [*first, {"role": "assistant", "content": "a cat"}, {"role": "user", "content": "and now?"}]
        (later,) = llm.chat(turn, GREEDY)
        (again,) = llm.chat(first, GREEDY)
        assert again.token_ids == answer.token_ids
        assert len(seen) == 2
        both = ask("is | or | larger?", picture(1), picture(2))
        llm.chat(both, GREEDY)
        assert sorted(seen) == ["llava", "llava", "llava-draft", "llava-draft"]
    with load(folders, "llava", "seeing", **options) as fresh:
        assert fresh.chat(turn, GREEDY)[0].token_ids == later.token_ids
        assert list(fresh.chat(both, GREEDY)[0].token_ids) == own_ids("llava", both, [picture(1), picture(2)])


def test_without_room_images_are_encoded_again(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_model, "Encodings", lambda: Encodings(max_bytes=0))
    with load(folders, "llava", "none") as llm:
        seen = count_encodings(llm, monkeypatch)
        ids = [llm.chat(CHATS[0][0], GREEDY)[0].token_ids for _ in range(2)]
        assert ids[0] == ids[1]
        assert seen == ["llava", "llava"]


def test_a_draft_that_sees_is_accepted_more_often(folders: Path) -> None:
    rates = []
    for spec in ("text", "seeing"):
        with load(folders, "qwen2_5_vl" if spec == "seeing" else "llava", spec) as llm:
            (done,) = llm.chat(CHATS[0][0], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
            rates.append(done.speculation.num_accepted_tokens)
    assert rates[1] > 5


def test_paths_and_images_of_pillow(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(file_of(picture(1)))
    with load(folders, "llava") as llm:
        wanted = llm.render_chat(ask("what is |?", picture(1)))
        for image in (tmp_path / "a.png", str(tmp_path / "a.png"), picture(1), data_url(file_of(picture(1)))):
            parts = [
                {"type": "text", "text": "what is "},
                {"type": "image", "image": image},
                {"type": "text", "text": "?"},
            ]
            prompt = llm.render_chat([{"role": "user", "content": parts}])
            assert list(prompt) == list(wanted)
            assert llm.generate(prompt, GREEDY)[0].token_ids == llm.generate(wanted, GREEDY)[0].token_ids


def test_letters_of_an_image_token_are_letters(folders: Path) -> None:
    with load(folders, "llava") as llm:
        prompt = llm.render_chat(ask("<image> is |", picture(1)))
        assert list(prompt).count(llm.images.image_token_id if llm.images else -1) == 16
        text = llm.render_chat([{"role": "user", "content": "<image>"}])
        assert list(text).count(llm.images.image_token_id if llm.images else -1) == 0


def test_models_that_cannot_be_carried_read_text(folders: Path) -> None:
    with load(folders, "qwen3_vl") as llm:
        with pytest.raises(ParameterError, match=r"takes none here: .* hands its decoder deepstack_visual_embeds"):
            llm.chat(ask("what is |?", picture(1)), GREEDY)
        assert list(llm.chat(CHATS[2][0], GREEDY)[0].token_ids) == own_ids("qwen3_vl", *CHATS[2])


def test_a_template_without_images(folders: Path, tmp_path: Path) -> None:
    path = write_folder(tmp_path / "blind", "llava")
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with LLM(path) as llm:
        with pytest.raises(ParameterError, match="takes none here: its chat template writes none"):
            llm.chat(ask("what is |?", picture(1)), GREEDY)
        assert llm.chat(CHATS[2][0], GREEDY)[0].usage.prompt_tokens == len(llm.tokenizer.encode("nothing to see"))


def test_a_folder_without_a_processor(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "blind", "llava")
    (path / "processor_config.json").unlink()
    with LLM(path) as llm:
        with pytest.raises(ParameterError, match="is an image, and this model takes none here"):
            llm.chat(ask("what is |?", picture(1)), GREEDY)
        assert llm.chat(CHATS[2][0], GREEDY)[0].token_ids


def test_bad_images_are_refused_and_others_go_on(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.models.images.MAX_RATIO", 1000)
    with load(folders, "qwen2_vl") as llm:
        running = llm.stream_chat(CHATS[0][0], GREEDY)
        first = next(running)
        flat = picture(1, 1000, 4)  # an aspect ratio that Qwen refuses
        with pytest.raises(
            ParameterError, match=r"content\[1\] cannot be read by the model's processor: absolute aspect"
        ):
            llm.chat(ask("what is |?", flat), GREEDY)
        broken = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(b"no")}}]}]
        with pytest.raises(ParameterError, match="is no image"):
            llm.chat(broken, GREEDY)
        rest = [token for chunk in running for token in chunk.token_ids]
        assert [*first.token_ids, *rest] == own_ids("qwen2_vl", *CHATS[0])


def test_images_count_as_tokens_of_the_prompt(folders: Path) -> None:
    with load(folders, "llava", max_model_len=64) as llm, pytest.raises(PromptTooLongError, match="context holds 64"):
        llm.chat(ask("|" * 4, *[picture(i) for i in range(4)]), GREEDY)


def test_an_encoder_that_fails_ends_its_own_request(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(folders, "llava") as llm:
        good = llm.stream_chat(CHATS[2][0], GREEDY)
        tower = llm.model.transformers_model.model.vision_tower  # type: ignore[attr-defined]
        monkeypatch.setattr(tower, "forward", lambda *_, **__: 1 // 0)
        with pytest.raises(ForedraftError, match="could not read an image: integer division"):
            llm.chat(CHATS[0][0], GREEDY)
        assert [token for chunk in good for token in chunk.token_ids] == own_ids("llava", *CHATS[2])


def test_prompts_with_images_are_sampled_by_seed(folders: Path) -> None:
    params = SamplingParams(seed=5, n=2, max_tokens=16, ignore_eos=True)
    texts = []
    for spec in ("none", "seeing"):
        with load(folders, "llava", spec) as llm:
            texts.append([c.token_ids for c in llm.chat(CHATS[3][0], params)])
    assert texts[0] == texts[1]


def test_the_draft_s_processor_is_looked_at(folders: Path, tmp_path: Path) -> None:
    """A draft with eyes of another size reads the text."""
    path = write_folder(tmp_path / "other", "llava", amount=0.02)
    settings = json.loads((path / "processor_config.json").read_text())
    settings["image_processor"]["image_mean"] = [0.1, 0.1, 0.1]
    (path / "processor_config.json").write_text(json.dumps(settings))
    for draft, sees in ((folders / "llava-draft", True), (path, False), (folders / "text-draft", False)):
        with LLM(folders / "llava", f"model:{draft}", adaptive=False) as llm:
            assert llm.engine.drafters[0].sees is sees  # type: ignore[attr-defined]
            assert list(llm.chat(CHATS[0][0], GREEDY)[0].token_ids) == own_ids("llava", *CHATS[0])
