"""Readouts of a chosen visibility of scale, and norms that a run takes away."""

import json
import math

import pytest
import torch

from looped_recipes.common.metrics import read_metrics
from looped_recipes.engine.saving import CheckpointError
from looped_recipes.engine.taper import Taper
from looped_recipes.engine.training import Pretraining
from looped_recipes.settings.recipe import RecipeError, load_recipe
from modeling_looped import LoopedConfig, LoopedForCausalLM
from modeling_looped.configuration_looped import READOUTS
from tests.helpers import random_ids, tiny_config, tiny_model


def radial_derivative(model, ids, loop: int) -> torch.Tensor:
    """d ||readout|| / d log ||H||, over ||readout||, of every token: 0 if scale is hidden, 1 if it is seen whole."""
    state = model(ids, output_loop_readout_states=True).loop_readout_states[loop - 1].detach()
    grown = model.model.readout(state * (1 + 1e-6), loop)
    return ((grown.norm(dim=-1) / model.model.readout(state, loop).norm(dim=-1)).log() / 1e-6).detach()


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"readout_norm": "rmsnorm"}, [0, 0, 0, 0]),
        ({"readout_norm": "none"}, [1, 1, 1, 1]),
        ({"readout_norm": "final_only"}, [1, 1, 0, 0]),
        ({"readout_norm": "final_raw"}, [0, 0, 1, 1]),
        ({"readout_norm": "alpha", "readout_alpha": 0.3, "readout_alpha_learned": False}, [0.3] * 4),
        ({"readout_norm": "final_alpha", "readout_alpha": 0.3, "readout_alpha_learned": False}, [0, 0, 0.3, 0.3]),
    ],
)
def test_how_much_of_the_scale_is_seen_at_every_loop(fields, seen):
    """In a model of 3 loops, run to 4."""
    model = tiny_model(**fields, rms_norm_eps=1e-12).double()
    for loop, wanted in enumerate(seen, start=1):
        found = radial_derivative(model, random_ids(2, 5), min(loop, 3)) if loop <= 3 else None
        if found is None:
            state = torch.randn(2, 5, 32, dtype=torch.float64)
            found = (model.model.readout(state * math.e, loop).norm() / model.model.readout(state, loop).norm()).log()
        torch.testing.assert_close(found, torch.full_like(found, wanted), rtol=0, atol=1e-4)


def test_alphas_belong_to_loops():
    """The k-th to loop k, the last to all deeper ones; rows and tokens of different depths take their own."""
    model = tiny_model(readout_norm="alpha", num_readout_alphas=2, num_loops=4).double()
    state = torch.randn(3, 5, 32, dtype=torch.float64)
    of_loops = [model.model.readout(state, depth) for depth in range(1, 6)]
    assert not torch.allclose(of_loops[0], of_loops[1])
    for deeper in of_loops[2:]:
        assert torch.equal(of_loops[1], deeper)
    of_rows = model.model.readout(state, [1, 2, 4])
    torch.testing.assert_close(of_rows, torch.cat([of_loops[0][:1], of_loops[1][1:]]))
    depths = torch.tensor([[1, 2, 3, 1, 5]] * 3)
    of_tokens = model.model.readout(state, depths)
    torch.testing.assert_close(of_tokens, torch.where(depths[..., None] == 1, of_loops[0], of_loops[1]))


def test_alpha_of_a_state_that_is_zero_has_a_gradient():
    model = tiny_model(readout_norm="alpha")
    state = torch.zeros(1, 2, 32, requires_grad=True)
    read = model.model.readout(state, 1)
    (gradient,) = torch.autograd.grad(read.sum(), state)
    assert not read.any() and gradient.isfinite().all()


