"""Turn the options of an evaluation into parts, and check them before anything long starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from entropykv.errors import ContextError, SettingsError
from entropykv.evaluation.continuation import (
    ContinuationPart,
    Protocol,
    References,
    continued_texts,
    prompt_length,
    tokens_of,
)
from entropykv.evaluation.dataset import (
    DEFAULT_TEMPLATE,
    DatasetPart,
    Question,
    check_template,
    dataset_items,
    rouge_scorer,
)
from entropykv.evaluation.passkeys import RecallPart, recall_items
from entropykv.evaluation.reading import EvalPart, Values
from entropykv.evaluation.ruler.scores import Suite, own_texts, ruler_parts
from entropykv.evaluation.texts import Text
from entropykv.llamacpp.model import Model


@dataclass(frozen=True)
class EvalRequest:
    """Hold the parts of an evaluation that a user asked for; lengths are in tokens.

    `continuation` and `greedy`: how many tokens are predicted, and written, after each prompt;
    `inside`: the budget does not grow for them. `passkey_tokens`, `facts_per_text`: the length of a
    passage with planted facts, and their number. `max_tokens`: the most of an answer to one of the
    `questions`, whose prompts follow `prompt_template`. `seed` determines passages and RULER's
    samples. `continuation` 0, `passkeys` 0 and an empty list of questions each leave out one part.
    """

    texts: Sequence[Text] = ()
    prompt: int | None = None
    """The length of prompts; None means 2,048, or the most that texts and context allow."""
    continuation: int = 256
    greedy: int = 64
    inside: bool = False
    passkeys: int = 0
    """How many passages with planted facts are read."""
    passkey_tokens: int = 1500
    facts_per_text: int = 4
    seed: int = 0
    questions: Sequence[Question] = ()
    prompt_template: str = DEFAULT_TEMPLATE
    max_tokens: int = 128
    n_ctx: int = 0
    """The most tokens of a data set's prompt with its answer; 0 means the model's trained
    context.
    """
    suite: Suite | None = None
    """RULER, which replaces all other parts; its haystacks are made of the texts."""

    def __post_init__(self) -> None:
        """Raise SettingsError if nothing is asked for, texts are missing, a suite is not alone, the
        continuation is 1, or the template lacks {context}.
        """
        check_template(self.prompt_template)
        if self.suite is not None:
            if self.passkeys or self.questions:
                raise SettingsError(
                    "a suite is measured alone; leave out --passkeys and --dataset, or --suite"
                )
            return
        if self.continuation == 1:
            raise SettingsError("a continuation of 1 token predicts nothing; use 2 or more, or 0")
        if self.passkeys and not self.texts:
            raise SettingsError("facts are planted into texts; give some with --text")
        if not self.questions and not (self.texts and (self.continuation or self.passkeys)):
            raise SettingsError(
                "there is nothing to evaluate; give texts with --text or a data set with --dataset"
            )

    def settings(self) -> Values:
        """Return the settings that the figures of every item depend on."""
        left_out = ("texts", "questions", "passkeys", "suite")
        names = [field.name for field in dataclasses.fields(self) if field.name not in left_out]
        haystacks = None if self.suite is None else [text.name for text in self.haystacks]
        return {**{name: getattr(self, name) for name in names}, "ruler_haystacks": haystacks}

    @property
    def haystacks(self) -> Sequence[Text]:
        """Return the texts that replace RULER's essays."""
        return self.texts or own_texts()

    def with_prompt(self, model: Model) -> EvalRequest:
        """Return the request with the length of prompts set, if it has continuations; raises the
        errors of prompt_length().
        """
        if self.suite is not None or not (self.texts and self.continuation):
            return self
        lengths = {text.name: len(tokens_of(model, text)) for text in self.texts}
        prompt = prompt_length(
            self.prompt, self.continuation, self.greedy, lengths, model.geometry.n_ctx_train
        )
        return dataclasses.replace(self, prompt=prompt)

    def parts(self, model: Model, stack: ExitStack, folder: Path | None = None) -> list[EvalPart]:
        """Return the parts with their items; the model is needed only here, to count tokens.

        The request must be one that with_prompt() returned. `stack` frees the resources of the
        parts; in `folder`, what stock predicts is kept for a later run. Raises ContextError for an
        item that does not fit into the context, EntropyKVError if the disk has no room for what
        stock predicts, and MissingExtraError without a package that a part needs.
        """
        if self.suite is not None:
            haystacks = self.haystacks
            inside = self.inside
            return [*ruler_parts(self.suite, model, haystacks, seed=self.seed, inside=inside)]
        made: list[EvalPart] = []
        if self.texts and self.continuation:
            made.append(self._continuations(model, stack, folder))
        if self.passkeys:
            made.append(self._recall(model))
        if self.questions:
            made.append(self._dataset(model))
        return made

    def _continuations(self, model: Model, stack: ExitStack, folder: Path | None) -> EvalPart:
        protocol = Protocol(self.prompt or 0, self.continuation, self.greedy, self.inside)
        items = continued_texts(self.texts, model, protocol)
        references = References(model.n_vocab, len(items), self.continuation, folder)
        return ContinuationPart(items, protocol, stack.enter_context(closing(references)))

    def _recall(self, model: Model) -> EvalPart:
        items = recall_items(
            self.texts,
            model,
            n_cases=self.passkeys,
            n_tokens=self.passkey_tokens,
            facts_per_text=self.facts_per_text,
            seed=self.seed,
        )
        return RecallPart(items)

    def _dataset(self, model: Model) -> EvalPart:
        trained = model.geometry.n_ctx_train
        if self.n_ctx > trained:
            raise ContextError(
                f"prompts of {self.n_ctx} tokens are longer than the {trained} that the model was "
                "trained for, and so would be those of the full cache; use a smaller -c"
            )
        items = dataset_items(
            self.questions,
            model,
            template=self.prompt_template,
            max_tokens=self.max_tokens,
            n_ctx=self.n_ctx or trained,
        )
        return DatasetPart(items, self.max_tokens, rouge_scorer(), inside=self.inside)
