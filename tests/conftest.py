"""Every test runs offline, seeded, on one thread, and leaves nothing in the user's home."""

import atexit
import gc
import hashlib
import itertools
import json
import logging
import os
import random
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace


# before transformers is imported; a folder of its own for each process, so that parallel workers do not collide
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="looped-tests-")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
gc.disable()  # until all tests are imported, whose objects stay in any case

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from transformers import dynamic_module_utils  # noqa: E402


# quick: the same few examples in every run, so that a failure is the change's; thorough (make test-all): fresh ones
settings.register_profile(
    "quick",
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("thorough", settings.get_profile("quick"), derandomize=False, max_examples=100)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(autouse=True, scope="session")
def machine_is_not_described():
    """lm-eval would run a dozen commands for that after every evaluation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")
        yield


@pytest.fixture(autouse=True, scope="session")
def devices_that_are_not_there_get_no_seed():
    """torch would keep one for each until it is there, and with it the whole stack of calls, which takes a while."""
    with pytest.MonkeyPatch.context() as patch:
        for backend in (torch.cuda, torch.xpu, torch.mtia):
            if not backend.is_available():
                patch.setattr(backend, "manual_seed_all", lambda seed: None, raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def files_of_the_family_are_searched_once():
    """Each save of a model looks for what its 60 files import, and copies some of them twice: half of a small save."""
    import modeling_looped

    search, family, known = dynamic_module_utils.get_relative_import_files, Path(modeling_looped.__file__).parent, {}

    def found(module_file):
        if Path(module_file).parent != family:
            return search(module_file)
        if module_file not in known:
            known[module_file] = list(dict.fromkeys(search(module_file)))
        return known[module_file]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "get_relative_import_files", found)
        yield


@pytest.fixture(autouse=True, scope="session")
def the_disk_is_not_waited_for():
    """A training forces a hundred files to the disk. No test takes its power away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which also refuses what is no open file
        yield


@pytest.fixture(autouse=True, scope="session")
def trainers_look_for_no_garbage():
    """The Trainer does before it trains, in all that earlier tests have made: a fifth of the time of a short run."""
    with pytest.MonkeyPatch.context() as patch:
        # not with a GPU, whose memory is measured, nor in an environment that only serves
        if find_spec("accelerate") and not torch.cuda.is_available():
            patch.setattr("accelerate.utils.memory.gc", SimpleNamespace(collect=lambda: 0))
        yield


@pytest.fixture(autouse=True)
def one_seeded_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def training_text(tmp_path_factory):
    """A folder with train.jsonl, sentences of a small grammar, drawn from a fixed seed."""
    draw = random.Random(0)
    words = ["".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(2, 7))) for _ in range(120)]
    folder = tmp_path_factory.mktemp("text")
    documents = [
        " ".join(words[min(int(draw.expovariate(0.05)), 119)] for _ in range(draw.randint(20, 200)))
        for _ in range(150)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return folder


@pytest.fixture
def logged():
    """The records that reach the root logger."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger().addHandler(handler)
    yield records
    logging.getLogger().removeHandler(handler)


@pytest.fixture
def make_data(tmp_path):
    """Makes a small DataConfig over 300 documents, or over the source that is given."""
    from looped_recipes.settings.recipe import DataConfig
    from tests.helpers_data import make_documents, write_jsonl

    def make(**fields):
        fields.setdefault("source", tmp_path / "source" / "documents.jsonl")
        if not any(tmp_path.glob("source/*")):
            write_jsonl(tmp_path / "source" / "documents.jsonl", make_documents(300))
        fields = {"tokenizer_vocab_size": 320, "sequence_length": 32, "validation_fraction": 0.1} | fields
        return DataConfig(**{**fields, "source": str(fields["source"]), "cache_dir": str(tmp_path / "shards")})

    return make


def pytest_addoption(parser):
    said = "of the tests marked gpu; without a GPU, cpu runs them, or pretended (see tests/pretended_device.py)"
    parser.addoption("--device", default="cuda", help=said)


def pytest_configure(config):
    if config.getoption("--device") == "pretended":
        from tests.pretended_device import install

        install()


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def device(request) -> str:
    """Where the tests marked `gpu` run."""
    return request.config.getoption("--device")


def pytest_runtest_setup(item):
    device = item.config.getoption("--device")
    if item.get_closest_marker("gpu") and device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU (--device cpu runs the same code)")
    if device == "pretended" and ("compiled" in item.path.name or "flex_attention" in item.name):
        pytest.skip("torch compiles for no such device")


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves out what is slow
def pytest_collection_modifyitems(items):
    """Of a test with the mark `covering(n)` or `some(n, draw)`, the cases that are not chosen are slow."""
    for mark, choose in (("covering", covering_cases), ("some", some_cases)):
        tests = {}
        for item in items:
            if item.get_closest_marker(mark) and not item.get_closest_marker("slow"):
                tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
        for cases in tests.values():
            for case in set(cases).difference(choose(cases, *cases[0].get_closest_marker(mark).args)):
                case.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    """The collector of garbage need not look at what all these imports made, not even once."""
    gc.freeze()
    gc.enable()


def covering_cases(cases: list[pytest.Item], count: int = 1) -> list[pytest.Item]:
    """A few cases of a test in which all values of `count` parameters occur together that do so in any case.

    Each one chosen adds as many as any could; of equals, the first.
    """
    values = {
        case: set(itertools.combinations([(name, repr(value)) for name, value in case.callspec.params.items()], count))
        for case in cases
    }
    missing, chosen = set().union(*values.values()), []
    while missing:
        chosen.append(max(cases, key=lambda case: len(values[case] & missing)))
        missing -= values[chosen[-1]]
    return chosen


def some_cases(cases: list[pytest.Item], count: int, draw: str | None = None) -> list[pytest.Item]:
    """`count` cases of a test, the same in every run, with as many values of each parameter as they can have.

    draw: tests of the same draw run the same cases, as far as they have them.
    """

    def place(case: pytest.Item) -> bytes:
        name = case.nodeid if draw is None else f"{draw} {case.callspec.id}"
        return hashlib.sha256(name.encode()).digest()

    drawn = sorted(cases, key=place)
    chosen = covering_cases(drawn)
    return [*chosen, *(case for case in drawn if case not in chosen)][:count]
