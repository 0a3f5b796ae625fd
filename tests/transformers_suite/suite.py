"""The mixins of transformers on one tiny model of the Looped family; run.py prepares what they need."""

import inspect
import os
import unittest

from models import ALL_CLASSES, LoopedModelTester

from modeling_looped import (
    LoopedConfig,
    LoopedForCausalLM,
    LoopedForSequenceClassification,
    LoopedForTokenClassification,
    LoopedModel,
)
from tests import test_fsdp_mixin, test_tensor_parallel_mixin
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin
from tests.test_pipeline_mixin import PipelineTesterMixin
from tests.test_training_mixin import TrainingTesterMixin


for head in ALL_CLASSES[2:]:  # transformers' own have annotations that are strings, which its mixin can not read
    head.forward.__signature__ = inspect.signature(head.forward.__wrapped__, eval_str=True)

test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None
test_fsdp_mixin._get_available_fsdp_workers = lambda: 4  # also where there are fewer cores

INIT_TESTS = ("test_can_init_all_missing_weights", "test_init_weights_can_init_buffers", "test_training_overfit")


class LoopedRanksTest(
    test_tensor_parallel_mixin.TensorParallelTesterMixin, test_fsdp_mixin.FSDPTesterMixin, unittest.TestCase
):
    model_tester = None
    all_model_classes = ALL_CLASSES

    def setUp(self):  # with large weights, tokens of ranks with float8 weights of their own soon differ
        quantized = self._testMethodName == "test_tp_generation_quantized"
        self.model_tester = LoopedModelTester(os.environ["LOOPED_SUITE_MODEL"], published_init=quantized)


class LoopedTest(ModelTesterMixin, TrainingTesterMixin, PipelineTesterMixin, unittest.TestCase):
    model_tester = None
    all_model_classes = ALL_CLASSES
    _torch_compile_train_cls = LoopedForCausalLM
    pipeline_model_mapping = {
        "feature-extraction": LoopedModel,
        "text-generation": LoopedForCausalLM,
        "text-classification": LoopedForSequenceClassification,
        "token-classification": LoopedForTokenClassification,
        "zero-shot": LoopedForSequenceClassification,
    }

    def setUp(self):
        name = os.environ["LOOPED_SUITE_MODEL"]
        self.model_tester = LoopedModelTester(name, published_init=self._testMethodName in INIT_TESTS)

    def test_config(self):
        fields = self.model_tester.get_config().to_diff_dict()
        ConfigTester(self, config_class=LoopedConfig, **fields).run_common_tests()

    def test_labels_are_prepared(self):
        """Heads that the mixins do not know get no labels, and then every test with a loss passes without one."""
        _, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in ALL_CLASSES[1:]:
            added = set(self._prepare_for_class(inputs, model_class, return_labels=True)) - set(inputs)
            self.assertTrue({"labels"} <= added or {"start_positions", "end_positions"} <= added, model_class)

    def test_num_layers_is_small(self):  # the mixin counts slots
        self.assertLessEqual(self.model_tester.get_config().num_layers, 3)

    def test_inputs_embeds(self):
        self.skip_if_tokens_are_needed()
        super().test_inputs_embeds()

    def test_inputs_embeds_matches_input_ids(self):
        self.skip_if_tokens_are_needed()
        super().test_inputs_embeds_matches_input_ids()

    def skip_if_tokens_are_needed(self):
        if self.model_tester.get_config().value_embeddings:
            self.skipTest("value embeddings are looked up by token: such a model refuses inputs_embeds")

    def test_generation_tester_mixin_inheritance(self):
        self.skipTest("the source distribution has no GenerationTesterMixin")
