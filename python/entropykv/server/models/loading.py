"""Load the model that the server's options name."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import llama_cpp
from llama_cpp import llama_cache, llama_chat_format, llama_tokenizer
from llama_cpp.llama_chat_format import (
    ChatFormatterResponse,
    chat_formatter_to_chat_completion_handler,
)
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from entropykv.constraint.constraint import Constraint
from entropykv.constraint.sampler import ConstraintSampler
from entropykv.constraint.trial import Trials
from entropykv.drop_in.context import BorrowedModel
from entropykv.drop_in.entropy_llama import EntropyLlama
from entropykv.errors import (
    EntropyKVError,
    PoolError,
    SessionFileError,
    SettingsError,
    UnsupportedModelError,
)
from entropykv.llamacpp.model_options import read_overrides
from entropykv.llamacpp.plain_chat import NO_TEMPLATE, plain_chat
from entropykv.model.geometry import read_chat_template
from entropykv.model.shipped import path_of_model
from entropykv.server.chat.chat_thought import ChatThought, ThinkingTemplate
from entropykv.server.chat.control_tokens import ControlTokens
from entropykv.server.chat.template_traits import TemplateTraits, template_of, traits_of
from entropykv.server.documents.asked_document import AskedDocument
from entropykv.server.engine.pool_totals import Totals
from entropykv.server.engine.prefix_cache import PrefixCache
from entropykv.server.http.errors import RequestError
from entropykv.server.http.users import SOMEBODY, Caller
from entropykv.server.options import ModelOptions
from entropykv.session.asked import cache_options_of
from entropykv.session.document import document_header
from entropykv.session.image_spans import end_of_piece
from entropykv.session.images import ImageLimits
from entropykv.session.passages import AttentionSince, Passage
from entropykv.session.pool import Pool
from entropykv.session.session import Session
from entropykv.settings.cache_options import CHECKPOINTS, CacheOptions
from entropykv.settings.recovery import WITHOUT_REWALK
from entropykv.thinking.options import ThinkingOptions
from entropykv.thinking.tags import tags_of

_OF_DEVICES = ("split_mode", "main_gpu", "tensor_split")
"""Arguments that determine how several devices share a model."""
_LLAMA_ARGUMENTS = frozenset(inspect.signature(llama_cpp.Llama.__init__).parameters)
LEAST_TEXTS = 2
"""How many texts must agree before a server keeps what they teach."""


class ServedLlama(EntropyLlama):
    """Define an EntropyLlama whose generation can be stopped."""

    checkpoint: Callable[[], None] | None = None
    """Called before every micro-batch; an exception that it raises ends the generation cleanly."""
    totals: Totals
    """Counts what it has read and written."""
    prefix_cache: PrefixCache
    """Keeps conversations between requests; serve_from() sets it."""
    latest: Session | None = None
    """The conversation that it answered last, which is in the prefix cache unless it was dropped
    there.
    """
    caller: Caller = SOMEBODY
    """The caller of the next answer, or of the current one."""
    shared_prefixes: bool = True
    """Whether texts with the same key may share prefixes: see Caller.tenant()."""
    served_name: str = ""
    """The name that clients use for the model; never a path."""
    request_defaults: Mapping[str, Any] = MappingProxyType({})
    """The server's defaults for fields that a request leaves out."""
    thinking_options: ThinkingOptions = ThinkingOptions()
    """The server's options of thoughts."""
    template_defaults: Mapping[str, Any] = MappingProxyType({})
    """The server's variables for the chat template."""
    template_arguments: Mapping[str, Any] = MappingProxyType({})
    """All variables for the chat template of the next chat, besides its messages."""
    thought: ChatThought | None = None
    """The thoughts of the current chat; None if it has none, or if this is not a chat."""
    prompt_size: int = 0
    """How many tokens the prompt of the latest generation has."""
    asked: AskedDocument | None = None
    """The document that the current request asks about."""
    constrained_by: str = "grammar"
    """The field of the request that says what the answer must be."""
    n_passages: int = 0
    """How many passages of the document the current request wants to see."""
    passages: list[Passage] | None = None
    """The passages that the latest answer looked at; None if nothing measured that."""
    _attention: AttentionSince | None = None
    files: Sequence[bytes] = ()
    """The image files of the next chat; its text has a marker in the place of each image."""
    reads_only: bool = False
    """Whether the current request only reads its prompt (max_tokens 0)."""
    cached: int = 0
    """How many tokens of the prompt of the latest generation had been read before."""
    generated: int = 0
    """How many tokens the latest generation has written so far, without one that ends a text."""

    @property
    def pool(self) -> Pool:
        """Return the pool of all workers, of one conversation if the options ask for no more."""
        if self._pool is None:
            raise EntropyKVError("the model is closed; load it again")
        return self._pool

    def _pool_of(self, model: BorrowedModel, cache: CacheOptions) -> Pool:
        return super()._pool_of(model, cache) or Pool.of_one(model, cache)

    @cached_property
    def traits(self) -> TemplateTraits:
        """Return what the model's chat template shows of tools."""
        return traits_of(self)

    @cached_property
    def thinking(self) -> ThinkingTemplate | None:
        """Return the chat template of a model that thinks; None for other models."""
        return ThinkingTemplate.of(self)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """Return the control tokens of the model's vocabulary."""
        return ControlTokens.of(self)

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Return the tokens of a text; raises RequestError if tokenising would take too long."""
        if special:
            self.control_tokens.check(text)
        if self.asked is not None and self.asked.mark in text:
            _, _, behind = text.partition(self.asked.mark)
            return self.document_tokens() + super().tokenize(behind, False, special)
        files, images = self.files, self.images
        if files and images is not None and images.marker.encode() in text:
            self.files = ()
            prompt = self._image_prompt = images.tokenize(
                text.decode("utf-8"),
                files,
                add_bos=add_bos,
                most_tokens=self.n_ctx(),
                owner=self.caller.tenant(shared_prefixes=self.shared_prefixes),
                poll=self.checkpoint,
            )
            return prompt.tokens
        return super().tokenize(text, add_bos, special)

    def detokenize(
        self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        """Return the text of tokens, including control tokens that are tags of thoughts."""
        control = {} if special or self.thinking is None else self.thinking.control
        if not control or not any(token in control for token in tokens):
            return super().detokenize(tokens, prev_tokens, special)
        text, before = b"", list(prev_tokens or ())
        for is_tag, run in groupby(tokens, control.__contains__):
            part = list(run)
            text += (
                "".join(control[token] for token in part).encode()
                if is_tag
                else super().detokenize(part, before, special)
            )
            before += part
        return text

    def eval(self, tokens: Sequence[int]) -> None:
        """Read tokens; see EntropyLlama.eval().

        A prompt is cut before the part that later turns will not contain, so that they can continue
        from there.
        """
        thought = self.thought if self.generated == 0 else None
        end = 0 if thought is None else thought.tokens_before_answer(tokens, self)
        if 0 < end < len(tokens):
            self._read_in_pieces(tokens[:-end])
            self._session.keep_checkpoint()
            tokens = tokens[-end:]
        self._read_in_pieces(tokens)

    def _read_in_pieces(self, tokens: Sequence[int]) -> None:
        n_ubatch, first = self._session.n_ubatch, 0
        while True:
            n = end_of_piece(tokens[first : first + n_ubatch])
            self._read_piece(tokens[first : first + n])
            first += n
            if first >= len(tokens):
                return

    def _read_piece(self, tokens: Sequence[int]) -> None:
        """Read a micro-batch; conversations that cannot be swapped out are dropped."""
        while True:
            if self.checkpoint is not None:
                self.checkpoint()
            if self._session.position == self.n_tokens:
                self.prefix_cache.reads(self._session, len(tokens))
            try:
                if self.n_passages and self._attention is None:
                    self._attention = AttentionSince(self._session)
                return super().eval(tokens)
            except PoolError as error:
                if self.checkpoint is not None:
                    self.checkpoint()
                if not self.prefix_cache.forget_one():
                    raise RequestError(503, str(error)) from error

    def counts(self) -> tuple[int, int]:
        """Return how many tokens were read and written so far."""
        return self.totals.prompt_tokens, self.totals.generated_tokens

    def document_tokens(self) -> list[int]:
        """Return the tokens of the document that the current request asks about; raises
        RequestError.
        """
        asked = self.asked
        if asked is None:
            return []
        try:
            return self.prefix_cache.open_document(asked.path, self.caller)
        except EntropyKVError as error:
            raise asked.refusal(error) from None

    def check_files_shown(self) -> None:
        """Raise RequestError if a chat has images, but the template left out their markers."""
        if self.files:
            raise RequestError(
                400,
                "messages: the model's chat template does not show the images; start the server "
                "with one that does (--chat-template)",
                param="messages",
            )

    def interrupt(self) -> None:
        """Cancel waiting tokens, in whatever thread they wait."""
        self._session.interrupt()

    def serve_from(self, prefix_cache: PrefixCache) -> None:
        """From now on, take each request's conversation from a prefix cache, and return it
        afterwards.
        """
        self.prefix_cache, self.latest = prefix_cache, None
        self.totals = Totals()
        self._idle = self._session
        if self.pool.holds_one:  # Its place is for conversations; nothing else is read meanwhile.
            self._idle.close()

    def _create_completion(self, prompt: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        """Generate in the conversation that the prompt continues."""
        self.check_files_shown()
        caller = self.caller
        anew = options.get("echo") and options.get("logprobs") is not None
        tokens = [] if anew else list(self._tokens_of(prompt))
        asked = self.asked
        try:
            session = self.prefix_cache.take(
                tokens,
                caller,
                self.checkpoint,
                lambda held: self._goes_on_from(held, tokens),
                None if asked is None else asked.path,
                reads_question=self.n_passages > 0,
            )
        except (PoolError, SessionFileError) as error:
            if asked is None:
                raise
            raise asked.refusal(error) from None
        before = session.stats()
        try:
            self._hold(session)
            self._reader.reads_question = self.n_passages > 0
            for chunk in super()._create_completion(prompt, *arguments, **options):
                if self.n_passages and chunk["choices"][0]["finish_reason"] is not None:
                    self.passages = self._looked_at()
                yield chunk
        finally:
            if self._attention is not None:
                self._attention.close()
                self._attention = None
            self._hold(self._idle)
            self.prefix_cache.gives_up(session)
            now = session.stats()
            self.totals.add(before, now)
            if not session.is_whole:
                session.close()
            else:
                self.latest = session
                self.prefix_cache.put(session, caller, self._answer_place(session))

    def _looked_at(self) -> list[Passage] | None:
        """Return the passages of the document that the answer looked at, while it is held."""
        asked, attention = self.asked, self._attention
        if asked is None or attention is None:
            return None
        try:
            text = document_header(asked.path).note.text
            return attention.passages(text, len(self.document_tokens()), self.n_passages)
        except (PoolError, SessionFileError):  # The answer is worth more than its passages.
            return None

    def _answer_place(self, session: Session) -> int:
        """Return the position before the last thought, or 0: the next turn continues there."""
        if self.thought is None or self.thought.counter.n_tokens == 0:
            return 0
        prompt = session.tokens[: session.end_of_prompt]
        return len(prompt) - self.thought.tokens_before_answer(prompt, self)

    def generate(
        self,
        tokens: Sequence[int],
        *arguments: Any,
        logits_processor: Any = None,
        grammar: Any = None,
        **options: Any,
    ) -> Any:
        """Yield tokens as EntropyLlama does; raises RequestError for impossible combinations."""
        _check_min_tokens(grammar, logits_processor or ())
        self.prompt_size, self.generated = len(tokens), 0
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.cached = 0
        written = super().generate(
            tokens, *arguments, logits_processor=logits_processor, grammar=grammar, **options
        )
        for token in written:
            if self.generated == 0:
                self._session.note_turn(writes=True)
                self.prefix_cache.has_read(self._session)
                self.cached = max(0, self.prompt_size - self._reader.n_read)
                self.tell_what_is_learnt()
                if self.reads_only:
                    written.close()
                    if self._logprobs is not None:
                        self._logprobs.written.clear()
                    return
            is_end = llama_cpp.llama_vocab_is_eog(vocabulary, token)
            self.generated += not is_end
            if self.thought is not None and not is_end:
                self.thought.counter.accept(token)
            yield token

    def tell_what_is_on_host(self) -> None:
        """Print on stderr which layers attend in main memory although they are on a device."""
        if self._session.on_host:
            _say(self._session.on_host)

    def learn_from_several_texts(self) -> None:
        """Keep what the model teaches only after several conversations have agreed on it, because a
        single one may be made to mislead.
        """
        fit = self._session.predictor_fit
        if fit is not None:
            fit.least_texts = LEAST_TEXTS

    def tell_what_is_learnt(self) -> None:
        """Print once on stderr what was read twice, and what of it is kept."""
        fit = self._session.predictor_fit
        if fit is not None and (news := fit.news()) is not None:
            _say(news)

    def _constraint_sampler(self, constraint: Constraint) -> ConstraintSampler:
        """Return a sampler that allows only tokens of a constraint; raises RequestError.

        What it costs to compile is tried before; a request may end meanwhile, as between
        micro-batches.
        """
        field = self.constrained_by
        try:
            _TRIALS.check(constraint, self.checkpoint or (lambda: None))
            return super()._constraint_sampler(constraint)
        except SettingsError as error:
            raise RequestError(400, f"{field}: {error}", param=field) from None


_TRIALS = Trials()
"""Those of all models, because constraints are tried without their vocabularies."""


def _check_min_tokens(grammar: Any, processors: Iterable[Any]) -> None:
    """Raise RequestError if the end is forbidden, but a constraint may allow nothing else."""
    least = any(isinstance(each, llama_cpp.MinTokensLogitsProcessor) for each in processors)
    if grammar is not None and least:
        raise RequestError(
            400,
            "min_tokens cannot go with a grammar, a response_format or a tool",
            param="min_tokens",
        )


def load_llama(
    options: ModelOptions, images: ImageLimits | None = None, *, documents: bool = False
) -> ServedLlama:
    """Load the model; raises the errors of EntropyLlama. `images`: the limits for its images.

    `documents`: whether documents are read, for which the pool has one more place.

    llama_cpp.server's own loader (LlamaProxy) would create a llama_cpp.Llama with a full cache
    before attach() could replace it. Its settings have the names of Llama's arguments.
    """
    given = options.model_dump()
    arguments = {name: given[name] for name in given.keys() & _LLAMA_ARGUMENTS}
    del arguments["logits_all"]
    arguments["parse_special"] = options.parse_special
    path, cache = path_of(options), cache_options(options, documents=documents)
    arguments.update(
        kv_overrides=read_overrides(options.kv_overrides) if options.kv_overrides else None,
        chat_handler=_chat_handler(options),
    )
    # Without a device, llama.cpp refuses some of these fields.
    if not llama_cpp.llama_supports_gpu_offload():
        arguments = {name: value for name, value in arguments.items() if name not in _OF_DEVICES}
    if "n_ubatch" not in options.model_fields_set:
        del arguments["n_ubatch"]
    if options.draft_model is not None:
        arguments["draft_model"] = LlamaPromptLookupDecoding(options.draft_model_num_pred_tokens)
    if options.hf_pretrained_model_name_or_path is not None:
        arguments["tokenizer"] = llama_tokenizer.LlamaHFTokenizer.from_pretrained(
            options.hf_pretrained_model_name_or_path
        )
    try:
        llama = ServedLlama(path, for_thoughts(cache, options, path), **arguments)
    except UnsupportedModelError:  # Without checkpoints, turns are read again.
        llama = ServedLlama(path, cache, **arguments)
    llama.served_name = options.served_name
    llama.request_defaults = options.request_defaults
    llama.learn_from_several_texts()
    llama.tell_what_is_on_host()
    if options.chat_template is not None:
        _use_template(llama, options.chat_template)
    elif options.chat_format is None and "tokenizer.chat_template" not in llama.metadata:
        _say(NO_TEMPLATE)
        llama.chat_format = "plain text"
        llama.chat_handler = chat_formatter_to_chat_completion_handler(_as_plain_text)
    _set_template_arguments(llama, options)
    _open_projector(llama, options.projector, images)
    if options.cache:
        kinds = {"ram": llama_cache.LlamaRAMCache, "disk": llama_cache.LlamaDiskCache}
        llama.set_cache(kinds[options.cache_type](capacity_bytes=options.cache_size))
    return llama


def _open_projector(llama: ServedLlama, path: str | None, limits: ImageLimits | None) -> None:
    """Open the model's projector, if one was named; if that fails, the model is freed."""
    if path is None:
        return
    try:
        llama.open_projector(path, limits)
    except BaseException:
        llama.close()
        raise


