"""Load a GGUF model with llama.cpp: its vocabulary, its tokenizer, and contexts made from it."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import llama_cpp
from llama_cpp import _logger as llama_logger

from entropykv import _core
from entropykv.chat.chat_template import ChatTemplate, Messages, TemplateError
from entropykv.constraint.vocabulary import TokenTexts, read_token_texts
from entropykv.errors import ContextError, EntropyKVError, ModelFileError, SettingsError
from entropykv.llamacpp.foreign_text import MARK, ControlNames, Run
from entropykv.llamacpp.model_options import (
    NUMA_STRATEGIES,
    LoadOptions,
    LoraAdapters,
)
from entropykv.model.geometry import ModelGeometry, read_loadable
from entropykv.model.header import way_out_of
from entropykv.model.identity import identity_of
from entropykv.thinking.tags import AnswerFrame, ThoughtTags

NO_TEMPLATE = (
    "the model has no chat template, so it continues what is said as plain text; give a template "
    "that it was trained with (--chat-template-file), or take a model that was trained to chat"
)


def plain_chat(texts: Iterable[str]) -> str:
    """Return the prompt of a chat: what was said, each text on a line of its own."""
    return "\n".join(texts)


def plain_messages(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return the prompt of a chat that is given as messages of `role` and `content`.

    An answer stands directly behind the text that it continues, as the model has written it.
    Otherwise the next turn would not begin with what was read and written in this one.
    """
    lines: list[str] = []
    for message in messages:
        text = str(message["content"] or "")
        if lines and message.get("role") == "assistant":
            lines[-1] += text
        else:
            lines.append(text)
    return plain_chat(lines)


def serves_products() -> bool:
    """Tell whether the extension's kernels compute products of quantised weights.

    They do not if the CPU has AMX, or if llama.cpp was built for a device, because the kernels of
    llama.cpp are faster then.
    """
    has_amx = b"AMX_INT8 = 1" in llama_cpp.llama_print_system_info()
    offloads = llama_cpp.llama_supports_gpu_offload()
    return bool(_core.product_kernels()) and not has_amx and not offloads


def reads_blocks() -> bool:
    """Tell whether all weights stay in the file's layout, which the extension's kernels need.

    llama.cpp repacks some types for its own kernels while it loads them: this takes memory in
    addition to the file, and only llama.cpp can read the result. On ARM, repacking is allowed,
    because nobody has compared llama.cpp's kernels with the extension's there; the extension
    computes the types that are not repacked.
    """
    is_arm = any(name.startswith("neon") for name in _core.product_kernels())
    return serves_products() and not is_arm


class Weights:
    """Count the owners and the running calls of a loaded model, and free it after the last of them.

    An owner holds the weights from share() to release(). A call that reads them, such as a
    tokenization, holds them within `with weights:`, so that another thread that closes the model
    cannot free them during the call.
    """

    def __init__(self, free: Callable[[], object]) -> None:
        """Start with one owner; `free` is called once, by the thread that ends last."""
        self._free = free
        # Reentrant, because the garbage collector may run in a thread that holds the lock.
        self._lock = threading.RLock()
        self._owners = 1
        self._calls = 0

    def share(self) -> Weights:
        """Add an owner, and return these weights; raises EntropyKVError if they are closed."""
        with self._lock:
            self._check_open()
            self._owners += 1
        return self

    def release(self) -> None:
        """Remove an owner; without owners, new calls are refused, and running ones are the last."""
        self._end(owners=1)

    def __enter__(self) -> None:
        """Begin a call that reads the weights; raises EntropyKVError if they are closed."""
        with self._lock:
            self._check_open()
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        """End the call; the last one after release() frees the weights."""
        self._end(calls=1)

    def _end(self, *, owners: int = 0, calls: int = 0) -> None:
        with self._lock:
            self._owners -= owners
            self._calls -= calls
            is_last = self._owners == 0 and self._calls == 0
        if is_last:
            self._free()

    def _check_open(self) -> None:
        if self._owners == 0:
            raise EntropyKVError("the model is closed; load it again")


