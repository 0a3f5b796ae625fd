"""Run transformers' model tests on one tiny model: python run.py TESTS MODEL REPORT [pytest options]

TESTS is the folder `tests` of transformers' source distribution, MODEL a key of `models.MODELS`, REPORT the json file
to write: [test, outcome, message] for every test and subtest. Run it outside of the project, whose `tests` is another.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType


HERE = Path(__file__).resolve().parent
MAPPINGS = {
    "MODEL_MAPPING_NAMES": "LoopedModel",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "LoopedForCausalLM",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "LoopedForSequenceClassification",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "LoopedForTokenClassification",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": "LoopedForQuestionAnswering",
}
CONFIG_FIELDS = {  # of every config; the list of transformers' own tests is not in the source distribution
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["LoopedModel"],
    "id2label": {0: "label"},
    "label2id": {"label": "0"},
    "problem_type": "regression",
}


def add_module(name: str, **contents):
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


def provide_tests_package(folder: str):
    """`tests`, with empty mixins and small stand-ins for what is not in the source distribution."""
    add_module("tests", __path__=[folder])
    add_module("tests.generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {}))
    add_module("tests.exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
    add_module("tests.utils.test_configuration_utils", config_common_kwargs=CONFIG_FIELDS)

    import pipelines
    import ranks
    from torch import multiprocessing

    add_module("tests.distributed_testing_utils", **ranks.UTILITIES)
    multiprocessing.spawn = ranks.start  # in older versions the mixins start them
    for name in re.findall(r"pipelines\.(test_pipelines_\w+)", Path(folder, "test_pipeline_mixin.py").read_text()):
        sys.modules[f"tests.pipelines.{name}"] = pipelines


def register():
    """The mixins know a head by its name in transformers' own tables."""
    import transformers
    from transformers.models.auto import modeling_auto

    import modeling_looped  # noqa: F401

    for mapping, name in MAPPINGS.items():
        getattr(modeling_auto, mapping)["looped"] = name
    transformers.utils.direct_transformers_import = lambda *args, **kwargs: transformers  # not the sdist's copy


def prepare(folder: str):
    sys.path += [str(HERE.parent), str(HERE.parent.parent)]  # helpers; modeling_looped
    provide_tests_package(folder)
    register()


def save_models(folder: str, name: str):
    """For the pipeline tests, which load their models, and the list of them, from a folder."""
    import torch
    from helpers import tiny_tokenizer
    from models import ALL_CLASSES, LoopedModelTester

    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    for model_class in ALL_CLASSES:
        target = Path(folder, "looped", model_class.__name__)
        model_class(LoopedModelTester(name, published_init=False).get_config()).save_pretrained(target)
        tokenizer.save_pretrained(target)
    report = Path(folder, "reports", "tiny_model_summary.json")
    report.parent.mkdir()
    entry = {"tokenizer_classes": ["PreTrainedTokenizerFast"], "processor_classes": []}
    report.write_text(json.dumps({model_class.__name__: entry for model_class in ALL_CLASSES}))


class Recorder:
    def __init__(self):
        self.outcomes = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            message = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            if report.failed:
                message += f"\n{report.capstderr}"  # of ranks, too
            self.outcomes.append([report.nodeid.rpartition("::")[2], report.outcome, message])


def main(tests: str, name: str, report: str, *options: str):
    import pytest

    os.environ["LOOPED_SUITE_TESTS"], os.environ["LOOPED_SUITE_MODEL"] = tests, name
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))  # of ranks
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is needed, and importing them takes seconds
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRANSFORMERS_TINY_MODEL_PATH"] = folder
        prepare(tests)
        save_models(folder, name)
        quiet = ["-q", "--disable-warnings", "-p", "no:cacheprovider", "--noconftest"]
        quiet += ["-c", os.devnull, "--rootdir", folder]
        pytest.main([*quiet, *options, str(HERE / "suite.py")], plugins=[recorder])
    Path(report).write_text(json.dumps(recorder.outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
