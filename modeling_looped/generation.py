"""generate() of a looped model: transformers' own, with depth and cache sharing as arguments."""

import torch
from transformers.generation import GenerationMixin

from .cache import LoopedCache
from .depth import check_depths


class LoopedGenerationMixin(GenerationMixin):
    def generate(self, *args, num_loops=None, cache_sharing: str | None = None, **kwargs):
        """As `GenerationMixin.generate`.

        num_loops: depth of every token, one number or one per prompt. cache_sharing: "none", "last" or "cyclic-S".
        """
        if num_loops is not None:
            if isinstance(num_loops, (list, tuple)):  # a tensor is repeated for beams, a list would not be
                num_loops = torch.tensor(check_depths(num_loops, len(num_loops)))
            kwargs["num_loops"] = num_loops
        if cache_sharing is not None and cache_sharing != "none":
            if kwargs.get("assistant_model") is not None or kwargs.get("prompt_lookup_num_tokens"):
                raise ValueError(
                    f"cache_sharing={cache_sharing!r} makes a token's cache depend on how the sequence was cut into "
                    "passes, "
                    "which assisted decoding changes: use one or the other"
                )
            if kwargs.get("past_key_values") is not None or kwargs.get("cache_implementation") is not None:
                raise ValueError(
                    f"cache_sharing={cache_sharing!r} makes its own cache: leave out past_key_values and "
                    "cache_implementation"
                )
            depth = (
                None
                if num_loops is None
                else max(check_depths(num_loops, 1 if isinstance(num_loops, int) else len(num_loops)))
            )
            kwargs["past_key_values"] = LoopedCache(self.config, cache_sharing, depth)
        return super().generate(*args, **kwargs)

    def generate_batch(self, inputs, *args, **kwargs):
        """Continuous batching, at the configured depth."""
        refused = {"num_loops", "cache_sharing", "exit_criterion", "exit_threshold", "min_loops", "draft_loops"} & set(
            kwargs
        )
        if refused:
            raise ValueError(
                f"generate_batch runs every sequence at config.num_loops={self.config.num_loops} and does not take "
                f"{', '.join(sorted(refused))}: load the model with from_pretrained(..., num_loops=K), or use generate"
            )
        return super().generate_batch(inputs, *args, **kwargs)