@pytest.mark.parametrize("kind", READOUTS)
def test_a_readout_survives_saving(kind, tmp_path):
    model = tiny_model(readout_norm=kind)
    if kind == "taper":
        model.model.norm.gate.fill_(0.4)
        model.model.norm.scale.fill_(1.3)
    ids = random_ids(2, 5)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        loaded = LoopedForCausalLM.from_pretrained(tmp_path)(ids, num_loops=2, output_loop_logits=True)
        for ours, theirs in zip(model(ids, num_loops=2, output_loop_logits=True).loop_logits, loaded.loop_logits):
            assert torch.equal(ours, theirs)


def test_every_readout_in_the_config_is_in_the_table():
    for kind in READOUTS:
        LoopedConfig(readout_norm=kind)
    for kind in ("batchnorm", "raw"):
        with pytest.raises(ValueError, match="readout_norm"):
            LoopedConfig(readout_norm=kind)


# The taper


def test_the_linear_map_is_the_least_squares_fit_of_the_norm():
    norm = tiny_model(readout_norm="taper").double().model.norm
    x = torch.randn(50, 32, dtype=torch.float64) * torch.rand(50, 1, dtype=torch.float64).exp()
    above, below = norm.fit_terms(x)
    wanted = torch.nn.functional.rms_norm(x, (32,), norm.weight, norm.eps)
    basis = (norm.weight * x).flatten()
    solution = torch.linalg.lstsq(basis[:, None], wanted.flatten()[:, None]).solution.item()
    assert (above / below).item() == pytest.approx(solution)
    norm.linearise(solution)
    norm.gate.fill_(0.0)
    torch.testing.assert_close(norm(x), (solution * basis).view_as(x))


def test_the_gate_follows_the_step():
    recipe = load_recipe("recipes/smoke/readout_taper.yaml", ["training.taper_start=0.2", "training.taper_end=0.6"])
    taper = Taper(None, recipe, 100)
    gates = [taper.gate(step) for step in range(101)]
    assert gates[:21] == [1.0] * 21 and gates[60:] == [0.0] * 41
    assert gates[30] == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert gates[40] == pytest.approx(0.5)
    assert all(before > after for before, after in zip(gates[20:60], gates[21:61]))


def test_a_run_whose_taper_has_begun_keeps_its_length():
    """Its linear map is fitted where the taper begins: at another step it would be fitted again, or never."""
    recipe = load_recipe("recipes/smoke/readout_taper.yaml", ["training.taper_start=0.2", "training.taper_end=0.6"])
    taper = Taper(None, recipe, 50)  # from step 10 on
    for step, total_steps in ((10, 100), (30, 50), (4, 20)):
        taper.check_length(step, total_steps)
    with pytest.raises(CheckpointError, match="100 steps .* from step 20 on, a run of 50 from step 10 on, and 11 are"):
        taper.check_length(11, 100)
    with pytest.raises(CheckpointError, match="20 steps .* from step 4 on, a run of 50 from step 10 on, and 5 are"):
        taper.check_length(5, 20)


@pytest.mark.parametrize(("start", "end"), [(0.5, 0.5), (0.6, 0.2), (-0.1, 1.0), (0.0, 1.5)])
def test_a_taper_within_the_run(start, end):
    settings = [f"training.taper_start={start}", f"training.taper_end={end}"]
    with pytest.raises(RecipeError, match=f"taper_start.*got {start} and {end}"):
        load_recipe("recipes/smoke/readout_taper.yaml", settings)


@pytest.fixture
def train(tmp_path):
    """A run of 8 steps whose norm goes from step 2 to step 8."""

    def run(name, *settings):
        arguments = ["training.steps=8", "training.save_every=100", "training.keep_last=20", "evaluation.every=100"]
        arguments += ["logging.every=1", "evaluation.rows=2", "training.rows_per_step=4"]
        arguments += [f"data.cache_dir={tmp_path / 'shards'}", f"training.output_dir={tmp_path / name}", *settings]
        run = Pretraining(load_recipe("recipes/smoke/readout_taper.yaml", arguments))
        return run, run.train()

    return run


