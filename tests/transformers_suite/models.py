"""Tiny models in the form in which transformers' mixins want them: a config, and inputs for it."""

import torch
from transformers.testing_utils import torch_device

from modeling_looped import (
    LoopedConfig,
    LoopedForCausalLM,
    LoopedForQuestionAnswering,
    LoopedForSequenceClassification,
    LoopedForTokenClassification,
    LoopedModel,
)


ALL_CLASSES = (
    LoopedModel,
    LoopedForCausalLM,
    LoopedForSequenceClassification,
    LoopedForTokenClassification,
    LoopedForQuestionAnswering,
)

TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 36,  # for two ranks, over which transformers 5.17 splits no odd size
    "num_attention_heads": 4,
    "num_core_layers": 1,
    "num_loops": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}

MODELS = {
    "plain": {"num_core_layers": 2, "num_key_value_heads": 2},
    "parcae": {"preset": "parcae", "num_prelude_layers": 1, "num_coda_layers": 1},
    "flt": {"preset": "flt", "num_core_layers": 2},
    "ouro": {"preset": "ouro"},
    "huginn": {
        "preset": "huginn",
        "num_prelude_layers": 1,
        "num_core_layers": 1,
        "num_coda_layers": 1,
        "window_pattern": "SL",
    },
}

# zero residual outputs, or uniform attention, would hide from a test whatever attention does
VISIBLE = {"init_scheme": "normal", "initializer_range": 0.2}


class LoopedModelTester:
    """What the mixins ask about a model."""

    base_model_class = LoopedModel
    causal_lm_class = LoopedForCausalLM
    sequence_classification_class = LoopedForSequenceClassification
    is_training = True
    batch_size, seq_length = 7, 9

    def __init__(self, name: str, published_init: bool):
        self.fields = {**TINY, **MODELS[name]} if published_init else {**TINY, **MODELS[name], **VISIBLE}
        config = self.get_config()
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.num_attention_heads = config.num_attention_heads
        self.num_hidden_layers = config.num_hidden_layers  # as many attentions and hidden states as slots

    def get_config(self) -> LoopedConfig:
        fields = dict(self.fields)
        preset = fields.pop("preset", None)
        return LoopedConfig(**fields) if preset is None else LoopedConfig.from_preset(preset, **fields)

    def prepare_config_and_inputs_for_common(self):
        shape = self.batch_size, self.seq_length
        input_ids = torch.randint(3, self.vocab_size, shape, device=torch_device)
        attention_mask = torch.ones(shape, dtype=torch.long, device=torch_device).tril()
        return self.get_config(), {"input_ids": input_ids, "attention_mask": attention_mask}