class Model:
    """Hold weights and vocabulary; raises ModelFileError where the file cannot be loaded.

    After close(), methods that read the weights or the vocabulary raise EntropyKVError.
    """

    _options = LoadOptions()
    _adapters: LoraAdapters | None = None
    _is_closed = False
    _token_texts: TokenTexts | None = None
    _reading = threading.Lock()
    """A lock of all models, with which one thread at a time reads the texts of tokens."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_gpu_layers: int,
        verbose: bool,
        options: LoadOptions | None = None,
        repack: bool = False,
        geometry: ModelGeometry | None = None,
    ) -> None:
        """Read the header, then load the weights (memory-mapped unless `options` say otherwise).

        `geometry`: the result of read_loadable(), if the header was already read. `repack`: let
        llama.cpp repack weights for its own kernels, which then nobody else can read. `verbose`:
        whether llama.cpp prints its log from now on, for all models.
        """
        llama_logger.set_verbose(verbose)
        self.geometry: ModelGeometry = geometry or read_loadable(path)
        self._options = options or LoadOptions()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = offloaded_layers(n_gpu_layers)
        arrays = self._options.apply(parameters)
        parameters.use_extra_bufts = repack or not reads_blocks()
        llama_cpp.llama_backend_init()
        if self._options.numa is not None:
            llama_cpp.llama_numa_init(NUMA_STRATEGIES[self._options.numa])
        with captured_log() as log:
            self.handle = llama_cpp.llama_model_load_from_file(
                os.fsencode(self.geometry.path), parameters
            )
        del arrays  # llama.cpp has copied the arrays.
        if not self.handle:
            reason = last_error(log)
            way_out = way_out_of(
                reason, "check that it is complete and of an architecture that llama.cpp knows"
            )
            raise ModelFileError(
                f"{self.geometry.path}: llama.cpp cannot load this file ({reason}); {way_out}"
            )
        self._weights = Weights(functools.partial(llama_cpp.llama_model_free, self.handle))
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.handle)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self.vocabulary)
        if self._options.adapters:
            try:
                self._adapters = LoraAdapters(self.handle, self._options.adapters)
            except ModelFileError:
                self.close()
                raise

    def metadata(self, key: str) -> str | None:
        """Return the metadata value under a key of the model's architecture as text, of which only
        the first 63 bytes are read; None if the key is missing.
        """
        buffer = ctypes.create_string_buffer(64)
        name = f"{self.geometry.architecture}.{key}".encode()
        with self._weights:
            size = llama_cpp.llama_model_meta_val_str(self.handle, name, buffer, len(buffer))
        return buffer.value.decode("utf-8", errors="replace") if size >= 0 else None

    @property
    def name(self) -> str:
        """Return the model's name, or the name of its file."""
        return self.geometry.name or self.geometry.path.name

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Return the identity of the file, see identity_of(); the file is read only once."""
        return identity_of(self.geometry)

    def token_texts(self) -> TokenTexts:
        """Return the texts of all tokens, for constraints; they are read only once.

        The caller must hold the weights while it uses the result: see in_use().
        """
        with self._reading:
            if self._token_texts is None:
                with self._weights:
                    self._token_texts = read_token_texts(self.vocabulary)
            return self._token_texts

    def in_use(self) -> Weights:
        """Return a context manager that keeps the weights while a call reads text or samples.

        Entering it raises EntropyKVError if the model is closed.
        """
        return self._weights

    def share(self) -> Model:
        """Return another Model of the same weights, which must be closed, too; the last one that is
        closed frees the weights. Raises EntropyKVError if this one is closed.
        """
        other = copy.copy(self)
        other._weights = self._weights.share()  # noqa: SLF001  (it is a Model, too)
        return other

    def close(self) -> None:
        """Refuse further calls, and free the weights when the last running call ends, unless they
        have another owner.

        Contexts that were made from the weights must be closed before.
        """
        if not self._is_closed:
            self._is_closed = True
            self._weights.release()

    @functools.cached_property
    def control_names(self) -> ControlNames:
        """Return the names of the control tokens; the vocabulary is searched only once."""
        with self._weights:
            return ControlNames.of_vocabulary(self.vocabulary)

    def said(self, value: Any, *, is_answer: bool = False) -> Any:
        """Return texts of users, tools or documents, also within lists and objects, marked so that
        tokenize() reads no control token in them.

        `is_answer`: the texts are of the model, so that tags of thoughts stay control tokens. With
        LoadOptions.parse_special, the texts are returned unchanged.
        """
        if self._options.parse_special:
            return value
        tags = self.thought_tags if is_answer else None
        return self.control_names.marked(value, () if tags is None else tags.control)

    def tokenize(self, text: str, *, add_bos: bool, special: bool) -> list[int]:
        """Return the tokens of a text; `special` recognises control tokens such as <|im_start|>,
        but none within what said() has marked. `add_bos`: put a BOS token first if the model wants
        one.
        """
        if MARK not in text:
            return self._tokenize(text, add_bos=add_bos, special=special)
        runs = self.control_names.runs(text) if special else [Run(text.replace(MARK, ""), False)]
        tokens: list[int] = []
        for number, run in enumerate(runs):
            begins = add_bos and number == 0
            tokens += self._tokenize(run.text, add_bos=begins, special=run.special)
        return tokens

    def tokenize_within(self, text: str) -> list[int]:
        """Return the tokens of a text that stands within another one, without control tokens."""
        return self.tokenize(text, add_bos=False, special=False)

    def _tokenize(self, text: str, *, add_bos: bool, special: bool) -> list[int]:
        return self.tokenize_bytes(text.encode("utf-8"), add_bos=add_bos, special=special)

    def tokenize_bytes(
        self, data: bytes, *, add_bos: bool = False, special: bool = False
    ) -> list[int]:
        """Return the tokens of a text that may begin within a character; `add_bos`, `special`: as
        in tokenize().
        """
        size = len(data) + 16
        while True:
            tokens = (llama_cpp.llama_token * size)()
            with self._weights:
                count = llama_cpp.llama_tokenize(
                    self.vocabulary, data, len(data), tokens, size, add_bos, special
                )
            if count >= 0:
                return tokens[:count]
            size = -count

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of one token, which may be only a part of a character; none for a
        control token unless `special`.
        """
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            with self._weights:
                count = llama_cpp.llama_token_to_piece(
                    self.vocabulary, token, buffer, size, 0, special
                )
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def detokenize(self, tokens: Sequence[int], *, special: bool) -> str:
        """Return the text of tokens, with control tokens if `special`; bytes that are not UTF-8
        become replacement characters.
        """
        pieces = (self.token_bytes(token, special=special) for token in tokens)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raise ContextError for a token that the vocabulary does not have."""
        for token in tokens:
            if not 0 <= token < self.n_vocab:
                raise ContextError(
                    f"token {token} is not in the model's vocabulary of {self.n_vocab}; "
                    "use tokens from tokenize()"
                )

    def is_end(self, token: int) -> bool:
        """Tell whether a token ends the generation."""
        with self._weights:
            return bool(llama_cpp.llama_vocab_is_eog(self.vocabulary, token))

    @property
    def bos(self) -> int:
        """Return the token that begins a text; -1 if there is none."""
        with self._weights:
            return int(llama_cpp.llama_vocab_bos(self.vocabulary))

    @property
    def eos(self) -> int:
        """Return the token that ends a text; -1 if there is none."""
        with self._weights:
            return int(llama_cpp.llama_vocab_eos(self.vocabulary))

    def token_name(self, token: int) -> str:
        """Return the text of a token, also of a control token; empty for -1."""
        return self.detokenize([token], special=True) if token >= 0 else ""

    @property
    def adds_bos(self) -> bool:
        """Tell whether texts of this model begin with a BOS token."""
        with self._weights:
            return bool(llama_cpp.llama_vocab_get_add_bos(self.vocabulary))

    def chat_prompt(self, text: str, system: str | None = None) -> str | None:
        """Return the prompt of one user turn by the model's chat template; None without a template.

        Control tokens are those of the template: see said(). The result is for tokenize().
        `system`: the system message; None: the template's own default, if it has one. Raises
        SettingsError or ModelFileError for a template that cannot be used.
        """
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return self._chat(messages)

    def chat_turn(self, text: str) -> str | None:
        """Return the text between an answer and the next one, given the next turn of the user.

        It consists of the end of the answer's turn, which is sampled but never read, the user's
        turn, and the beginning of the next answer. Returns None without a template.
        Raises SettingsError or ModelFileError for a template that cannot be used, and
        ModelFileError for one that leaves out former answers.
        """
        answer = "entropykv-answer"
        chat = self._chat(
            [
                {"role": "user", "content": "-"},
                {"role": "assistant", "content": answer},
                {"role": "user", "content": text},
            ]
        )
        if chat is None:
            return None
        _, found, turn = chat.partition(answer)
        if not found:
            raise ModelFileError(
                f"{self.geometry.path}: the model's chat template leaves out former answers, so no "
                "turn can be added to a session; use --no-chat"
            )
        return turn

    @functools.cached_property
    def chat_template(self) -> ChatTemplate | None:
        """Return the template of the options, or the model's own; None where there is neither.

        Raises SettingsError or ModelFileError for one that cannot be used.
        """
        given = self._options.chat_template
        with self._weights:
            own = llama_cpp.llama_model_chat_template(self.handle, None)
            source = given or (None if own is None else own.decode("utf-8", errors="replace"))
            if source is None:
                return None
            texts = {
                "eos": self.token_name(self.eos),
                "bos": self.token_name(self.bos),
            }
        arguments = self._options.template_arguments
        try:
            named = given is not None and "{" not in given
            return ChatTemplate(source, arguments=arguments, named=named, **texts)
        except TemplateError as error:
            raise self._unusable(error) from None

    @functools.cached_property
    def other_template(self) -> str | None:
        """Return the first digits of the SHA-256 of a chat template that was given in the place of
        the model's own; None if none was given, or the same one.
        """
        given = self._options.chat_template
        with self._weights:
            own = llama_cpp.llama_model_chat_template(self.handle, None)
        if given is None or given.encode() == own:
            return None
        return hashlib.sha256(given.encode()).hexdigest()[:32]

    def _unusable(self, error: Exception) -> EntropyKVError:
        """Return the error for a template that cannot be compiled, or refuses a chat."""
        if self._options.chat_template is not None:
            return SettingsError(
                f"the chat template cannot be used ({error}); give another with --chat-template or "
                "--chat-template-file, or leave it out"
            )
        return ModelFileError(
            f"{self.geometry.path}: the model's chat template cannot be used ({error}); "
            "use --no-chat"
        )

    @property
    def thought_tags(self) -> ThoughtTags | None:
        """Return the tags of the model's thoughts; None where its chat template has none, or
        cannot be used.
        """
        # The error is raised when a chat needs the template.
        with contextlib.suppress(SettingsError, ModelFileError):
            return None if self.chat_template is None else self.chat_template.tags
        return None

    @functools.cached_property
    def tag_tokens(self) -> dict[int, bytes]:
        """Return the texts of the control tokens that are tags of thoughts, by their tokens."""
        tags = () if self.thought_tags is None else self.thought_tags.control
        found = ((self.tokenize(text, add_bos=False, special=True), text) for text in tags)
        return {tokens[0]: text.encode() for tokens, text in found if len(tokens) == 1}

    @functools.cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """Return the tokens that end a generation; the vocabulary is searched only once."""
        with self._weights:
            is_end = llama_cpp.llama_vocab_is_eog
            return tuple(each for each in range(self.n_vocab) if is_end(self.vocabulary, each))

    @functools.cached_property
    def infill_marks(self) -> tuple[int, int, int] | None:
        """Return the tokens before a text, before what follows it, and where the text between both
        begins; None for a model that was not trained to write one.
        """
        with self._weights:
            marks = (
                llama_cpp.llama_vocab_fim_pre(self.vocabulary),
                llama_cpp.llama_vocab_fim_suf(self.vocabulary),
                llama_cpp.llama_vocab_fim_mid(self.vocabulary),
            )
        return marks if min(marks) >= 0 else None

    @functools.cached_property
    def file_marks(self) -> tuple[int, int] | None:
        """Return the tokens before the name of a project, and before each of its files; None for a
        model that was trained on single files.
        """
        with self._weights:
            marks = (
                llama_cpp.llama_vocab_fim_rep(self.vocabulary),
                llama_cpp.llama_vocab_fim_sep(self.vocabulary),
            )
        return marks if min(marks) >= 0 else None

    @property
    def answer_frame(self) -> AnswerFrame:
        """Return what the chat template writes before an answer, at first and in later turns:
        nothing without a template. Raises as chat_template does.
        """
        return AnswerFrame() if self.chat_template is None else self.chat_template.frame()

    def _chat(self, messages: list[dict[str, str]]) -> str | None:
        template = self.chat_template
        if template is None:
            return None
        try:
            return self.chat_text(messages)
        except (TemplateError, ValueError, TypeError) as error:
            raise self._unusable(error) from None

    def chat_text(
        self,
        messages: Messages,
        *,
        tools: Sequence[Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        opens_answer: bool = True,
    ) -> str:
        """Return the prompt of a chat by the template, or line by line without one, for tokenize().

        Control tokens are those of the template: see said(). `tools` and `arguments`: what the
        template gets besides messages. `opens_answer`: the prompt ends with the beginning of an
        answer. Raises the errors of ChatTemplate.render() and of chat_template.
        """
        said = [self.said(dict(m), is_answer=m.get("role") == "assistant") for m in messages]
        template = self.chat_template
        if template is None:
            return plain_messages(said)
        return template.render(
            said,
            tools=None if tools is None else self.said(list(tools)),
            arguments=self.said(dict(arguments or {})),
            opens_answer=opens_answer,
        )

    def context_defaults(self) -> Any:
        """Return llama.cpp's context parameters for this model, which a store then changes."""
        parameters = llama_cpp.llama_context_default_params()
        parameters.no_perf = True
        for name, value in self._options.rope.items():
            setattr(parameters, name, value)
        return parameters

    def new_context(self, parameters: Any) -> Any:
        """Make a llama_context; raises ModelFileError with llama.cpp's reason if that fails."""
        with captured_log() as log:
            context = llama_cpp.llama_init_from_model(self.handle, parameters)
        if not context:
            raise ModelFileError(
                f"{self.geometry.path}: llama.cpp cannot make a context ({last_error(log)}); "
                "try a smaller context or micro-batch"
            )
        if self._adapters:
            self._adapters.apply(context)
        return context


def offloaded_layers(n_gpu_layers: int) -> int:
    """Return how many layers are requested on a device: 0 if llama.cpp was built without one."""
    return n_gpu_layers if llama_cpp.llama_supports_gpu_offload() else 0


@contextlib.contextmanager
def captured_log(
    set_log: Callable[..., object] = llama_cpp.llama_log_set,
) -> Iterator[list[tuple[int, str]]]:
    """Collect a log as pairs (level, text) instead of printing it: llama.cpp's, or that of another
    library whose `set_log` takes the same function.
    """
    lines: list[tuple[int, str]] = []

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def collect(level: int, text: bytes, _user_data: Any) -> None:
        lines.append((level, text.decode("utf-8", errors="replace")))

    set_log(collect, ctypes.c_void_p(0))
    try:
        yield lines
    finally:
        set_log(llama_logger.llama_log_callback, ctypes.c_void_p(0))


def last_error(log: list[tuple[int, str]]) -> str:
    """Return the first error of a captured log, because later ones only repeat it."""
    error_level = 4
    errors = [text.strip() for level, text in log if level == error_level and text.strip()]
    return errors[0] if errors else "no reason given"
