"""Auto classes of transformers for the published layouts, on request.

Without registration, AutoConfig does not know these model types, or runs the code of their repositories. Parcae's
config.json has no model_type, so AutoConfig cannot open it: LoopedForCausalLM.from_pretrained does, and
`looped convert` makes a folder of it that opens everywhere.
"""

import transformers
from transformers.configuration_utils import PreTrainedConfig

from ..configuration_looped import LoopedConfig
from .reading import read_public_config
from .registry import READABLE


def foreign_config(model_type: str) -> type:
    """Return a config class that is registered for a model type and makes a LoopedConfig of each config.json."""

    class ForeignConfig(PreTrainedConfig):
        @classmethod
        def from_dict(cls, config_dict, **kwargs):
            path = kwargs.get("name_or_path") or config_dict.get("_name_or_path", "")
            return LoopedConfig.from_dict(read_public_config(config_dict, path, kwargs), **kwargs)

    ForeignConfig.__name__ = f"{model_type.title().replace('_', '')}AsLoopedConfig"
    ForeignConfig.model_type = model_type
    return ForeignConfig


def register_public_formats():
    """Let AutoConfig and AutoModel..., and with them pipeline and lm_eval, open folders of these layouts as models
    of this package, without trust_remote_code. Models are still saved in the layout of this package."""
    for model_type in {layout.model_type for layout in READABLE if layout.model_type}:
        transformers.AutoConfig.register(model_type, foreign_config(model_type), exist_ok=True)
