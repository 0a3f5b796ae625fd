"""generate() of a looped model: transformers' own, with depth and cache sharing as arguments."""

import torch
from transformers.generation import GenerationMixin

from .cache import LoopedCache
from .depth import check_depths


def depth_argument(num_loops) -> int | torch.LongTensor:
    """One depth, or a tensor of one per prompt, which transformers repeats for beams as it would not repeat a list."""
    is_one = not isinstance(num_loops, (list, tuple)) and not (torch.is_tensor(num_loops) and num_loops.ndim > 0)
    depths = check_depths(num_loops, 1 if is_one else len(num_loops))
    return depths[0] if is_one else torch.tensor(depths, dtype=torch.long)


class LoopedGenerationMixin(GenerationMixin):
    def generate(self, *args, num_loops=None, cache_sharing: str | None = None, **kwargs):
        """As `GenerationMixin.generate`.

        num_loops: depth of every token, one number or one per prompt. cache_sharing: "none", "last" or "cyclic-S".
        """
        if num_loops is not None:
            num_loops = kwargs["num_loops"] = depth_argument(num_loops)
            if torch.is_tensor(num_loops):  # a static cache compiles by itself, but which rows run is data
                kwargs["disable_compile"] = True
        if cache_sharing is not None and cache_sharing != "none":
            for name, default in (("past_key_values", None), ("cache_implementation", None), ("use_cache", True)):
                if kwargs.get(name, default) not in (default, None):
                    raise ValueError(
                        f"cache_sharing={cache_sharing!r} makes its own cache, which {name} contradicts: leave one out"
                    )
            deepest = num_loops if num_loops is None or isinstance(num_loops, int) else max(num_loops.tolist())
            kwargs["past_key_values"] = LoopedCache(self.config, cache_sharing, deepest)
        return super().generate(*args, **kwargs)

    def _assisted_decoding(self, *args, past_key_values=None, **kwargs):
        sharing = getattr(past_key_values, "sharing", "none")
        if sharing != "none":
            raise ValueError(
                f"cache_sharing={sharing!r} makes a token's cache depend on how the sequence was cut into passes, and "
                "assisted decoding cuts it otherwise: use one of the two"
            )
        return super()._assisted_decoding(*args, past_key_values=past_key_values, **kwargs)

    def _get_candidate_generator(self, *args, model_kwargs: dict, **kwargs):
        """num_loops is a depth of this model, not of its assistant, which drafts at its own."""
        model_kwargs = {key: value for key, value in model_kwargs.items() if key != "num_loops"}
        return super()._get_candidate_generator(*args, model_kwargs=model_kwargs, **kwargs)

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
