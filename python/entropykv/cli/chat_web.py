"""`entropykv chat --web`: hold the conversation in a browser, with a server on this machine."""

from __future__ import annotations

import argparse
import threading
from typing import TYPE_CHECKING, Any

from entropykv.cli.engine import kv_type_of, model_options_of
from entropykv.cli.options import CONTEXT, demo_of, fetch_named
from entropykv.cli.terminal import say
from entropykv.errors import ContextError, SettingsError
from entropykv.files import read_text
from entropykv.llamacpp.model_options import LoadOptions
from entropykv.model.geometry import read_geometry
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.freezing import Freezing
from entropykv.settings.options import Budget, declared
from entropykv.settings.sampling import Sampling

if TYPE_CHECKING:
    from entropykv.server import ModelOptions

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Options of `chat` that are fields of a request, and that the page shows."""
_REASONING = (
    *("reasoning", "reasoning_format", "reasoning_budget", "reasoning_budget_message"),
    "reasoning_effort",
)
"""Options of `chat` that `serve` has under the same names."""
_ELSEWHERE = {
    "load_session": "--load-session",
    "no_chat": "--no-chat",
    "prompt": "-p",
    "file": "-f",
    "single_turn": "-st",
    "reverse_prompt": "-r",
    "ignore_eos": "--ignore-eos",
    "recovery": "--recovery",
    "show_thoughts": "--show-thoughts",
    "image": "--image",
}
"""Options of `chat` that are refused with --web, and how they are spelt in the error."""


def chat_in_browser(options: argparse.Namespace, sampling: Sampling) -> int:
    """Serve the page on a free port of this machine, and open it in a browser; returns at Ctrl-C.

    Raises SettingsError for options that only the terminal supports, and MissingExtraError without
    the extra server.
    """
    _check(options, sampling)
    from entropykv.server import ServerOptions  # noqa: PLC0415
    from entropykv.server.http.running import serve  # noqa: PLC0415
    from entropykv.server.page.routes import WebDefaults  # noqa: PLC0415

    demo = demo_of(options)
    page = WebDefaults(system=options.system, sampling=_sampling_of(options))
    if demo is not None and page.system is None:
        page.system, page.question = read_text(str(demo.document), ContextError), demo.question
    server = ServerOptions(
        host="127.0.0.1", port=0, api_key=None, api_key_file=None, log_requests=False
    )
    fetch_named(options)
    serve(_model_options(options), server, page, _open)
    return 0


def _check(options: argparse.Namespace, sampling: Sampling) -> None:
    """Raise SettingsError for an option that was given but would have no effect."""
    for name, option in _ELSEWHERE.items():
        if getattr(options, name):
            raise SettingsError(f"{option} works only in the terminal; leave it out with --web")
    shown = {name: getattr(sampling, name) for name in (*_SAMPLING, "seed")}
    if sampling != Sampling(**shown):
        raise SettingsError(
            "the page of --web has temperature, top-p, top-k, min-p, penalties and seed; leave "
            "other samplers, biases and grammars out"
        )
    tuning = model_options_of(options)
    plain = LoadOptions(use_mmap=tuning.use_mmap, use_mlock=tuning.use_mlock, adapters=[])
    if tuning != plain:
        raise SettingsError(
            "--web loads the model as its file says; for LoRA adapters, RoPE, GPUs and templates "
            "use entropykv serve, whose page is the same"
        )


def _model_options(options: argparse.Namespace) -> ModelOptions:
    from entropykv.server import ModelOptions  # noqa: PLC0415

    given: dict[str, Any] = {
        each.server_name: getattr(options, each.name)
        for owner in (CacheOptions, Freezing)
        for each in declared(owner).values()
        if hasattr(options, each.name)
    }
    if options.ctx_size is None:
        trained = read_geometry(options.model).n_ctx_train
        budget = Budget.parse(options.kv_budget).of_context(trained)
        given |= {"n_ctx": CONTEXT, "kv_budget": str(budget)}
    given |= {name: getattr(options, name) for name in _REASONING}
    given["n_ubatch"] = min(options.ubatch_size, options.batch_size)
    given["kv_type"] = kv_type_of(options)
    tuning = model_options_of(options)
    return ModelOptions(
        model=str(options.model),
        n_batch=options.batch_size,
        use_mmap=tuning.use_mmap,
        use_mlock=tuning.use_mlock,
        verbose=options.verbose,
        mmproj=options.mmproj,
        **given,
    )


def _sampling_of(options: argparse.Namespace) -> dict[str, Any]:
    sampling = {name: getattr(options, name) for name in _SAMPLING}
    if options.n_predict > 0:
        sampling["max_tokens"] = options.n_predict
    if options.seed >= 0:
        sampling["seed"] = options.seed
    return sampling


def _open(url: str) -> None:
    """Open the page in a thread, because a text browser returns only when the user closes it."""
    threading.Thread(target=_open_now, args=(f"{url}/",), daemon=True).start()


def _open_now(url: str) -> None:
    import webbrowser  # noqa: PLC0415  (it looks for browsers when it is loaded)

    if not webbrowser.open(url):
        say(f"no browser was found: open {url} in one")
