"""Choose the store that serves a model, and make the stores of its sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from entropykv.errors import BudgetError, SettingsError, UnsupportedModelError
from entropykv.llamacpp.model import Model, offloaded_layers
from entropykv.llamacpp.recurrent import is_recurrent
from entropykv.policy.resolved_config import ResolvedConfig, resolve
from entropykv.settings.options import Budget
from entropykv.store.device import DeviceContext, DeviceStore
from entropykv.store.flat import FlatContext, FlatStore
from entropykv.store.headwise import HeadwiseContext, HeadwiseStore
from entropykv.store.kv_heads import fits_nodes
from entropykv.store.protocol import Store, StoreContext


class StoreFactory:
    """Make the stores of one model, in one context.

    With the option store `auto`, the factory takes the first of these stores that can serve the
    model and follow the policy: the device store, if layers are on a device, nothing is frozen, and
    it computes attention on a device; the headwise store, which serves layers on a device, too, if
    llama.cpp computes their attention on the CPU; the device store with attention in main memory;
    the flat store.
    """

    def __init__(
        self, model: Model, config: ResolvedConfig, most_tokens: Callable[[ResolvedConfig], int]
    ) -> None:
        """Choose the store, and make the context and the first store, which the first call of
        make() returns.

        `most_tokens` returns the most tokens of a sequence in a micro-batch, with its echo. If no
        store can serve the model, frees the context and raises the errors of resolve(), the
        contexts and the stores, but BudgetError for MemoryError.
        """
        self._model = model
        self._most_tokens = most_tokens
        self.config = config
        """The options, and what they mean for the model with the store that serves it."""
        self._context: StoreContext | None = None
        # llama.cpp knows of recurrent layers that the header does not show.
        if is_recurrent(model) and not config.geometry.recurrent:
            geometry = replace(config.geometry, recurrent=True)
            self.config = resolve(config.options, geometry, config.profile)
        budget = config.options.budget
        self.spare: Store | None = None
        """A store that was made already and that make() returns next; None if there is none."""
        try:
            automatic = config.options.store == "auto"
            first = self._choose(budget) if automatic else self._new(budget)
        except BaseException:
            self.close()
            raise
        self.spare = first
        self.facts = first.facts
        """The facts that are the same for all stores and never change."""

    @property
    def context(self) -> StoreContext:
        """Return the context of all stores."""
        return cast(StoreContext, self._context)  # The context exists until close().

    def make(self, budget: Budget) -> Store:
        """Return a store for another sequence, the spare one if there is one; raises the errors of
        the store's class, and BudgetError without memory for it.
        """
        store, self.spare = self.spare or self._new(budget), None
        return store

    def too_large(self, budget: Budget) -> BudgetError:
        """Return the error for a budget for which there is no memory."""
        return BudgetError(
            f"{self._model.name}: a KV budget of {budget} in a context of {self.config.n_ctx} "
            "tokens does not fit into this machine's memory; give a smaller one (kv_budget, n_ctx)"
        )

    def close(self) -> None:
        """Free the context; the stores that were made must be closed before."""
        if self.spare is not None:
            self.spare.close()
        self.spare = None
        self._drop_context()

    def _choose(self, budget: Budget) -> Store:
        """Try one kind of store after the other. If the flat store serves the model at last, the
        error of the first kind is the reason for it: see ResolvedConfig.fallback.
        """
        asked = self.config
        options = asked.options
        may_be_on_device = bool(offloaded_layers(options.n_gpu_layers)) and not asked.freezing
        on_host: ResolvedConfig | None = None
        refusal: UnsupportedModelError | SettingsError | None = None
        if may_be_on_device:
            try:
                if (store := self._on_device(asked, budget)) is not None:
                    if not self._attends_on_host():
                        return store
                    on_host = self.config
            except (UnsupportedModelError, SettingsError) as error:
                # If headwise does not serve the model either, the user sees this error, which may
                # say how to get the device store.
                refusal = error
        try:
            return self._try(asked, budget)
        except UnsupportedModelError as error:
            refusal = refusal or error
        if on_host is not None:
            return self._try(on_host, budget)
        if options.in_pool and not asked.freezing:
            raise refusal
        try:
            flat = asked.on_flat_store(str(refusal))
        except SettingsError as error:
            # The device store's error tells a better way out than the flat store's.
            raise (refusal if isinstance(refusal, SettingsError) else error) from None
        return self._try(flat, budget)

    def _try(self, config: ResolvedConfig, budget: Budget) -> Store:
        """Make the store of a config in a context of its own."""
        self._drop_context()
        self.config = config
        return self._new(budget)

    def _on_device(self, asked: ResolvedConfig, budget: Budget) -> Store | None:
        """Make a device store; returns None if no layer's K and V lie on a device."""
        why = f"{self._model.name}: layers are on a device, and headwise keeps K and V on the CPU"
        self.config = asked.on_device_store(why)
        if not any(node.on_device for node in self._device_context().hook.nodes):
            return None
        return self._new(budget)

    def _attends_on_host(self) -> bool:
        return isinstance(self._context, DeviceContext) and self._context.is_on_host

    def _new(self, budget: Budget) -> Store:
        try:
            # Making the context may change self.config.
            if self.config.store == "flat":
                flat = self._flat_context()
                return FlatStore(self._model, self.config, flat, budget)
            if self.config.store == "device":
                device = self._device_context()
                return DeviceStore(self._model, self.config, device, budget)
            headwise = self._headwise_context()
            return HeadwiseStore(self._model, self.config, headwise, budget)
        except MemoryError:
            raise self.too_large(budget) from None

    def _flat_context(self) -> FlatContext:
        if not isinstance(self._context, FlatContext):
            self._context = FlatContext(self._model, self.config)
        return self._context

    def _device_context(self) -> DeviceContext:
        if not isinstance(self._context, DeviceContext):
            self._context = context = DeviceContext(self._model, self.config)
            self.config = _possible(self.config, context)
        return self._context

    def _headwise_context(self) -> HeadwiseContext:
        """Return the context of the headwise stores. If the graph shows that predictions are
        impossible, the config changes, and another context is made for it.
        """
        while not isinstance(self._context, HeadwiseContext):
            context = HeadwiseContext(self._model, self.config, self._most_tokens(self.config))
            possible = _possible(self.config, context)
            if possible is self.config:
                self._context = context
            else:  # Without predictions, micro-batches may have another size, because of echoes.
                context.close()
                self.config = possible
        return self._context

    def _drop_context(self) -> None:
        if self._context is not None:
            self._context.close()
            self._context = None


def _possible(config: ResolvedConfig, context: HeadwiseContext | DeviceContext) -> ResolvedConfig:
    """Return a config without predictions that are impossible for the model: without any if its
    keys before RoPE are not known, or without the learnt predictor if that is for other features.
    """
    if context.hook.rope_obstacle:
        return config.without_prediction()
    if config.learnt is not None and not fits_nodes(config.learnt.predictor, context.hook):
        return config.without_learnt()
    return config
