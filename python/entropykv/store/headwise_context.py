"""Make the llama_context of the headwise store, for one sequence or for several that share it."""

from __future__ import annotations

import llama_cpp

from entropykv import _core
from entropykv.llamacpp.context import relu2_layers
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.recurrent import is_recurrent
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.store.headwise_probe import hooked_context, probed_layers, refuse_by_kind
from entropykv.store.key_centres import key_centres
from entropykv.store.store_context import StoreContext


class HeadwiseContext(StoreContext):
    """Hold a context whose attention is ours; llama.cpp's own cells hold only one micro-batch."""

    def __init__(
        self,
        model: Model,
        config: ResolvedConfig,
        n_ubatch: int,
    ) -> None:
        """Probe the model's graph, and change it from then on.

        `n_ubatch` is the most tokens of a sequence in a micro-batch, including its echo. Stores of
        a pool share the context's pages; otherwise there is a single store with pages of its own.
        Raises UnsupportedModelError if the graph has something that this store does not support.
        """
        options = config.options
        refuse_by_kind(model)
        self.n_sequences = options.n_sequences or 1
        self.n_ubatch = n_ubatch
        self.hook: _core.GraphHook = _core.GraphHook(
            relu2_layers(model, options),
            options.most_threads,
            # In a pool, tokens of several sequences are read together.
            few_tokens=0 if options.in_pool else 1 + options.draft_max,
        )
        n_tokens = n_ubatch + self.n_sequences * config.n_drafts
        self.let_help = self.hook.help
        self.handle = hooked_context(model, options, self.hook, n_tokens, self.n_sequences)
        self.recurrent = is_recurrent(model)
        self.reads_together = not self.recurrent
        try:
            self.layers = probed_layers(model, options, self.hook, self.handle)
            self.key_centres = key_centres(config, self.hook)
            """How the keys of each layer are stored: see key_centres()."""
            if options.in_pool:
                self.pages = _core.SequencePool(
                    self.layers, config.kv_type, n_ubatch, self.n_sequences, config.n_drafts
                )
        except BaseException:
            self.close()
            raise
        self.batch = _core.AttentionBatch()
        self.hook.serve(self.batch)
        self._unfinished = False

    def begin_step(self) -> None:
        """Begin a micro-batch, before the stores of its sequences begin it."""
        if self._unfinished and not self.recurrent:
            self.forget_cells()  # A failed decode leaves some cells.
        self._unfinished = True
        self.batch.clear()
        self.hook.begin_step()

    def end_step(self) -> None:
        """End the micro-batch: free llama.cpp's cells, and check that our op served every layer."""
        self.batch.clear()
        if not self.recurrent:  # Otherwise each store frees those of its own sequence.
            self.forget_cells()
        self._unfinished = False
        self.hook.check_step()

    def forget_cells(self) -> None:
        """Free the cells and states of all sequences."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.handle), False)
