"""Set how many entries the KV heads of the headwise store may hold, by a plan and by the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from entropykv import _core
from entropykv.errors import BudgetError
from entropykv.policy.division import LossCurve
from entropykv.policy.online import (
    LEAST_TOKENS,
    AttainableBudgets,
    CurveBudgets,
    MeasuredLosses,
    OnlineBudgets,
    OwnBudgets,
    StoreReadings,
    changes_budgets,
    is_observed,
)
from entropykv.policy.plan import HeadwisePlan, WholeTexts, by_layer
from entropykv.policy.policy import BudgetRule, Policy
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.policy.sources.kim_jung import LayerEntropies
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.options import Budget
from entropykv.settings.own_policy import OwnPolicy
from entropykv.store.cold import ColdSide

_LEAST_FORESIGHT = 2 * LEAST_TOKENS
"""How many entries beyond the floor a text must have before losses are estimated for the longer
text that it will become.
"""
_STRETCHES = 32
"""How many stretches a long text grows by while its length doubles: see _end_of_stretch()."""


def online_budgets(
    policy: Policy,
    store: StoreReadings,
    layers: Sequence[_core.LayerShape],
    n_ctx: int,
    profile: EntropyProfile | None = None,
    *,
    freezes: bool = False,
) -> OnlineBudgets | None:
    """Return the online budgets of a policy, or None if its budgets do not follow the text.

    `profile`: the one that the policy uses, if any. `freezes`: evicted entries are frozen and may
    return, so that budgets need not be limited to what a KV head holds.
    """
    if policy.own is not None:
        follows = type(policy.own).observe is not OwnPolicy.observe
        return OwnBudgets(policy.own, store, layers, n_ctx, profile) if follows else None
    if policy.rule.by_layer:
        return LayerEntropies(store, layers, n_ctx, policy.rule)
    if policy.rule.by_losses:
        curves = profile.curves if profile is not None and policy.rule.by_curves else None
        return MeasuredLosses(store, layers, n_ctx, curves, attainable=not freezes)
    follows = policy.rule is BudgetRule.PROFILE_CURVES and not freezes
    if follows and profile is not None and profile.curves is not None:
        return CurveBudgets(store, layers, profile.curves)
    return None


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
        """Set the budgets of a store. `cold`: its cold storage, which has to grow if entries are
        frozen. `online`: budgets that follow the text; None: all budgets are those of the plan.
        """
        self._store = store
        self._config = config
        self._layers = layers
        self._online = online
        self._limited: AttainableBudgets | None = None
        """The online budgets, if they give no KV head more than it can hold; None for other online
        budgets, or without any.
        """
        if isinstance(online, AttainableBudgets) and online.attainable:
            self._limited = online
        self._is_whole = False
        """True if the current budgets keep every text whole that the pages can keep whole."""
        self._is_limited = False
        """True if a KV head would get more if it could hold more, or if the text were longer."""
        self._cold = cold
        self._budgets_change = self._overflows = False
        self._end = 0
        self._least_sure: int | None = None
        self._of_policy: HeadwisePlan | None = None
        """The plan of the policy, for texts that the budget cannot hold whole; None in a pool."""
        self._whole_texts: WholeTexts | None = None
        """The texts that the budget can hold whole; None if one plan serves all texts, and in a
        pool.
        """
        self._of_whole_texts: HeadwisePlan | None = None
        """The plan for texts that the budget can hold whole; None where `_whole_texts` is None."""
        self._expected = 0
        self._keeps_everything = False
        self.whole_entries = 0
        """The length in tokens that a text may reach before the current budgets evict; n_ctx: they
        never do.
        """
        if online and online.tracks_entropies:
            store.track_entropy(True)

    def take(self, plan: HeadwisePlan) -> None:
        """Follow the plan of a budget that only this store has; heads that hold more evict."""
        self._of_policy, self._whole_texts, self._of_whole_texts = plan, None, None
        if self._config.freezing is None and not plan.holds_all:
            self._whole_texts = plan.whole_texts
            self._of_whole_texts = _all_of(plan, self._whole_texts.longest, self._layers)
        self.follow(self._fitting(plan))

    def expect(self, n_tokens: int) -> None:
        """Choose the plan for a text of n_tokens: keep it whole if the budget can hold it, or else
        follow the policy. KV heads that hold more evict. In a pool, the plan stays.
        """
        self._expected, self._end = n_tokens, min(self._end, n_tokens)
        plan = self._fitting(self._of_policy) if self._of_policy else self.plan
        if plan is not self.plan:
            self.follow(plan)

    @contextmanager
    def expecting(self, n_tokens: int) -> Iterator[None]:
        """Choose the plan for a text of n_tokens that the `with` block loads in place of the
        current text. If the block raises, the former plan and expected length are restored.
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
        """Return the length of the longest text that is kept whole if expect() has announced it; 0:
        the plan is the same for all texts, or the pool sets it.
        """
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
        """Follow a plan until the pool gives this store a share. `budget`: the budget of the pool;
        `plan`: what that means if one text has all of it.
        """
        self.plan = plan
        self._least_sure = self._sure_in_company(budget)

    def shares(self) -> list[int]:
        """Return the budget of every KV head in entries, layer by layer: those that follow the
        text, or else those of the plan.
        """
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
        """Return how many entries every KV head can hold at most before budgets are shared again,
        at least the floor; its limit while that is not known.
        """
        most = self._limited.most if self._limited else []
        if not any(most):
            return plan.limits
        floor = plan.floor_entries
        return tuple(min(max(n, floor), of) for n, of in zip(most, plan.limits, strict=True))

    def share(self) -> None:
        """Set the budgets of all KV heads; heads that hold more evict."""
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
        """Share the budget by what the text has shown; check() of cold storage raises its errors
        later.

        Where budgets are limited to what KV heads can hold, nothing is done here: the next
        micro-batch begins with sharing.
        """
        if self._limited is None:
            with self._cold.growing_later():
                self.share()

    def _share_before(self, position: int, n_tokens: int) -> None:
        """Share the budget before n_tokens are read, if the budget cannot hold the text with them
        and its division would change.

        Where tokens come one by one, sharing once serves all tokens up to the end of their stretch.
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
        if self.longest_whole > position:  # The plan changes after that length.
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
        """Drop nothing from now on, whatever the budget, not even entries outside a window, for
        callers that examine whole texts.
        """
        self._keeps_everything = True
        n_ctx = self._config.n_ctx
        pages = sum(_core.pages_for(n_ctx, n) for n in self.plan.entries_per_page)
        self._set([n_ctx] * len(self.plan.limits), pages)

    def limit_layer(self, layer: int, recent_window: int) -> None:
        """Drop all entries of the KV heads of a layer, except sinks and the newest `recent_window`;
        other layers keep everything.
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
        """Prepare the budgets for a micro-batch of `n_tokens` tokens of text, the first at
        `position`, and `n_echo` tokens of an echo.

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

        If budgets follow the losses of the text, only the tokens are read that the budget can hold
        besides the text so far, unless they are fewer than LEAST_TOKENS. Then the budget is shared
        by their losses before anything is evicted.
        """
        room = self.whole_entries - position
        if self._config.policy.rule.by_losses and LEAST_TOKENS <= room < n_tokens:
            return room
        return n_tokens

    def _growth(self) -> float:
        """Return the factor by which the part of the text beyond the floor will grow until all
        expected tokens are read: see SharedPool.next_checkpoint().
        """
        beyond = self._end - self.plan.floor_entries
        longer = self._expected - self.plan.floor_entries
        return longer / beyond if longer > beyond >= _LEAST_FORESIGHT else 1.0

    def observe(self, n_tokens: int) -> bool:
        """Record what a micro-batch of `n_tokens` has shown if its queries are observed; 0: an echo
        alone was read. Returns whether the budget should be shared again at once.
        """
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
        """Return what the text loses with fewer pages; None if that was not measured."""
        return self._online.loss_curve(self.plan) if self._online else None

    def forget(self) -> None:
        """Forget all measurements, because another text begins, and share the budget anew."""
        if self._online:
            self._online.forget()
            self.share()

    @property
    def least_window(self) -> int:
        """Return the recent window of a KV head with the smallest possible budget."""
        n_sinks, window = self.plan.protection.n_sinks, self.plan.protection.recent_window
        if not self._config.own_windows:
            return window
        return min(window, max(1, self.plan.floor_entries // 2 - n_sinks))

    @property
    def sure_entries(self) -> int:
        """Return the longest text of which every KV head certainly keeps all: n_ctx if nothing is
        evicted, 0 if entries are frozen.
        """
        if self._whole_texts is not None:
            return self.longest_whole
        return self._sure_of(self.plan) if self._least_sure is None else self._least_sure

    def _sure_of(self, plan: HeadwisePlan) -> int:
        if self._config.freezing is not None:
            return 0
        return self._config.n_ctx if plan.mean_entries >= self._config.n_ctx else plan.floor_entries

    def _sure_in_company(self, budget: Budget) -> int:
        """Return sure_entries for the smallest share of a pool with this budget that a sequence may
        get.
        """
        try:
            least = self._config.equal_share(budget, self._layers)
            if self._config.policy.rule.by_losses and not least.holds_all:
                least = self._plan_of(least.pages_of(least.floor_entries), least.page_bytes)
        except BudgetError:  # The budget is too small for this many sequences at a time.
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
    """Return the plan that keeps texts of up to `longest` tokens whole; the pages of `plan` must be
    enough for that.
    """
    budgets = tuple(by_layer([min(limit, longest) for limit in plan.limits], layers))
    return replace(plan, budgets=budgets, mean_entries=longest, longest=longest)
