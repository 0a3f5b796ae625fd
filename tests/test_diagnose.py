"""The diagnostics' measures against closed forms: loops whose states, updates, gradients and spectra are known."""

import copy
import json
import math
from types import MethodType

import pytest
import torch
from torch import nn

from looped_eval.common.hooks import last_state, rewritten_states, trace, training_loss
from looped_eval.diagnose import dynamics, figures, readout_probes, sentences
from looped_eval.diagnose.growth import loop_cosine
from looped_eval.diagnose.premises import premises
from looped_eval.diagnose.transfer import lr_transfer
from looped_recipes.common import measures
from looped_recipes.common.token_losses import next_token_losses
from looped_recipes.data.tokenizers import train_word
from modeling_looped import LoopedForCausalLM, training_warnings
from modeling_looped.injection import AddInjection
from tests.helpers import logits_alive, random_ids, tiny_config, tiny_model
from tests.helpers_diagnose import BATCH, DECAY, embedded, known_model, linear_model


def test_linear_loop_norms_and_changes():
    model = linear_model(DECAY)
    e = embedded(model)
    expected = [(DECAY**t * e).norm(dim=-1).mean().item() for t in range(6)]
    trajectory = dynamics.norm_trajectory(model, BATCH, num_loops=5)
    assert trajectory["norm"] == pytest.approx(expected, rel=1e-6)
    assert trajectory["R"] == pytest.approx([norm / 32**0.5 for norm in expected], rel=1e-6)
    moves = dynamics.state_dynamics(model, BATCH, num_loops=5)
    changes = [((DECAY - 1) * DECAY**t * e).norm(dim=-1).mean().item() for t in range(5)]
    assert moves["change"] == pytest.approx(changes, rel=1e-6)
    assert moves["state_norm"] == pytest.approx(expected[1:], rel=1e-6)
    assert moves["prelude"] == {"input": pytest.approx(expected[0])}
    start, injected, after_block = moves["stage_norms"][2]
    assert start == pytest.approx(expected[2], rel=1e-6) and injected == pytest.approx(expected[3], rel=1e-6)
    assert after_block == pytest.approx(injected)


def test_tied_layers_are_seen_in_every_place():
    """A layer that takes two places has the states of two layers with the same weights."""
    apart = tiny_model(num_core_layers=2, num_loops=3)
    apart.model.core[1].load_state_dict(apart.model.core[0].state_dict())
    tied = copy.deepcopy(apart)
    tied.model.core[1] = tied.model.core[0]
    expected, found = (dynamics.state_dynamics(model, BATCH, num_loops=3) for model in (apart, tied))
    assert found == expected
    with pytest.raises(ValueError, match="^premises tell layers apart, but layers of this core are tied"):
        premises(tied, BATCH)


def test_measures_see_the_states_of_a_replaced_core_pass():
    model, seen = tiny_model(num_loops=4), []

    def core_pass(self, state, embedded, loop, depth, context):
        after = type(self).core_pass(self, state, embedded, loop, depth, context)
        return after + 9 if loop == 1 else after

    plain = trace(model, BATCH, 4).states
    model.model.core_pass = replacement = MethodType(core_pass, model.model)
    expected = model(**BATCH, num_loops=4, output_loop_hidden_states=True).loop_hidden_states
    assert not torch.allclose(expected[1], plain[1], atol=8)
    assert all(map(torch.equal, trace(model, BATCH, 4).states, expected))
    with rewritten_states(model, lambda loop, h: seen.append((loop, h)) or h), last_state(model) as last:
        model(**BATCH, num_loops=4)
    assert [loop for loop, _ in seen] == [1, 2, 3, 4] and torch.equal(last[0], expected[-1])
    assert all(torch.equal(h, wanted) for (_, h), wanted in zip(seen, expected))
    assert vars(model.model)["core_pass"] is replacement