def path_of(options: ModelOptions) -> Path:
    """Return the path of the model's file, which is downloaded first if necessary.

    Raises HubError.
    """
    if options.hf_repo is None:
        return Path(path_of_model(options.model))
    from entropykv.hub import fetch_model  # noqa: PLC0415  # it needs the extra hub

    return fetch_model(options.hf_repo, options.hf_file, tell=_say)


def _say(text: str) -> None:
    sys.stderr.write(f"entropykv: {text}\n")
    sys.stderr.flush()


def cache_options(options: ModelOptions, *, documents: bool = False) -> CacheOptions:
    """Return the options of the cache; raises BudgetError or SettingsError.

    `documents`: whether documents are read, in a place of the pool of their own.
    """
    if options.parallel == 1 and options.checkpoints is None and not documents:
        return cache_options_of(options, rungs=WITHOUT_REWALK)
    if options.cache:
        raise SettingsError(
            "with --parallel, --checkpoints or --documents, conversations are kept anyway; leave "
            "--cache out"
        )
    if documents:
        _check_documents(options)
    return cache_options_of(
        options,
        rungs=WITHOUT_REWALK,
        n_sequences=options.parallel + documents,
        swap=options.swap,
        swap_limit=options.swap_limit,
        checkpoints=options.checkpoints,
    )


