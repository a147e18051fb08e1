"""The file of a repository that is the model is chosen correctly; no hub is needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropykv.errors import HubError
from entropykv.hub.listing import HubFile, Listing, listing_of
from entropykv.hub.model_choice import Reference, choose_model, parts_of, quant_of

COMMIT = "c" * 40
NAMES = ("sha", "siblings", "rfilename", "size", "lfs", "sha256", "blobId")


def listing(*paths: str) -> Listing:
    return Listing("user/model", COMMIT, tuple(HubFile(path, 10) for path in paths))


MANY = (
    "README.md",
    "m-BF16.gguf",
    "m-Q2_K.gguf",
    "m-Q4_K_M.gguf",
    "m-Q8_0.gguf",
    "mmproj-m-Q4_K_M.gguf",
)
SPLIT = ("Q8_0/a-Q8_0-00002-of-00002.gguf", "Q8_0/a-Q8_0-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("paths", "quant", "pattern", "chosen"),
    [
        (MANY, None, None, "m-Q4_K_M.gguf"),
        (MANY, "q2_k", None, "m-Q2_K.gguf"),
        (MANY, "Q8_0", None, "m-Q8_0.gguf"),
        (MANY, None, "*bf16.gguf", "m-BF16.gguf"),
        (MANY, None, "M-q8_0.GGUF", "m-Q8_0.gguf"),
        (("a-Q2_K.gguf", "a.Q8_0.gguf"), None, None, "a.Q8_0.gguf"),
        (("a-Q2_K.gguf", "a-F16.gguf"), None, None, "a-Q2_K.gguf"),
        (("mmproj-F16.gguf", "imatrix.gguf", "z.gguf"), None, None, "z.gguf"),
        (SPLIT, None, None, "Q8_0/a-Q8_0-00001-of-00002.gguf"),
        (SPLIT, None, "*00002-of-*", "Q8_0/a-Q8_0-00001-of-00002.gguf"),
        (("UD-Q4_K_M/m.gguf", "Q4_K_M.old/m.gguf"), "q4_k_m.old/", None, None),
        (("x.entropykv.gguf", "y.gguf"), None, None, "y.gguf"),
    ],
)
def test_a_model_is_chosen_as_llama_cpp_does(
    paths: tuple[str, ...], quant: str | None, pattern: str | None, chosen: str | None
) -> None:
    if chosen is None:
        with pytest.raises(HubError):
            choose_model(listing(*paths), quant, pattern)
    else:
        assert choose_model(listing(*paths), quant, pattern).path == chosen


@pytest.mark.parametrize(
    ("paths", "quant", "pattern", "says"),
    [
        (MANY, "Q6_K", None, "no GGUF file of quantisation Q6_K; it has BF16, Q2_K, Q4_K_M, Q8_0"),
        (MANY, None, "*.gguf", "has 4 models of the name '*.gguf'; it has m-BF16.gguf, m-Q2_K"),
        (MANY, None, "absent.gguf", "no GGUF file of the name 'absent.gguf'; it has m-BF16.gguf"),
        (MANY, None, "README.md", "no GGUF file of the name 'README.md'"),
        (MANY, None, "mmproj*", "mmproj-m-Q4_K_M.gguf belongs to a model and is none"),
        (("README.md",), None, None, "has no GGUF file of a model; give a repository that has one"),
        (("mmproj.gguf",), None, None, "has no GGUF file of a model"),
        (("model.safetensors",), None, None, "it has weights for transformers"),
        (("a.gguf", "b.gguf"), "Q4_0", None, "it has a.gguf, b.gguf"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(
    paths: tuple[str, ...], quant: str | None, pattern: str | None, says: str
) -> None:
    with pytest.raises(HubError, match="user/model") as caught:
        choose_model(listing(*paths), quant, pattern)
    assert says in str(caught.value)


def test_all_parts_of_a_split_model_come_in_order() -> None:
    names = [f"q/m-Q8_0-0000{n}-of-00003.gguf" for n in (2, 3, 1)]
    files = listing(*names, "q/m-Q4_0-00001-of-00002.gguf", "q/m-Q8_0-00001-of-00002.gguf")
    first = choose_model(files, None, "q/m-Q8_0-00001-of-00003.gguf")
    assert [part.path for part in parts_of(files, first)] == sorted(names)
    with pytest.raises(HubError, match=r"part 2 of 2 of q/m-Q4_0-00001-of-00002\.gguf is"):
        parts_of(files, choose_model(files, "q4_0", None))


def test_a_quantisation_is_read_from_the_end_of_a_name() -> None:
    for path, quant in (
        ("a-b-q4_k_m.gguf", "Q4_K_M"),
        ("x/a.Q8_0-00001-of-00002.gguf", "Q8_0"),
        ("model.gguf", None),
    ):
        assert quant_of(HubFile(path, 1)) == quant


@pytest.mark.parametrize(
    "text",
    ["model", "user/model/more", "user/model:", "user/../model", "/etc/passwd", "user/mo del", "",
     "https://huggingface.co/user/model", "user/model:a:b", "user/" + "m" * 200],
)  # fmt: skip
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(HubError, match="USER/MODEL"):
        Reference.parse(text)
    assert Reference.parse("us.er-1/mo_del.2:Q4_K_M") == Reference("us.er-1/mo_del.2", "Q4_K_M")
    assert Reference.parse("user/model") == Reference("user/model")


def sibling(**changes: object) -> dict[str, object]:
    return {"rfilename": "a.gguf", "size": 5, "lfs": {"sha256": "a" * 64}} | changes


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ([], "the answer is not an object"),
        ({"siblings": []}, "names no commit"),
        ({"sha": "../../etc", "siblings": []}, "names no commit"),
        ({"sha": COMMIT}, "lists no files"),
        ({"sha": COMMIT, "siblings": [5]}, "a file is not an object"),
        ({"sha": COMMIT, "siblings": [sibling(rfilename=5)]}, "a file has no name"),
        ({"sha": COMMIT, "siblings": [sibling(rfilename="a" * 2000)]}, "a file has no name"),
        ({"sha": COMMIT, "siblings": [sibling(size=None)]}, "'a.gguf' has no size"),
        ({"sha": COMMIT, "siblings": [sibling(size=-1)]}, "'a.gguf' has no size"),
        ({"sha": COMMIT, "siblings": [sibling(size=2**60)]}, "'a.gguf' has no size"),
        ({"sha": COMMIT, "siblings": [sibling()] * 20_001}, "lists 20001 files"),
    ],
)
def test_answers_that_cannot_be_right_are_refused(answer: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        listing_of("user/model", answer)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner),
    max_leaves=20,
)


@given(answer=JSON | st.fixed_dictionaries({"sha": st.just(COMMIT), "siblings": st.lists(JSON)}))
def test_any_answer_is_a_listing_or_a_value_error(answer: object) -> None:
    try:
        files = listing_of("user/model", answer).files
    except ValueError:
        return
    assert all(not file.path.startswith(("/", "..")) for file in files)


def test_paths_stay_within_the_folder() -> None:
    names = [
        "../a.gguf",
        "/a.gguf",
        "a/../b.gguf",
        "a\\b.gguf",
        "c:a.gguf",
        "a//b",
        "a\n.gguf",
        ".",
    ]
    siblings = [sibling(rfilename=name) for name in (*names, "x/y.gguf")]
    found = listing_of("user/model", {"sha": COMMIT, "siblings": siblings})
    assert [file.path for file in found.files] == ["x/y.gguf"]
    other = listing_of("u/m", {"sha": COMMIT, "siblings": [sibling(lfs={"sha256": "../x"})]})
    assert other.files[0].digest is None