@pytest.mark.slow
def test_a_run_tapers_its_norm_and_resumes_bit_for_bit(train, tmp_path):
    whole, final = train("whole")
    records = [record for record in read_metrics(tmp_path / "whole" / "metrics.jsonl") if "taper_gate" in record]
    assert [record["taper_gate"] for record in records] == [whole.taper.gate(step) for step in range(8)]
    model = LoopedForCausalLM.from_pretrained(final)
    norm = model.model.norm
    assert norm.gate == 0 and norm.scale != 1 and not torch.equal(norm.linear_weight, norm.weight)
    state = torch.randn(1, 3, 64)
    torch.testing.assert_close(model.model.readout(2 * state, 1), 2 * model.model.readout(state, 1))

    for stop in (2, 5):  # where it starts, and while it goes
        train("parts", f"training.stop_after={stop}")
    train("parts")
    wanted, found = (
        [json.dumps(record["loss"]) for record in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in record]
        for name in ("whole", "parts")
    )
    assert found == wanted and len(wanted) == 8
    other = LoopedForCausalLM.from_pretrained(tmp_path / "parts" / "final")
    for (name, ours), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.slow
def test_micro_batches_do_not_change_what_the_taper_is_fitted_to(train):
    dropouts = [f"model.{part}_dropout=0" for part in ("attention", "residual", "embedding")]
    scales = [
        train(name, f"training.micro_batch_size={size}", "training.steps=3", "training.taper_start=0.5", *dropouts)[0]
        for name, size in (("ones", 1), ("fours", 4))
    ]
    ours, theirs = (run.bare.model.norm.scale.item() for run in scales)
    assert ours != 1 and ours == pytest.approx(theirs, rel=1e-3)


# Dropout


def dropped(fields: dict) -> dict:
    """Per branch of a block in training, how much of what it adds to the stream is zero."""
    torch.manual_seed(0)
    model = LoopedForCausalLM(tiny_config(num_core_layers=1, num_loops=1, hidden_size=64, **fields)).train()
    block, seen = model.model.core[0], {}
    join = block.join

    def watched(stream, branch, scale, part, *of_loop):
        after = join(stream, branch, scale, part, *of_loop)
        seen[part] = ((after - stream) == 0).float().mean().item()
        return after

    block.join = watched
    model(random_ids(8, 20))
    return seen


@pytest.mark.parametrize(
    ("where", "attention", "mlp"), [("both", 0.4, 0.4), ("attention", 0.4, 0.0), ("mlp", 0.0, 0.4)]
)
def test_where_residual_dropout_acts(where, attention, mlp):
    seen = dropped({"residual_dropout": 0.4, "residual_dropout_on": where})
    assert seen == {"attention": pytest.approx(attention, abs=0.02), "mlp": pytest.approx(mlp, abs=0.02)}


def test_attention_dropout_acts_on_probabilities():
    """Values of one see the sum of what is left of their probabilities: with one key either nothing or 1 / (1 - p)."""
    torch.manual_seed(0)
    model = LoopedForCausalLM(tiny_config(attention_dropout=0.25, num_loops=1)).train()
    seen = []
    attention = model.model.core[0].self_attn
    attention.v_proj.forward = lambda x: torch.ones(*x.shape[:-1], attention.v_proj.out_features)
    attention.o_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(random_ids(400, 1))
    values = seen[0].unflatten(-1, (4, 8))
    assert (values == values[..., :1]).all()  # of a head, all or nothing
    assert values.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert (values[..., 0] == 0).float().mean() == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize("preset", [name for name in LoopedConfig.preset_names() if name.startswith("readout_")])
def test_dropout_of_the_readout_paper(preset):
    """On attention probabilities, on what the MLP adds and on the input, not on what attention adds; none at 1.4B."""
    config = LoopedConfig.from_preset(preset)
    rates = (config.attention_dropout, config.residual_dropout, config.embedding_dropout)
    assert rates == ((0.0,) * 3 if "1b4" in preset else (0.1,) * 3)
    assert config.residual_dropout_on == ("both" if "1b4" in preset else "mlp")