def _check_documents(options: ModelOptions) -> None:
    """Raise SettingsError for options of a model that cannot go with documents."""
    if options.chat_template is not None or options.chat_format is not None:
        raise SettingsError(
            "documents are read by the model's own chat template; leave --chat-template and "
            "--chat_format, or --documents, out"
        )


def for_thoughts(cache: CacheOptions, options: ModelOptions, path: Path) -> CacheOptions:
    """Return the options, with checkpoints if the model thinks and nothing excludes them.

    The next turn continues from before the last thought; without a checkpoint there, its whole text
    would be read again.
    """
    other = options.cache or options.draft_model is not None
    if cache.in_pool or cache.checkpoints is not None or cache.freeze is not None or other:
        return cache
    if cache.store == "flat" or tags_of(options.chat_template or read_chat_template(path)) is None:
        return cache
    return replace(cache, checkpoints=CHECKPOINTS)


def _chat_handler(options: ModelOptions) -> Any:
    if options.chat_format == "hf-tokenizer-config":
        if options.hf_tokenizer_config_path is None:
            raise SettingsError("chat_format hf-tokenizer-config needs --hf_tokenizer_config_path")
        config = json.loads(Path(options.hf_tokenizer_config_path).read_text(encoding="utf-8"))
        return llama_chat_format.hf_tokenizer_config_to_chat_completion_handler(config)
    if options.chat_format == "hf-autotokenizer":
        if options.hf_pretrained_model_name_or_path is None:
            raise SettingsError(
                "chat_format hf-autotokenizer needs --hf_pretrained_model_name_or_path"
            )
        return llama_chat_format.hf_autotokenizer_to_chat_completion_handler(
            options.hf_pretrained_model_name_or_path
        )
    return None


