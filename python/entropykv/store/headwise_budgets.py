"""Set how many entries the KV heads of the headwise store may hold: a plan, and its shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from entropykv import _core
from entropykv.errors import BudgetError
from entropykv.policy.attainable import AttainableBudgets
from entropykv.policy.division import LossCurve, WholeTexts
from entropykv.policy.online import LEAST_TOKENS, changes_budgets, is_observed
from entropykv.policy.plan import HeadwisePlan, by_layer
from entropykv.policy.readings import OnlineBudgets
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.settings.options import Budget
from entropykv.store.cold import ColdSide

_LEAST_FORESIGHT = 2 * LEAST_TOKENS
"""The least entries beyond the floor from which those of a longer text are estimated."""
_STRETCHES = 32
"""How many stretches a text that has become twice as long has grown by; see _end_of_stretch()."""


class HeadwiseBudgets:
    """Hold the budgets of all KV heads of a store, which follow a plan and possibly the text."""

    plan: HeadwisePlan
    """The current plan."""

    def __init__(
        self,
        store: _core.HeadwiseStore,
        config: ResolvedConfig,
        layers: Sequence[_core.LayerShape],
        online: OnlineBudgets | None,
        cold: ColdSide,
    ) -> None:
        """Use a store and its cold storage; `online` are budgets that follow the text, None keeps
        those of the plan.
        """
        self._store = store
        self._config = config
        self._layers = layers
        self._online = online
        self._limited: AttainableBudgets | None = None
        """The budgets that give no KV head more than it can hold; None if there are others, or
        none.
        """
        if isinstance(online, AttainableBudgets) and online.attainable:
            self._limited = online
        self._is_whole = False
        """True if the budgets hold any text that the bytes hold whole."""
        self._is_limited = False
        """True if a KV head would get more if it could hold more, or if the text were longer."""
        self._cold = cold
        self._budgets_change = self._overflows = False
        self._end = 0
        self._least_sure: int | None = None
        self._of_policy: HeadwisePlan | None = None
        """The plan for texts that the bytes cannot hold whole; None in a pool."""
        self._whole_texts: WholeTexts | None = None
        """The texts that they can hold whole; None if the plan is the same for them, and
        in a pool.
        """
        self._of_whole_texts: HeadwisePlan | None = None
        """The plan for these texts."""
        self._expected = 0
        self._keeps_everything = False
        self.whole_entries = 0
        """The length that a text may reach before the current plan evicts; n_ctx: never."""
        if online and online.tracks_entropies:
            store.track_entropy(True)

    def take(self, plan: HeadwisePlan) -> None:
        """Use a budget that only this store has; heads that hold more evict."""
        self._of_policy, self._whole_texts, self._of_whole_texts = plan, None, None
        if self._config.freezing is None and not plan.holds_all:
            self._whole_texts = plan.whole_texts
            self._of_whole_texts = _all_of(plan, self._whole_texts.longest, self._layers)
        self.follow(self._fitting(plan))

    def expect(self, n_tokens: int) -> None:
        """Keep a text of n_tokens whole if the bytes hold it, or else follow the policy."""
        self._expected, self._end = n_tokens, min(self._end, n_tokens)
        plan = self._fitting(self._of_policy) if self._of_policy else self.plan
        if plan is not self.plan:
            self.follow(plan)

    @contextmanager
    def expecting(self, n_tokens: int) -> Iterator[None]:
        """Choose the budgets for a text of n_tokens that the `with` block puts in place of the
        current one. If the block raises, the plan and the expected length are again those of
        before.
        """
        before = self._expected, self.plan
        self._expected, self._end = n_tokens, min(self._end, n_tokens)
        if self._of_policy:
            self._go_by(self._fitting(self._of_policy))
        try:
            yield
        except BaseException:
            self._expected, plan = before
            self._go_by(plan)
            raise

    @property
    def longest_whole(self) -> int:
        """Return the longest text that is kept whole if it is expected; 0: follow the plan."""
        return self._whole_texts.longest if self._whole_texts else 0

    def _fitting(self, of_policy: HeadwisePlan) -> HeadwisePlan:
        keeps_all = self._whole_texts is not None and self._whole_texts.hold(self._expected)
        return self._of_whole_texts if keeps_all and self._of_whole_texts else of_policy

    def follow(self, plan: HeadwisePlan) -> None:
        """Follow another plan; heads that hold more evict."""
        self._go_by(plan)
        if self._limited:
            self._limited.expect_tokens(0, max(self._expected, self._end))
            self._limited.is_due = True
        self.share()

    def _go_by(self, plan: HeadwisePlan) -> None:
        self.plan = plan
        if self._online:
            self._online.expect(plan)

    def await_share(self, plan: HeadwisePlan, budget: Budget) -> None:
        """Follow a plan until a pool that `budget` belongs to gives this store its share of it;
        `plan` is what the budget means for one text.
        """
        self.plan = plan
        self._least_sure = self._sure_in_company(budget)

    def shares(self) -> list[int]:
        """Return the budgets of the plan, or those that follow the text."""
        plan = self.plan
        of_plan = [entries for layer in plan.budgets for entries in layer]
        if self._online is None or plan.holds_all:
            return of_plan
        if self._limited:
            if self._limited.holds(plan.whole_texts.longest):
                return plan.entries_of_whole_texts
            plan = replace(plan, limits=self._attainable(plan))
        return self._online.budgets(plan) or of_plan

    def _attainable(self, plan: HeadwisePlan) -> tuple[int, ...]:
        """Return the most entries of every KV head before the next share, at least the floor."""
        most = self._limited.most if self._limited else []
        if not any(most):
            return plan.limits
        floor = plan.floor_entries
        return tuple(min(max(n, floor), of) for n, of in zip(most, plan.limits, strict=True))

    def share(self) -> None:
        """Set the budgets of all KV heads; those that hold more evict."""
        if self._keeps_everything:
            self.keep_everything()
            return
        shares, plan = self.shares(), self.plan
        self._set(shares, plan.pool_pages)
        if self._limited and not plan.holds_all:
            attainable = self._attainable(plan)
            self._is_whole = self._limited.holds(plan.whole_texts.longest)
            self._is_limited = not self._is_whole and (
                self._limited.follows_length(plan)
                or any(
                    share == most < limit
                    for share, most, limit in zip(shares, attainable, plan.limits, strict=True)
                )
            )

    def share_again(self) -> None:
        """Share the budget by what the text has shown; cold storage tells its errors later.

        Where shares are limited to what KV heads can hold, the next micro-batch begins with that.
        """
        if self._limited is None:
            with self._cold.growing_later():
                self.share()

    def _share_before(self, position: int, n_tokens: int) -> None:
        """Share before n_tokens are read, if they outgrow the bytes and anything would change.

        Where tokens come one by one, this serves all that are before the end of their stretch.
        """
        limited, plan = self._limited, self.plan
        if limited is None or plan.holds_all or self._keeps_everything:
            return
        end = position + n_tokens
        fits = end <= plan.whole_texts.longest
        if fits and self._is_whole:
            return
        at_once = fits or n_tokens >= LEAST_TOKENS
        begins = at_once or _end_of_stretch(end - 1) > _end_of_stretch(position - 1)
        if fits or limited.is_due or (self._is_limited and begins):
            if not at_once:
                end = _end_of_stretch(end - 1)
            limited.expect_tokens(end - position, max(self._expected, end))
            self.share()
            limited.is_due = fits or (at_once and self._is_limited)

    def most_drafts(self, position: int, wanted: int) -> int:
        """Return how many of the wanted drafts may follow the token at `position`, so that none of
        them begins with other budgets than the token.
        """
        if self.longest_whole > position:  # The plan changes behind it.
            wanted = min(wanted, self.longest_whole - position - 1)
        if self._limited is None or self.plan.holds_all:
            return wanted
        end = self.plan.whole_texts.longest
        if position >= end:
            if not self._limited.is_due and not self._is_limited:
                return wanted
            end = _end_of_stretch(position)
        return min(wanted, end - position - 1)

    def keep_everything(self) -> None:
        """Drop nothing from now on, not even entries outside a window, for callers that examine
        whole texts.
        """
        self._keeps_everything = True
        n_ctx = self._config.n_ctx
        pages = sum(_core.pages_for(n_ctx, n) for n in self.plan.entries_per_page)
        self._set([n_ctx] * len(self.plan.limits), pages)

    def limit_layer(self, layer: int, recent_window: int) -> None:
        """Drop the entries of a layer's KV heads except sinks and newest ones; other layers keep
        everything.
        """
        n_sinks = self.plan.protection.n_sinks
        budgets = [
            n_sinks + recent_window if number == layer else self._config.n_ctx
            for number, shape in enumerate(self._layers)
            for _ in range(shape.n_head_kv)
        ]
        pages = sum(_core.pages_for(self._config.n_ctx, n) for n in self.plan.entries_per_page)
        self._store.set_budgets(budgets, pages, n_sinks, recent_window)

    def _set(self, budgets: list[int], pages: int) -> None:
        protection = self.plan.protection
        self._store.set_budgets(budgets, pages, protection.n_sinks, protection.recent_window)
        # Cache this figure, because every token needs it, and examining all KV heads takes longer.
        limits = self.plan.limits
        short = (n for n, limit in zip(budgets, limits, strict=True) if n < limit)
        self.whole_entries = min(short, default=self.plan.longest)

    def prepare(self, n_tokens: int, position: int, n_echo: int) -> None:
        """Begin a micro-batch of `n_tokens` of text and `n_echo` of an echo.

        With 0 tokens of text, the echo repeats text that was read before.
        """
        if n_tokens > 0:
            self._share_before(position, n_tokens)
        n_ubatch, repeats = self._config.n_ubatch, self._config.policy.importance.repeats
        self._overflows = position + n_tokens > self.whole_entries
        awaits_echo = repeats and n_echo == 0 and not self._overflows
        changes = changes_budgets(n_tokens, position, n_ubatch) and not awaits_echo
        self._budgets_change = n_tokens == 0 or changes
        self._end = position + n_tokens
        if self._online:
            # Measure losses only for steps after which budgets are shared again; measuring is slow.
            knots = self._online.knots(self._growth()) if self._budgets_change else []
            self._store.measure_losses(knots)

    def whole_before(self, position: int, n_tokens: int) -> int:
        """Return how many of the next `n_tokens`, from `position` on, to read at once.

        If budgets follow the losses of the text and all of it is still held, these are the tokens
        that the bytes hold whole. Then the budget is shared by their losses before anything is
        evicted.
        """
        room = self.whole_entries - position
        if self._config.policy.rule.by_losses and LEAST_TOKENS <= room < n_tokens:
            return room
        return n_tokens

    def _growth(self) -> float:
        """Return by what factor the text will grow, beyond the floor, once all of it is read.

        In a pool it is 1, because the content of a checkpoint must not depend on later text.
        """
        beyond = self._end - self.plan.floor_entries
        longer = self._expected - self.plan.floor_entries
        return longer / beyond if longer > beyond >= _LEAST_FORESIGHT else 1.0

    def observe(self, n_tokens: int) -> bool:
        """Record what the micro-batch has shown; returns whether to share the budget at once."""
        if self._online is None:
            return False
        if n_tokens == 0:
            self._online.observe_again()
            return False
        if not is_observed(n_tokens, self._config.n_ubatch):
            return False
        self._online.observe(n_tokens, budgets_change=self._budgets_change)
        return self._budgets_change and self._limited is None

    def loss_curve(self) -> LossCurve | None:
        """Return what the text loses with fewer pages, if that was measured."""
        return self._online.loss_curve(self.plan) if self._online else None

    def forget(self) -> None:
        """Forget all measurements, because another text begins."""
        if self._online:
            self._online.forget()
            self.share()

    @property
    def sure_entries(self) -> int:
        """Return how many of the newest tokens every KV head certainly keeps; n_ctx if nothing is
        evicted.
        """
        if self._whole_texts is not None:
            return self.longest_whole
        return self._sure_of(self.plan) if self._least_sure is None else self._least_sure

    def _sure_of(self, plan: HeadwisePlan) -> int:
        if self._config.freezing is not None:
            return 0
        return self._config.n_ctx if plan.mean_entries >= self._config.n_ctx else plan.floor_entries

    def _sure_in_company(self, budget: Budget) -> int:
        """Return sure_entries for the smallest share that a sequence may get."""
        try:
            least = self._config.equal_share(budget, self._layers)
            if self._config.policy.rule.by_losses and not least.holds_all:
                least = self._plan_of(least.pages_of(least.floor_entries), least.page_bytes)
        except BudgetError:  # The budget is too small for so many sequences at a time.
            return 0
        return self._sure_of(least)

    def _plan_of(self, pages: int, page_bytes: int) -> HeadwisePlan:
        budget = Budget("bytes", max(1, pages * page_bytes))
        return self._config.headwise_plan(budget, self._layers)


def _end_of_stretch(position: int) -> int:
    """Return the first position behind the stretch that a position is in.

    Stretches have LEAST_TOKENS tokens, or more in longer texts: drafts end with them, and few
    entries move to other heads while a text grows by one part in _STRETCHES.
    """
    length = max(LEAST_TOKENS, 1 << (position // _STRETCHES).bit_length() >> 1)
    return (position // length + 1) * length


def _all_of(plan: HeadwisePlan, longest: int, layers: Sequence[_core.LayerShape]) -> HeadwisePlan:
    """Return the plan for texts of up to `longest` tokens, for whose entries the pages are
    enough.
    """
    budgets = tuple(by_layer([min(limit, longest) for limit in plan.limits], layers))
    return replace(plan, budgets=budgets, mean_entries=longest, longest=longest)