def test_linear_loop_spectrum_and_expansion():
    result = dynamics.spectral(linear_model(DECAY), BATCH, num_loops=3)
    assert result["A"]["spectral_radius"] == result["A"]["spectral_norm"] == pytest.approx(0.9, rel=1e-6)
    assert result["B"]["spectral_norm"] == 0
    model = linear_model(DECAY)
    e = embedded(model)
    ratios = [((DECAY ** (t + 1) * e).norm(dim=-1) / (DECAY**t * e).norm(dim=-1)).mean().item() for t in range(3)]
    measured = dynamics.spectral(model, BATCH, num_loops=3)["A"]["expansion"]
    assert measured == pytest.approx(ratios, rel=1e-6)


def test_spectrum_of_concat_is_that_of_the_state_half():
    model = tiny_model(injection="concat", state_init="zeros")
    a, b = torch.randn(32, 32) / 8, torch.randn(32, 32)
    with torch.no_grad():
        model.model.injection.proj.weight.copy_(torch.cat([a, b], dim=1))
    result = dynamics.spectral(model, BATCH)
    power = torch.linalg.matrix_power(a.double(), 400)  # Gelfand: ||A^n||^(1/n)
    assert result["A"]["spectral_radius"] == pytest.approx(
        torch.linalg.matrix_norm(power, 2).item() ** (1 / 400), rel=0.02
    )
    assert result["A"]["spectral_norm"] == pytest.approx(torch.linalg.svdvals(a)[0].item(), rel=1e-5)
    assert result["B"]["spectral_norm"] == pytest.approx(torch.linalg.svdvals(b)[0].item(), rel=1e-5)
    assert result["A"]["expansion"][0] is None  # the state is zero there


def test_spectrum_of_the_readout_map_and_of_addition():
    model = tiny_model(coda_input="linear", num_coda_layers=1, injection="add", state_init="zeros")
    state = model(**BATCH, output_loop_hidden_states=True).loop_hidden_states[-1]
    result = dynamics.spectral(model, BATCH)
    moved = model.model.coda_proj(state)
    assert result["C"]["expansion"] == pytest.approx((moved.norm(dim=-1) / state.norm(dim=-1)).mean().item(), rel=1e-5)
    assert result["C"]["expansion"] <= result["C"]["spectral_norm"]
    assert result["A"]["spectral_radius"] == 1


def test_no_spectrum_without_a_linear_injection():
    with pytest.raises(ValueError, match="injection='none'.*diagonal"):
        dynamics.spectral(tiny_model(), BATCH)


class Halved(AddInjection):
    def forward(self, state, embedded):
        return super().forward(state / 2, embedded)


class Named(AddInjection):
    pass


@pytest.mark.parametrize("how", ["subclass", "replaced forward"])
def test_no_spectrum_of_an_injection_that_computes_something_else(how):
    model = tiny_model(injection="add")
    model.model.injection = Named(model.config)
    assert dynamics.spectral(model, BATCH)["A"]["spectral_radius"] == 1
    if how == "subclass":
        model.model.injection = Halved(model.config)
    else:
        model.model.injection.forward = lambda state, embedded: state / 2 + embedded
    with pytest.raises(ValueError, match="injection='add', .*: its module is (Halved|Named), and spectral needs"):
        dynamics.spectral(model, BATCH)
    diagonal = linear_model(DECAY)
    diagonal.model.injection.forward = lambda state, embedded: state / 2
    assert measures.spectral_radius(diagonal.model.injection) is None


def test_the_spectrum_of_the_readout_map_is_not_rounded_to_single_precision():
    model = tiny_model(coda_input="linear", num_coda_layers=1, injection="add").double()
    with torch.no_grad():
        model.model.coda_proj.weight.copy_((1 + 1e-9) * torch.eye(32, dtype=torch.float64))
    assert dynamics.spectral(model, BATCH)["C"]["spectral_norm"] - 1 == pytest.approx(1e-9, rel=1e-3)


