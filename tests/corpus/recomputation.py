"""Passes that are made twice, and are not the same twice."""

from __future__ import annotations

from tests.corpus.fault import Fault, in_place_of


class DropoutDrawnAgainInBackward(Fault):
    """A layer that is computed again draws its dropout from the present random state."""

    run, rule = "dropout", "recomputed-equals-kept"

    @staticmethod
    @in_place_of("megatron.core.tensor_parallel.random:_set_all_rng_states")
    def present(original, *states):
        pass


class WarmUpChangesABuffer(Fault):
    """A pass that warms up before the first update moves the bias by which experts are chosen."""

    run, rule = "mla", "router-bias"

    @staticmethod
    @in_place_of("anytron_megatron.training.trained_model:TrainedModel.update")
    def warmed_up(original, self, micro_batches, loss_fn, *features):
        from anytron_megatron.training.schedule import forward_backward

        if self.updates == 0:
            forward_backward(self.chunks, micro_batches, self._preparer, loss_fn, *features)
        return original(self, micro_batches, loss_fn, *features)