def _as_plain_text(*, messages: Sequence[Any], **_: Any) -> ChatFormatterResponse:
    """Return the prompt of a chat with a model that has no chat template."""
    said = [str(message["content"] or "") for message in messages]
    return ChatFormatterResponse(prompt=plain_chat(said))


def _use_template(llama: ServedLlama, template: str) -> None:
    """Replace the model's chat template by a Jinja text, or by a named format.

    Raises SettingsError for one that cannot be parsed.
    """
    if "{" not in template:
        llama.chat_format = template
        return
    bos, eos = llama.token_bos(), llama.token_eos()
    try:
        formatter = llama_chat_format.Jinja2ChatFormatter(
            template,
            eos_token=llama._model.token_get_text(eos) if eos >= 0 else "",
            bos_token=llama._model.token_get_text(bos) if bos >= 0 else "",
            stop_token_ids=[eos],
        )
    except jinja2.TemplateError as error:
        raise SettingsError(
            f"the chat template cannot be read ({error}); give Jinja with --chat-template-file, or "
            "leave it out"
        ) from None
    llama.metadata["tokenizer.chat_template"] = template
    llama._chat_handlers["chat_template.default"] = formatter.to_chat_handler()
    llama.chat_format = "chat_template.default"


def _set_template_arguments(llama: ServedLlama, options: ModelOptions) -> None:
    """Let each chat pass the variables of its request and of the server's options to the
    template.
    """
    llama.template_defaults = llama.template_arguments = options.template_arguments
    llama.thinking_options = options.thinking_options
    name = str(llama.chat_format)
    handler = llama.chat_handler or llama._chat_handlers.get(name) or _named_handler(name)
    if template_of(llama) is None and not llama.template_defaults:
        return

    def answer(**named: Any) -> Any:
        llama = named["llama"]
        return handler(**{**llama.said(llama.template_arguments), **named})

    llama.chat_handler = answer


def _named_handler(name: str) -> Any:
    try:
        return llama_chat_format.get_chat_completion_handler(name)
    except llama_chat_format.LlamaChatCompletionHandlerNotFoundException:
        raise SettingsError(
            f"there is no chat_format {name!r}; leave --chat_format and --chat-template out, or "
            "give one of llama-cpp-python's"
        ) from None