def test_a_linear_loop_multiplies_small_changes_by_its_radius():
    result = dynamics.sensitivity(linear_model(DECAY), BATCH, num_loops=400)
    assert result["loop"] == list(range(2, 401)) and len(result["growth"]) == 399
    assert result["growth"][-1] == pytest.approx(0.9, rel=1e-3)
    assert result["exponent"] == pytest.approx(math.log(0.9), rel=1e-2)  # of the later half
    assert all(low < high + 1e-4 for low, high in zip(result["growth"], result["growth"][1:]))  # it turns there


def test_sensitivity_is_the_radius_of_the_jacobian_where_the_state_has_settled():
    model, ids = tiny_model(injection="concat", state_init="zeros", num_core_layers=1).double(), random_ids(1, 3)
    with torch.no_grad():
        for parameter in [*model.model.core.parameters(), *model.model.injection.parameters()]:
            parameter *= 0.4
        states = model(ids, num_loops=400, output_loop_hidden_states=True).loop_hidden_states
    assert torch.allclose(states[-1], states[-2], atol=1e-9)

    def loop(state):
        with rewritten_states(model, lambda k, h: state if k == 1 else h):
            return model(ids, num_loops=2, output_loop_hidden_states=True).loop_hidden_states[-1]

    jacobian = torch.autograd.functional.jacobian(loop, states[-1]).view(96, 96)
    radius = torch.linalg.eigvals(jacobian).abs().max().item()
    result = dynamics.sensitivity(model, {"input_ids": ids}, num_loops=600)
    assert math.exp(result["exponent"]) == pytest.approx(radius, rel=0.02) and radius < 1


# Readouts


def test_radial_gradient_of_a_raw_readout_is_that_of_the_head():
    model = tiny_model(readout_norm="none").double()
    result = readout_probes.radial_gradient(model, BATCH)
    states = model(**BATCH, output_loop_hidden_states=True).loop_hidden_states
    for k, state in enumerate(states):
        fractions, along = [], 0.0
        for row, labels in zip(state.detach(), BATCH["input_ids"]):
            for h, label in zip(row[:-1], labels[1:]):  # d CE / dh = W^T (p - y), over 12 predicted tokens
                error = (model.lm_head.weight @ h).softmax(-1)
                error[label] -= 1
                g = model.lm_head.weight.T.detach() @ error.detach()
                fractions.append(((g @ h).abs() / g.norm() / h.norm()).item())
                along += (g @ h).item() / 12
        assert result["r"][k] == pytest.approx(sum(fractions) / 12, rel=1e-9)
        assert result["g"][k] == pytest.approx(along, rel=1e-9)
    assert min(result["r"]) > 1e-3


def test_radial_gradient_of_a_normed_readout_is_zero_up_to_epsilon():
    """<g, H> = eps / (s^2 + eps) <dL/dy, y> for y = rmsnorm(H): linear in eps, and 0 without one."""
    fractions = []
    for eps in (1e-2, 1e-4, 1e-12):
        model = tiny_model(rms_norm_eps=1e-6).double()
        model.model.norm.eps = eps
        fractions.append(readout_probes.radial_gradient(model, BATCH)["final_r"])
    assert fractions[0] / fractions[1] == pytest.approx(100, rel=0.05)
    assert fractions[2] < 1e-11


def test_radial_gradient_is_immediate_also_through_a_coda():
    """g_k = dL_k / dlog |H_k|, by differences of the loss of a rescaled H_k."""
    model = tiny_model(num_coda_layers=1, readout_norm="final_only", num_loops=2).double()
    result = readout_probes.radial_gradient(model, BATCH)
    for k in (1, 2):
        losses = []
        for t in (1e-5, -1e-5):
            with rewritten_states(model, lambda loop, h, t=t, k=k: h * math.exp(t) if loop == k else h):
                logits = model(**BATCH, num_loops=k).logits[:, :-1]
            losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), BATCH["input_ids"][:, 1:].flatten()))
        assert result["g"][k - 1] == pytest.approx(((losses[0] - losses[1]) / 2e-5).item(), rel=1e-5, abs=1e-9)
    assert result["r"][0] > 1e-3


