"""Activations that are computed again: the same gradients from less memory."""

import json
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from looped_recipes.engine.activations import keep_fewer_activations
from looped_recipes.engine.profiling import Profile
from looped_recipes.settings.recipe import RecipeError, load_recipe
from looped_recipes.settings.run_checks import check_run
from tests.helpers import quick_and_slow, random_ids, tiny_model
from tests.helpers_pretrain import SMOKE


SYSTEMS = {
    "parcae": {"preset": "parcae", "num_prelude_layers": 1, "num_coda_layers": 1},
    "ouro": {"preset": "ouro"},
    "flt": {"preset": "flt"},
    "dropout": {"residual_dropout": 0.1, "num_prelude_layers": 1},
}
WAYS = [True, "loops", "selective"]  # tests/gpu has the fourth


class Products(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        return sum(self.counts[name] for name in ("mm", "addmm", "bmm"))


def gradients(model, **how):
    model.zero_grad()
    torch.manual_seed(0)
    ids = random_ids(2, 8)
    model(ids, labels=ids, use_cache=False, output_logits=False, **how).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "depths", [{"num_loops": 3}, {"num_loops": [3, 2], "backprop_loops": 2}], ids=["one", "mixed"]
)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("system", quick_and_slow(SYSTEMS, "parcae"))
def test_gradients_stay_what_they_were(system, way, depths):
    model = tiny_model(**SYSTEMS[system]).double().train()
    expected = gradients(model, **depths)
    keep_fewer_activations(model, way)
    found = gradients(model, **depths)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)


def test_what_is_computed_again():
    counted = {}
    for way in (False, True, "loops", "selective"):
        model = tiny_model(num_core_layers=2).train()
        if way:
            keep_fewer_activations(model, way)
        with Products() as counted[way]:
            gradients(model, num_loops=3)
    products = {way: of_way.products for way, of_way in counted.items()}
    assert products[False] < products[True] <= products["loops"]  # nothing follows the last product of a block
    assert products["selective"] == products[False]
    assert counted["selective"].counts["silu"] == 2 * counted[False].counts["silu"] > 0


def test_loops_that_read_keys_of_others_are_refused():
    with pytest.raises(RecipeError, match="gradient_checkpointing='loops'.*num_key_value_loops=1.*set it to true"):
        keep_fewer_activations(tiny_model(num_key_value_loops=1, injection="add"), "loops")
    recipe = load_recipe(SMOKE / "ouro.yaml", ["training.gradient_checkpointing=loops", "model.num_key_value_loops=1"])
    with pytest.raises(RecipeError, match="gradient_checkpointing='loops'.*num_key_value_loops=1"):
        check_run(recipe)


def test_a_profile_of_some_steps(tmp_path):
    profile = Profile(tmp_path, first=1, num_steps=2)
    for step in range(5):
        with profile.of_step(step):
            torch.ones(4) @ torch.ones(4)
    profile.write()
    (path,) = tmp_path.iterdir()
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert {name for name in names if str(name).startswith("step ")} == {"step 1", "step 2"}
