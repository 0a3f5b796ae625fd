"""Every test runs offline, seeded, on one thread, and leaves nothing in the user's home."""

import atexit
import os
import shutil
import tempfile


# before transformers is imported; a folder of its own for each process, so that parallel workers do not collide
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="looped-tests-")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402


# quick: the same examples in every run, so that a failure is the change's; thorough (make test-all): fresh ones
settings.register_profile(
    "quick", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("thorough", settings.get_profile("quick"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(autouse=True)
def one_seeded_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)