def test_entropy_and_margin():
    logits = torch.tensor([[[0.0, math.log(3), -math.inf]]])
    assert readout_probes.entropy_and_margin(logits.clamp(min=-1e4))[0] == pytest.approx(
        -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), abs=1e-6
    )
    assert readout_probes.entropy_and_margin(torch.tensor([[1.0, 5.0, 2.5]]))[1] == 2.5


def test_entropy_is_computed_for_a_few_tokens_at_a_time(monkeypatch):
    logits, sizes, entropy_of = torch.randn(3, 5, 7), [], readout_probes.entropy_of
    whole = readout_probes.entropy_and_margin(logits)
    monkeypatch.setattr(readout_probes, "TOKENS_READ", 4)
    monkeypatch.setattr(readout_probes, "entropy_of", lambda part: sizes.append(len(part)) or entropy_of(part))
    assert readout_probes.entropy_and_margin(logits) == whole
    assert sizes == [4, 4, 4, 3]


def test_scale_sweep_is_flat_for_a_normed_readout_only():
    raw, normed = tiny_model(readout_norm="none").double(), tiny_model(rms_norm_eps=1e-12).double()
    alphas = [0.5, 1.0, 3.0]
    assert readout_probes.scale_sweep(normed, BATCH, alphas=alphas)["ce_range"] < 1e-9
    state = raw(**BATCH, output_loop_hidden_states=True).loop_hidden_states[-1]
    expected = [
        nn.functional.cross_entropy(
            (alpha * state @ raw.lm_head.weight.T)[:, :-1].flatten(0, 1), BATCH["input_ids"][:, 1:].flatten()
        ).item()
        for alpha in alphas
    ]
    assert readout_probes.scale_sweep(raw, BATCH, alphas=alphas)["ce"] == pytest.approx(expected, rel=1e-9)


def test_radial_clamp_of_a_known_block():
    along, across = 0.5, 0.25
    model = known_model(along, across, num_loops=5)
    result = readout_probes.radial_clamp(model, BATCH)
    first = trace(model, BATCH, 1).states[0].square().mean(-1).sqrt()  # [rows, tokens]
    free, clamped = first, first
    for _ in range(4):
        free = ((free + along) ** 2 + across**2).sqrt()
        clamped = (clamped**2 + across**2).sqrt()
    assert result["freeze"]["norm_ratio"] == pytest.approx((first.mean() / free.mean()).item(), rel=1e-6)
    assert result["remove_radial"]["norm_ratio"] == pytest.approx((clamped.mean() / free.mean()).item(), rel=1e-6)
    assert result["unclamped"]["delta_ce"] == 0 != result["freeze"]["delta_ce"]


@pytest.mark.parametrize("along,across", [(0.7, 0.3), (-0.02, 0.05)])
def test_lemma_2_on_a_known_block(along, across):
    model = known_model(along, across)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(20 / 0.2)  # s is large, as the expansion asks
    result = readout_probes.update_decomposition(model, BATCH, num_loops=30)
    assert result["a_rad"] == pytest.approx([along] * 29, rel=1e-6)
    assert result["b_perp"] == pytest.approx([across] * 29, rel=1e-6)
    assert result["table"]["b"] == pytest.approx(math.hypot(along, across), rel=1e-6)
    assert result["table"]["b_over_a_rad"] == pytest.approx(math.hypot(along, across) / abs(along), rel=1e-6)
    scales = result["scale"] + [result["final_scale"]]
    for k in range(29):
        assert scales[k + 1] == pytest.approx(result["predicted_next_scale"][k], abs=across**2 / scales[k])
        assert result["turn_times_scale"][k] == pytest.approx(across, abs=2 * across / scales[k])
    assert result["not_as_in_lemma_2"] == []


def test_lemma_2_says_what_it_does_not_cover():
    model = tiny_model(inter_loop_norm="own", injection="add", state_init="zeros")
    result = readout_probes.update_decomposition(model, BATCH, num_loops=12)
    assert result["not_as_in_lemma_2"] == ["injection='add'", "inter_loop_norm='own'"]


