"""Stand in for llama-server in its own tests: translate its command line to that of `entropykv
serve`.

Only what a user would write differently is translated:

- models of the Hub are the files that the variable PEER_MODELS names, as JSON by their repositories
- llama-server divides --ctx-size among the slots; here it is what each conversation may have
- /slots is always there, and the drafter itself decides how few tokens it drafts
- a server without a model has those of a directory
- the budget is the whole context, so that nothing is evicted that llama-server keeps
"""

from __future__ import annotations

import json
import os
import sys

_OF_MODELS = ("--hf-repo", "--hf-file", "--model-url", "--mmproj-url")
_DROPPED = ("--offline", "--no-slots")
_DROPPED_WITH_VALUE = ("--spec-draft-n-min",)


def translated(given: list[str], models: dict[str, str]) -> list[str]:
    """Return arguments of `entropykv serve` for those of llama-server; exits without the model."""
    words = list(given)
    found: dict[str, str] = {}
    rest: list[str] = []
    while words:
        word = words.pop(0)
        if word in _OF_MODELS:
            found[word] = words.pop(0)
        elif word in _DROPPED_WITH_VALUE:
            words.pop(0)
        elif word not in _DROPPED:
            rest.append(word)
    repository = found.get("--hf-repo")
    if repository is None and "--model" not in rest and "--models-dir" not in rest:
        rest += ["--models-dir", os.path.dirname(next(iter(models.values())))]
    if repository is not None:
        name = "/".join(filter(None, (repository, found.get("--hf-file"))))
        if name not in models:
            sys.exit(f"there is no model in the place of {name}; the Hub is out of reach")
        rest += ["--model", models[name]]
    if "--ctx-size" in rest and "--kv-unified" not in rest and "--parallel" in rest:
        place = rest.index("--ctx-size") + 1
        n_slots = int(rest[rest.index("--parallel") + 1])
        rest[place] = str(int(rest[place]) // n_slots)
    return [*rest, "--kv-budget", "1.0", "--threads", "1"]


def main() -> None:
    """Replace this process by the server, so that signals reach it."""
    models = json.loads(os.environ["PEER_MODELS"])
    command = [sys.executable, "-m", "entropykv.cli", "serve", *translated(sys.argv[1:], models)]
    sys.stdout.write(f"{' '.join(command)}\n")
    sys.stdout.flush()
    os.execv(sys.executable, command)  # noqa: S606


if __name__ == "__main__":
    main()
