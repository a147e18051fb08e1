"""Make the chain of llama.cpp's own samplers that chooses the next token, as a Sampling says."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import llama_cpp

from entropykv.constraint.constraint import Constraint
from entropykv.constraint.sampler import ConstraintSampler
from entropykv.constraint.vocabulary import TokenTexts
from entropykv.errors import SettingsError
from entropykv.settings.options import MOST_TOKENS
from entropykv.settings.sampling import MOST_SEED, Sampling, is_random_seed, new_seed

_MIROSTAT_CANDIDATES = 100


class SamplerChain:
    """Hold a llama_sampler chain; close() frees it."""

    def __init__(
        self,
        sampling: Sampling,
        n_vocab: int,
        n_ctx: int,
        vocabulary: Any,
        texts: TokenTexts | None = None,
    ) -> None:
        """Make the samplers; raises SettingsError for a constraint that cannot be used.

        `texts` are the texts of tokens, which a constraint needs.
        """
        self._sampling = sampling
        self._texts = texts
        self._constraint: ConstraintSampler | None = None
        self._n_vocab, self._n_ctx, self._vocabulary = n_vocab, n_ctx, vocabulary
        given = new_seed() if is_random_seed(sampling.seed) else sampling.seed
        self._seed = (given or 0) & MOST_SEED
        parameters = llama_cpp.llama_sampler_chain_default_params()
        self.handle: Any = llama_cpp.llama_sampler_chain_init(parameters)
        self._remembering: list[Any] = []
        try:
            self._fill()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the samplers; it may be called twice."""
        handle, self.handle = self.handle, None
        if handle is not None:
            llama_cpp.llama_sampler_free(handle)

    def check(self) -> None:
        """Raise an error of the latest apply or accept; see ConstraintSampler.check()."""
        if self._constraint is not None:
            self._constraint.check()

    @property
    def remembers(self) -> bool:
        """Tell whether the chain depends on tokens that were read before."""
        return bool(self._remembering)

    @property
    def looks_back(self) -> int:
        """Return the most earlier tokens that it depends on."""
        windows = (self._sampling.repeat_last_n, self._sampling.dry_penalty_last_n)
        return max(self._window(window) for window in windows)

    def remember(self, tokens: list[int]) -> None:
        """Apply penalties to exactly these tokens.

        The rest of the chain is not reset, because a seed would give the same random numbers again.
        """
        for sampler in self._remembering:
            llama_cpp.llama_sampler_reset(sampler)
            for token in tokens:
                llama_cpp.llama_sampler_accept(sampler, token)

    def _fill(self) -> None:
        sampling = self._sampling
        if sampling.logit_bias:
            self._add(self._logit_bias())
        if sampling.grammar is not None and self._texts is not None:
            self._constraint = ConstraintSampler(Constraint.of(sampling.grammar), self._texts)
            self._add(self._constraint.handle())
        greedy = sampling.temperature <= 0.0
        makers = self._makers()
        if sampling.mirostat and not greedy:
            makers = {name: makers[name] for name in ("penalties", "dry")}
        for name in sampling.samplers:
            if name in makers:
                makers[name]()
        if greedy:
            self._add(llama_cpp.llama_sampler_init_greedy())
        elif sampling.mirostat:
            self._add(llama_cpp.llama_sampler_init_temp(sampling.temperature))
            self._add(self._mirostat())
        else:
            self._add(llama_cpp.llama_sampler_init_dist(self._seed))

    def _makers(self) -> dict[str, Callable[[], None]]:
        """Map sampler names to functions that add them to the chain; a greedy chain needs only
        those that change the order.
        """
        sampling = self._sampling
        history: dict[str, Callable[[], None]] = {"penalties": self._penalties, "dry": self._dry}
        if sampling.temperature <= 0.0:
            return history
        simple = {
            "top_k": lambda: llama_cpp.llama_sampler_init_top_k(sampling.top_k),
            "top_p": lambda: llama_cpp.llama_sampler_init_top_p(sampling.top_p, 1),
            "min_p": lambda: llama_cpp.llama_sampler_init_min_p(sampling.min_p, 1),
            "temperature": self._temperature,
        }
        if sampling.typical_p != 1.0:
            simple["typ_p"] = lambda: llama_cpp.llama_sampler_init_typical(sampling.typical_p, 1)
        if sampling.top_n_sigma >= 0.0:
            simple["top_n_sigma"] = lambda: llama_cpp.llama_sampler_init_top_n_sigma(
                sampling.top_n_sigma
            )
        if sampling.xtc_probability > 0.0:
            simple["xtc"] = lambda: llama_cpp.llama_sampler_init_xtc(
                sampling.xtc_probability, sampling.xtc_threshold, 1, self._seed
            )
        adding = {name: (lambda make=make: self._add(make())) for name, make in simple.items()}
        return {**history, **adding}

    def _add(self, sampler: Any) -> None:
        llama_cpp.llama_sampler_chain_add(self.handle, sampler)

    def _window(self, n_tokens: int) -> int:
        return min(self._n_ctx, MOST_TOKENS) if n_tokens < 0 else n_tokens

    def _penalties(self) -> None:
        sampling = self._sampling
        if not sampling.penalizes or sampling.repeat_last_n == 0:
            return
        init = llama_cpp.llama_sampler_init_penalties
        # From llama-cpp-python 0.3.35 on, the first argument is the size of the vocabulary.
        vocabulary = [self._n_vocab] if len(init.argtypes) > 4 else []
        self._remembering.append(
            init(
                *vocabulary,
                self._window(sampling.repeat_last_n),
                sampling.repeat_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
        )
        self._add(self._remembering[-1])

    def _dry(self) -> None:
        sampling = self._sampling
        if sampling.dry_multiplier == 0.0 or sampling.dry_penalty_last_n == 0:
            return
        breakers = [text.encode("utf-8") for text in sampling.dry_sequence_breakers]
        self._remembering.append(
            llama_cpp.llama_sampler_init_dry(
                self._vocabulary,
                sampling.dry_multiplier,
                sampling.dry_base,
                sampling.dry_allowed_length,
                self._window(sampling.dry_penalty_last_n),
                (ctypes.c_char_p * len(breakers))(*breakers),
                len(breakers),
            )
        )
        self._add(self._remembering[-1])

    def _temperature(self) -> Any:
        sampling = self._sampling
        if sampling.dynatemp_range > 0.0:
            return llama_cpp.llama_sampler_init_temp_ext(
                sampling.temperature, sampling.dynatemp_range, sampling.dynatemp_exponent
            )
        return llama_cpp.llama_sampler_init_temp(sampling.temperature)

    def _mirostat(self) -> Any:
        sampling = self._sampling
        tau, eta = sampling.mirostat_tau, sampling.mirostat_eta
        if sampling.mirostat == 1:
            return llama_cpp.llama_sampler_init_mirostat(
                self._n_vocab, self._seed, tau, eta, _MIROSTAT_CANDIDATES
            )
        return llama_cpp.llama_sampler_init_mirostat_v2(self._seed, tau, eta)

    def _logit_bias(self) -> Any:
        pairs = self._sampling.logit_bias
        for token, _ in pairs:
            if not 0 <= token < self._n_vocab:
                raise SettingsError(
                    f"logit_bias names token {token}; the model has tokens 0 to {self._n_vocab - 1}"
                )
        biases = [llama_cpp.llama_logit_bias(token, bias) for token, bias in pairs]
        array = (llama_cpp.llama_logit_bias * len(pairs))(*biases)
        return llama_cpp.llama_sampler_init_logit_bias(self._n_vocab, len(pairs), array)
