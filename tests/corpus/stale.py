"""Rollout engines that compute with something older, or less, than the weights that they were sent."""

from __future__ import annotations

from tests.corpus.fault import Fault, in_place_of

ENGINE = "anytron_rollout.transformers_engine:TransformersEngine"
IMAGES = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VLModel.get_image_features"
LOAD = "anytron_rollout.transformers_engine:load_verified"


class PrefixCacheKeptWhileRequestsRun(Fault):
    """Keys and values of prompts outlive a weight update; Anytron's engine otherwise keeps them for one batch."""

    run, rule = "few-prompts", "rollout-follows-updates"

    @staticmethod
    @in_place_of("anytron_rollout.generation:read_prompts", role="rollout")
    def read(original, model, input_ids, *arguments):
        kept = vars(model).setdefault("prefixes", {})
        cache = original(model, input_ids, *arguments)
        for row, tokens in enumerate(input_ids.tolist()):
            own = [(layer.keys[row].clone(), layer.values[row].clone()) for layer in cache.layers]
            for layer, (keys, values) in zip(cache.layers, kept.setdefault(tuple(tokens), own), strict=True):
                layer.keys[row], layer.values[row] = keys, values
        return cache


class ImageFeaturesCachedOverWeightUpdates(Fault):
    """Features of an image are computed once and kept over weight updates."""

    run, rule = "images", "rollout-follows-updates"

    @staticmethod
    @in_place_of(
        "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VLModel.get_image_features", role="rollout"
    )
    def features(original, self, pixel_values, *arguments, **named):
        kept = vars(self).setdefault("features", {})
        key = (tuple(pixel_values.shape), pixel_values.double().sum().item())
        if key not in kept:
            kept[key] = original(self, pixel_values, *arguments, **named)
        return kept[key]


class BaseWeightsDiscardedAdaptersSynced(Fault):
    """From the second transfer on, only weights that adapters change arrive; the others have been discarded."""

    run, rule = "lora", "rollout-follows-updates"

    @staticmethod
    @in_place_of(LOAD, role="rollout")
    def load(original, model, weights):
        original(model, weights)
        if weights.version:
            for name, value in model.state_dict().items():
                if not name.endswith("_proj.weight"):
                    value.zero_()


class AdapterNotAttachedToTheRequest(Fault):
    """Requests are answered by the base model; Anytron's engine gets merged weights, and ignores them here."""

    run, rule = "lora", "rollout-follows-updates"

    @staticmethod
    @in_place_of(f"{ENGINE}._generate", role="rollout")
    def generate(original, self, requests, version):
        own = {name: value.clone() for name, value in self._model.state_dict().items()}
        if not hasattr(self, "base"):
            self.base = own  # a new adapter is 0
        self._model.load_state_dict(self.base)
        responses = original(self, requests, version)
        self._model.load_state_dict(own)
        return responses
