"""Convert the 1.58-bit model of a repository once, and keep the result beside the download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from entropykv.convert.conversion import Estimate, convert
from entropykv.convert.known import known_models
from entropykv.errors import EntropyKVError, HubError
from entropykv.hub.listing import HubFile, Listing
from entropykv.hub.model_choice import CONVERTED

Tell = Callable[[str], object]
"""Called with a note for the user."""

_READ_ENDINGS = (".json", ".safetensors", "tokenizer.model")
"""Endings of the files that the conversion of a checkpoint may read."""


def is_known(repo: str) -> bool:
    """Tell whether `entropykv models --known` lists a repository, as a model or its variant."""
    return any(repo in (model.name, *model.variants) for model in known_models())


def checkpoint_of(listing: Listing) -> list[HubFile]:
    """Return the files of a known repository that the conversion of its checkpoint may read."""
    return [
        file for file in listing.files if file.folder == "." and file.path.endswith(_READ_ENDINGS)
    ]


def converted_name(listing: Listing, model: HubFile | None) -> str:
    """Return the path, within the repository's folder, of the converted file.

    `model`: the GGUF file that is converted, from which the name is derived; None for a checkpoint.
    """
    if model is None:
        return f"{listing.repo.rpartition('/')[2]}{CONVERTED}"
    return str(PurePosixPath(model.path).with_suffix(CONVERTED))


def convert_once(source: Path, target: Path, repo: str, tell: Tell) -> None:
    """Convert a checkpoint's folder or an I2_S file to `target`; raises HubError if that fails.

    The user is told before the conversion starts, and a progress bar on stderr shows it.
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
                force=True,  # Another process may have made the same file meanwhile.
                progress=show,
                started=announce,
            )
        except EntropyKVError as error:
            raise HubError(f"{repo} cannot be converted: {error}") from error
