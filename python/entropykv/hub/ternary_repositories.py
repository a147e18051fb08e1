"""Convert what repositories of 1.58-bit models have, once, and keep the result beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from entropykv.convert.conversion import convert
from entropykv.convert.estimate import Estimate
from entropykv.convert.known import known_models
from entropykv.errors import EntropyKVError, HubError
from entropykv.hub.listing import HubFile, Listing
from entropykv.hub.model_choice import CONVERTED

Tell = Callable[[str], object]
"""What is called with a sentence for the user."""

_READ = (".json", ".safetensors", "tokenizer.model")
"""How the names of files end that the conversion of a checkpoint may read."""


def is_known(repo: str) -> bool:
    """Tell whether `entropykv models --known` lists a repository, as a model or its variant."""
    return any(repo in (model.name, *model.variants) for model in known_models())


def checkpoint_of(listing: Listing) -> list[HubFile]:
    """Return what of a known repository the conversion of its checkpoint may read."""
    return [file for file in listing.files if file.folder == "." and file.path.endswith(_READ)]


def converted_name(listing: Listing, model: HubFile | None) -> str:
    """Return the path in the repository's folder that a conversion is kept under.

    `model`: a GGUF file, which it has the name of; None for the whole checkpoint.
    """
    if model is None:
        return f"{listing.repo.rpartition('/')[2]}{CONVERTED}"
    return str(PurePosixPath(model.path).with_suffix(CONVERTED))


def convert_once(source: Path, target: Path, repo: str, tell: Tell) -> None:
    """Convert a checkpoint's folder or an I2_S file to `target`; raises HubError.

    The work is announced before it starts, and shown on stderr as downloads are.
    """
    with tqdm(desc="converting", unit="B", unit_scale=True, leave=False, delay=0.5) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        def announce(expected: Estimate) -> None:
            tell(
                f"converting {repo} once, for stock llama.cpp: "
                f"{expected.target_bytes / 2**20:,.1f} MiB to {target}, about "
                f"{expected.seconds:.0f} s"
            )

        try:
            convert(
                source,
                target,
                force=True,  # another process may have made it by now: both are the same
                progress=show,
                started=announce,
            )
        except EntropyKVError as error:
            raise HubError(f"{repo} cannot be converted: {error}") from error