def test_token_norms():
    model = tiny_model()
    norms = model(**BATCH, output_loop_hidden_states=True).loop_hidden_states[-1].detach().norm(dim=-1).flatten()
    result = readout_probes.token_norms(model, BATCH)
    ordered = norms.sort().values
    assert result["tokens"] == 14 and result["max"] == pytest.approx(ordered[-1].item(), rel=1e-5)
    assert result["median"] == pytest.approx(((ordered[6] + ordered[7]) / 2).item(), rel=1e-5)
    assert result["p99"] == pytest.approx((ordered[12] + 0.87 * (ordered[13] - ordered[12])).item(), rel=1e-5)
    assert result["mean"] == pytest.approx(norms.mean().item(), rel=1e-5)
    assert result["std"] == pytest.approx(((norms - norms.mean()) ** 2).mean().sqrt().item(), rel=1e-4)


def test_token_norms_by_what_the_token_is():
    """Every token of the vocabulary is in one class; each class is averaged over its own positions."""
    tokenizer = train_word(["a b, c1!\n\n  naïve x.  y\n\n"] * 2, 50)
    classes = readout_probes.token_classes(tokenizer, 60)
    assert sum(mask.long() for mask in classes.values()).tolist() == [1] * 60
    members = {name: {tokenizer.decode([i]) for i in mask.nonzero()[:, 0].tolist() if i < len(tokenizer)}
               for name, mask in classes.items()}  # fmt: skip
    assert members["white_space"] == {" ", "  ", "\n\n", "\n\n  "} & set(tokenizer.get_vocab())
    assert members["words"] == {"a", "b", "c1", "na", "ve", "x", "y"} and members["punctuation"] == set(",!.")
    model = tiny_model(vocab_size=60)
    ids = torch.tensor(tokenizer("a b, c1!  naïve x.  y", add_special_tokens=False)["input_ids"])[None]
    norms = model(ids, output_loop_hidden_states=True).loop_hidden_states[-1].detach().norm(dim=-1)[0]
    found = readout_probes.token_norms(model, {"input_ids": ids}, classes)["classes"]
    for name in ("white_space", "words", "punctuation"):
        own = [norm for norm, i in zip(norms.tolist(), ids[0].tolist()) if tokenizer.decode([i]) in members[name]]
        assert found[name]["tokens"] == len(own) > 2
        assert found[name]["mean"] == pytest.approx(sum(own) / len(own), rel=1e-5)
        assert found[name]["max"] == pytest.approx(max(own), rel=1e-5)
    assert "special" not in found


@pytest.mark.parametrize("preset", ["readout_per_loop_rmsnorm", "readout_per_loop_final_only"])
def test_future_signal_is_that_of_scaled_states(preset):
    """Against differences of whole passes in float64: the state of one loop is scaled, all tokens together."""
    model = tiny_model(preset=preset).double()
    result = readout_probes.future_signal(model, BATCH)
    assert result["scale"] == pytest.approx(dynamics.norm_trajectory(model, BATCH)["R"][1:])
    step = 1e-5
    for k in range(1, 4):
        losses = []
        for sign in (1, -1):
            factor = math.exp(sign * step)
            with rewritten_states(model, lambda loop, h, f=factor, k=k: h * f if loop == k else h), torch.no_grad():
                outputs = model(**BATCH, output_loop_logits=True)
            losses.append([next_token_losses(z, BATCH["input_ids"]).mean() for z in outputs.loop_logits])
        differences = [((up - down) / (2 * step)).item() for up, down in zip(*losses)][k - 1 :]
        assert result["signal"][k - 1] == pytest.approx(differences, rel=1e-5, abs=1e-9)
        sizes, signal = result["size"][k - 1], result["signal"][k - 1]
        assert all(size >= abs(value) - 1e-12 for size, value in zip(sizes, signal))
        bound = [size * result["scale"][k - 1] / t for t, size in enumerate(sizes[1:], start=1)]
        assert result["constant"][k - 1] == pytest.approx(bound)
    near = readout_probes.future_signal(model, BATCH, horizon=1)
    assert near["size"] == [pytest.approx(sizes[:2]) for sizes in result["size"]]
    assert result["largest_future"] == max(size for sizes in result["size"] for size in sizes[1:]) > 1e-3
    if preset == "readout_per_loop_rmsnorm":
        assert result["largest_immediate"] < 1e-3 * result["largest_future"]


