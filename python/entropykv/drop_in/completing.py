"""Complete prompts inside a KV budget as a llama_cpp.Llama does, going on with what was read."""

from __future__ import annotations

import re
import weakref
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

from llama_cpp.llama_grammar import LlamaGrammar

from entropykv.drop_in.reading import ReadingLlama
from entropykv.drop_in.sampler import SamplerOfSequence
from entropykv.errors import ContextError
from entropykv.llamacpp.grammar_sampler import GrammarSampler


class CompletingLlama(ReadingLlama):
    """A Llama whose completions read only what of a prompt is new."""

    def _create_completion(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        """Complete as Llama does; while something is computed, nobody frees what it reads."""
        with closing(self._completion(*arguments, **options)) as stream:
            while True:
                with self._weights:
                    response = next(stream, None)
                if response is None:
                    return
                yield response

    def _completion(
        self,
        prompt: str | list[int],
        suffix: str | None = None,
        *arguments: Any,
        **options: Any,
    ) -> Generator[Any, None, None]:
        """Complete as Llama does, and pass tokens instead of the text where those read can stay.

        That way usage, positions of logprobs and the limit of n_ctx are those of what is read.
        """
        given = prompt
        given_limit = arguments[0] if arguments else options.get("max_tokens")
        self._max_tokens = given_limit if given_limit and given_limit > 0 else None
        if suffix is None and (isinstance(prompt, list) or options.get("logprobs") is None):
            prompt = self._continuing(self._tokens_of(prompt)) or prompt
        echoed = isinstance(given, str) and prompt is not given and options.get("echo")
        if echoed:  # Llama cannot echo tokens
            options["echo"] = False
        try:
            for response in super()._create_completion(prompt, suffix, *arguments, **options):
                if echoed and not options.get("stream"):
                    response["choices"][0]["text"] = f"{given}{response['choices'][0]['text']}"
                yield response
        except ValueError as error:
            if "exceed context window" not in str(error):
                raise
            text = re.sub(r"window of \d+", f"window of {self._n_ctx}", str(error))
            raise ContextError(f"{text}; shorten the prompt or raise n_ctx") from None
        finally:
            self._max_tokens = None

    def _tokens_of(self, prompt: str | list[int]) -> list[int]:
        """Return the tokens that Llama makes of a prompt; [] if it appends to them."""
        model = self._model
        if not isinstance(prompt, str):
            return prompt
        if model.add_eos_token() or model.token_sep() != -1 or not prompt:
            return []
        begins = [self.token_bos()] if model.add_bos_token() and self.token_bos() != -1 else []
        return begins + self.tokenize(prompt.encode("utf-8"), add_bos=False, special=True)

    def _init_sampler(
        self, *arguments: Any, grammar: LlamaGrammar | None = None, **options: Any
    ) -> Any:
        """Make the chain of samplers; in a pool, it reads this sequence's logits, not the last.

        A grammar is ours, which has limits and can be stopped, in the place of llama.cpp's.
        """
        ours = None if grammar is None else self._grammar_sampler(grammar)
        sampler = super()._init_sampler(*arguments, **options)
        if ours is None and self._in_context:
            return sampler
        return SamplerOfSequence(sampler, self._logits_at, self.token_eos(), ours)

    def _grammar_sampler(self, grammar: LlamaGrammar) -> GrammarSampler:
        """Return what leaves only tokens that a grammar allows; raises SettingsError."""
        session = self._session
        itself = weakref.ref(self)  # the sampler is a part of it

        def poll() -> None:
            llama = itself()
            if llama is not None:
                llama._while_sampling()

        return GrammarSampler(
            grammar._grammar,
            session.vocabulary,
            session.token_trie,
            root=grammar._root,
            poll=poll,
        )

    def _while_sampling(self) -> None:
        """Do what must be done every few milliseconds while a grammar is searched: nothing."""