def test_future_signal_holds_the_logits_of_one_loop(monkeypatch):
    model = tiny_model(num_loops=5)
    alive = logits_alive(monkeypatch, model)
    readout_probes.future_signal(model, BATCH)
    assert alive == [1] * 5


def test_future_signal_falls_with_the_scale():
    """Lemma 2's block turns a state by b_perp / s, whatever its direction: what the next loss says falls as 1 / s."""
    sizes = []
    for scale in (1e3, 1e4):
        torch.manual_seed(0)
        model = known_model(across=1.0, num_loops=2, readout_norm="rmsnorm", tie_word_embeddings=False)
        with torch.no_grad():
            weight = model.model.embed_tokens.weight
            weight *= scale / weight.square().mean(-1, keepdim=True).sqrt()
            model.lm_head.weight.copy_(torch.randn_like(model.lm_head.weight, dtype=torch.double))
        result = readout_probes.future_signal(model, BATCH)
        assert result["scale"] == pytest.approx([scale, scale], rel=1e-3)
        sizes.append(result["size"][0][1])
    assert sizes[0] / sizes[1] == pytest.approx(10, rel=0.01) and sizes[0] > 1e-6


def test_exit_weighted_logits():
    """Mixed logits, not mixed losses; exit probabilities written out."""
    model = tiny_model(preset="readout_exit_weighted").double()
    result = readout_probes.exit_weighted(model, BATCH)
    outputs = model(**BATCH, output_loop_logits=True, output_loop_hidden_states=True)
    leave = [torch.sigmoid(model.gate(state))[..., None] for state in outputs.loop_hidden_states]
    p = [leave[0], (1 - leave[0]) * leave[1], (1 - leave[0]) * (1 - leave[1])]
    mixed = sum(weight * logits for weight, logits in zip(p, outputs.loop_logits))

    def loss(logits):
        log_p = logits[:, :-1].log_softmax(-1)
        return -log_p.gather(-1, BATCH["input_ids"][:, 1:, None])

    expected = sum(weight[:, :-1] * loss(logits) for weight, logits in zip(p, outputs.loop_logits)).mean().item()
    assert result["ce"] == pytest.approx(loss(mixed).mean().item())
    assert result["expected_ce"] == pytest.approx(expected) and abs(result["ce"] - expected) > 1e-3
    assert result["last_ce"] == pytest.approx(loss(outputs.loop_logits[-1]).mean().item())
    assert result["exit"] == pytest.approx([weight[:, :-1].mean().item() for weight in p])
    shallow = [readout_probes.exit_weighted(model, BATCH, num_loops=k)["ce"] for k in (1, 2)]
    assert result["ce_at_depth"] == pytest.approx([*shallow, result["ce"]])
    found = readout_probes.entropy_and_margin(mixed[:, :-1].detach())
    assert (result["entropy"], result["margin"]) == pytest.approx(found)
    with pytest.raises(ValueError, match="exit_gate='none'"):
        readout_probes.exit_weighted(tiny_model(), BATCH)


def test_logits_that_are_mixed_are_not_all_in_memory(monkeypatch):
    model = tiny_model(preset="readout_exit_weighted", num_loops=6)
    alive = logits_alive(monkeypatch, model)
    readout_probes.exit_weighted(model, BATCH)
    assert len(alive) == 6 and max(alive) == 2  # of a loop, and of the one before


# Depth


@pytest.mark.parametrize(
    "fields", [{}, {"residual_depth": "run", "residual_scaling": "linear"}, {"loop_damping": True}]
)
def test_depth_curve_equals_separate_runs(fields):
    model = tiny_model(**fields)
    result = dynamics.depth_curve(model, BATCH)
    assert result["loop"] == [1, 2, 3, 4, 5, 6]
    for k in result["loop"]:
        logits = model(**BATCH, num_loops=k).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), BATCH["input_ids"][:, 1:].flatten()).item()
        assert result["ce"][k - 1] == pytest.approx(loss, rel=1e-5)
        assert result["ppl"][k - 1] == pytest.approx(math.exp(loss), rel=1e-4)
    assert result["exit_gap"] == pytest.approx(result["ce"][0] - result["ce"][2])
    ratio = torch.sigmoid(model.model.damping.logit).item() if model.model.damping else 1.0
    assert result["norm_after"] == pytest.approx([ratio * norm for norm in result["norm_before"][:-1]], rel=1e-5)


def test_norms_after_a_norm_between_loops_are_constant():
    model = LoopedForCausalLM(tiny_config(inter_loop_norm="own")).eval()
    assert dynamics.depth_curve(model, BATCH)["norm_after"] == pytest.approx([32**0.5] * 5, rel=1e-3)


# Gradients


def test_oscillation():
    assert measures.oscillation([1, 2, 4, 8, 16]) == pytest.approx(0, abs=1e-12)
    assert measures.oscillation([3, 6, 3, 6, 3]) == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match="at least 3"):
        measures.oscillation([1, 2])


def test_gradient_norms_are_those_of_autograd_before_clipping():
    model = tiny_model()
    result = dynamics.gradient_norms(model, BATCH, blocks=["lm_head", "model.core.1.mlp"], steps=3)
    twin = copy.deepcopy(model)
    row = BATCH["input_ids"][:1]
    twin(row, labels=row).loss.backward()
    for name, block in result["blocks"].items():
        squares = sum(p.grad.square().sum() for p in twin.get_submodule(name).parameters())
        assert block["norm"][0] == pytest.approx(squares.sqrt().item(), rel=1e-4)
    assert result["loss"][0] != result["loss"][2]
    with pytest.raises(ValueError, match="no block 'model.core.9.mlp'.*lm_head"):
        dynamics.gradient_norms(model, BATCH, blocks=["model.core.9.mlp"])


def test_a_training_pass_is_that_of_a_model_left_alone_and_warns_of_nothing(monkeypatch):
    said, model = [], tiny_model(injection="add", state_init="normal").train()
    monkeypatch.setattr(training_warnings.logger, "warning_once", said.append)
    loss = training_loss(model, BATCH)
    assert loss.requires_grad and said == []
    torch.testing.assert_close(loss, model(BATCH["input_ids"], labels=BATCH["input_ids"]).loss)
    assert len(said) == 1


def test_a_block_without_gradients_has_no_norm_of_zero():
    model = tiny_model()
    model.lm_head.requires_grad_(False)
    result = dynamics.gradient_norms(model, BATCH, blocks=["lm_head", "model.core.1.mlp"], steps=3)
    head, mlp = result["blocks"].values()
    assert head["norm"] == [None] * 3 and head["mean"] is head["max"] is head["oscillation"] is None
    assert head["why"].startswith("no gradient reached this block: it is frozen") and min(mlp["norm"]) > 0
    assert all("nan" not in chart.svg() for chart in figures.gradient_norms(result))
    assert "most in layer 2, MLP" in sentences.gradient_norms(result)


# All of them


PROBES = [
    dynamics.norm_trajectory,
    dynamics.depth_curve,
    dynamics.state_dynamics,
    dynamics.gradient_norms,
    dynamics.spectral,
    dynamics.sensitivity,
    readout_probes.radial_gradient,
    readout_probes.scale_sweep,
    readout_probes.radial_clamp,
    readout_probes.update_decomposition,
    readout_probes.token_norms,
    readout_probes.future_signal,
]


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.__name__)
@pytest.mark.some(4)
def test_a_measure_in_the_middle_of_training_changes_nothing(probe):
    model = tiny_model(injection="diagonal", residual_dropout=0.3).train()
    model.lm_head.eval()
    model(**BATCH, labels=BATCH["input_ids"]).loss.backward()
    before = {name: (p.detach().clone(), p.grad.clone()) for name, p in model.named_parameters()}
    noise = torch.get_rng_state()
    result = probe(model, BATCH)
    json.dumps(result)
    assert torch.equal(noise, torch.get_rng_state())
    assert probe(model, BATCH) == result
    assert model.training and model.model.core[0].training and not model.lm_head.training
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name][0]) and torch.equal(parameter.grad, before[name][1])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("probe", [p for p in PROBES if p is not dynamics.gradient_norms], ids=lambda p: p.__name__)
@pytest.mark.parametrize("depth", [0, -1, 1.5, True])
def test_impossible_depths_are_refused(probe, depth):
    with pytest.raises(ValueError, match="num_loops must be a whole number of at least 1"):
        probe(tiny_model(injection="diagonal"), BATCH, num_loops=depth)


@pytest.mark.parametrize("probe", [*PROBES, premises, loop_cosine, lr_transfer, readout_probes.exit_weighted])
def test_padding_is_refused(probe):
    model = tiny_model(injection="diagonal", exit_gate="raw")
    of = model.config if probe is lr_transfer else model
    mask = torch.ones_like(BATCH["input_ids"])
    mask[1, 5:] = 0
    with pytest.raises(ValueError, match="leaves out 2 of 14 tokens, .* rows of one length, or one row at a time"):
        probe(of, {**BATCH, "attention_mask": mask})


def test_a_mask_of_ones_changes_no_measure():
    batch = {**BATCH, "attention_mask": torch.ones_like(BATCH["input_ids"])}
    assert dynamics.depth_curve(tiny_model(), batch)["ce"] == dynamics.depth_curve(tiny_model(), BATCH)["ce"]


def numbers(result) -> list[float]:
    if isinstance(result, dict):
        return [number for value in result.values() for number in numbers(value)]
    if isinstance(result, list):
        return [number for value in result for number in numbers(value)]
    return [result] if isinstance(result, float) else []


OF_TOKENS = [*PROBES, premises, loop_cosine, readout_probes.exit_weighted]
OF_TOKENS.remove(dynamics.sensitivity)  # of whole rows


@pytest.mark.parametrize("probe", OF_TOKENS)
def test_a_token_whose_label_is_ignored_counts_nowhere(probe):
    """The last tokens of rows change nothing before them, so that rows without them are measured alike."""
    fields = {"num_prelude_layers": 1, "num_core_layers": 1, "num_coda_layers": 1}
    model = tiny_model(injection="diagonal", exit_gate="raw", **fields).double()
    ids = BATCH["input_ids"]
    labels = ids.clone()
    labels[:, -1] = -100
    options = {"copies": 0} if probe is loop_cosine else {}
    cut, found = (
        probe(model, {"input_ids": ids[:, :-1]}, **options),
        probe(model, {"input_ids": ids, "labels": labels}, **options),
    )
    assert numbers(found) == pytest.approx(numbers(cut), rel=1e-6, abs=1e-9)
    assert numbers(found) != pytest.approx(numbers(probe(model, BATCH, **options)), rel=1e-6, abs=1e-9)


def test_too_few_loops_are_refused():
    with pytest.raises(ValueError, match="at least 2, got 1"):
        readout_probes.radial_clamp(tiny_model(), BATCH, num_loops=1)
    with pytest.raises(ValueError, match="above 10, got 10"):
        readout_probes.update_decomposition(tiny_model(), BATCH, num_loops=10)
    with pytest.raises(ValueError, match="alphas must be positive"):
        readout_probes.scale_sweep(tiny_model(), BATCH, alphas=[0.0, 1.0])
