"""Initial weights have the distributions that the papers state, however the model comes into being."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from modeling_looped import LoopedConfig, LoopedForCausalLM, LoopedForTokenClassification


SIZES = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_prelude_layers": 1,
    "num_core_layers": 2,
    "num_coda_layers": 1,
    "num_loops": 5,
    "max_position_embeddings": 128,
}
SMALL = math.sqrt(2 / (5 * 128))  # sqrt(2 / 5d)
INPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
OUTPUTS = ("o_proj", "down_proj")


def from_nothing(config):
    """As transformers makes a model from a checkpoint without weights: on the meta device, then initialised."""
    return LoopedForCausalLM.from_pretrained(None, config=config, state_dict={})


WAYS = {
    "constructor": LoopedForCausalLM,
    "from_config": AutoModelForCausalLM.from_config,
    "from_pretrained": from_nothing,
}


def make(way: str = "constructor", **fields) -> torch.nn.Module:
    torch.manual_seed(0)
    return WAYS[way](LoopedConfig(**{**SIZES, **fields}))


def weights_of(model, names: tuple) -> dict:
    """Weights of linear layers inside blocks, by their names."""
    found = {key: p for key, p in model.named_parameters() if key.endswith(tuple(f"{name}.weight" for name in names))}
    assert found
    return found


def kurtosis(x) -> float:
    centred = x.double() - x.double().mean()
    return float(centred.pow(4).mean() / centred.pow(2).mean() ** 2)


def assert_moments(weight, std: float, name: str = ""):
    weight = weight.detach()
    assert abs(weight.mean()) < 5 * std / math.sqrt(weight.numel()), name
    assert abs(weight.std() / std - 1) < 0.05, (name, float(weight.std()), std)


def assert_normal(weight, std: float, name: str = ""):
    assert_moments(weight, std, name)
    assert abs(kurtosis(weight.detach()) - 3) < 0.2, name
    assert weight.abs().max() > 3.2 * std, name


def assert_truncated_normal(weight, std: float, name: str = ""):
    """Cut at three standard deviations, which lowers the kurtosis from 3 to 2.84."""
    assert_moments(weight, std, name)
    assert abs(kurtosis(weight.detach()) - 2.84) < 0.2, name
    assert 2.7 * std < weight.abs().max() <= 3 * std * (1 + 1e-6), name


def assert_uniform(weight, bound: float, name: str = ""):
    assert_moments(weight, bound / math.sqrt(3), name)
    assert abs(kurtosis(weight.detach()) - 1.8) < 0.05, name
    assert 0.99 * bound < weight.abs().max() <= bound, name


def assert_orthogonal(weight, std: float, name: str = ""):
    """The shorter side is orthonormal up to the factor std * sqrt(longer side)."""
    rows = weight.detach() if weight.shape[0] <= weight.shape[1] else weight.detach().T
    expected = std**2 * rows.shape[1] * torch.eye(len(rows))
    torch.testing.assert_close(rows @ rows.T, expected, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_normal(way):
    """Truncated normal of standard deviation 0.02 (residual scaling, table 4)."""
    model = make(way, init_scheme="normal", injection="concat", coda_input="linear", value_embeddings=True)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and weight.numel() > 1000:
            assert_truncated_normal(weight, 0.02, name)
    assert_truncated_normal(make(way, initializer_range=0.3).model.embed_tokens.weight, 0.3)


@pytest.mark.parametrize("way", WAYS)
def test_scaled_zero(way):
    """Parcae: orthogonal embedding, head, inputs and C of sigma sqrt(2/5d), outputs zero, value tables N(0, 1)."""
    model = make(
        way,
        init_scheme="scaled_zero",
        injection="diagonal",
        prelude_norm=True,
        coda_input="linear",
        value_embeddings=True,
        mlp_gated=False,
    )
    orthogonal = weights_of(model, INPUTS[:3] + ("up_proj", "embed_tokens", "lm_head", "coda_proj"))
    assert len(orthogonal) == 4 * 4 + 3
    for name, weight in orthogonal.items():
        assert_orthogonal(weight, SMALL, name)
        assert_moments(weight, SMALL, name)
    for name, weight in weights_of(model, OUTPUTS).items():
        assert not weight.any(), name
    assert len(model.model.value_embeds) == 2
    for table in model.model.value_embeds.values():
        assert_normal(table.weight, 1.0)
    for name, weight in weights_of(model, ("value_gate",)).items():
        bound = 1 / math.sqrt(32)  # of nn.Linear with 32 inputs
        assert 0.9 * bound < weight.abs().max() <= bound, name


def test_a_core_of_another_width():
    """Its matrices are drawn for its own width; B cannot be the identity and has orthonormal rows or columns."""
    model = make(
        init_scheme="scaled_zero",
        injection="diagonal",
        state_init="normal",
        coda_input="linear",
        core_hidden_size=192,
        core_num_attention_heads=6,
        core_intermediate_size=320,
    )
    for name, weight in weights_of(model.model.core, INPUTS).items():
        assert_orthogonal(weight, math.sqrt(2 / (5 * 192)), name)
    for name, weight in weights_of(model.model.coda, INPUTS).items():
        assert_orthogonal(weight, SMALL, name)
    weight = model.model.injection.input_proj.weight
    assert weight.shape == (192, 128)
    torch.testing.assert_close(weight.T @ weight, torch.eye(128), rtol=0, atol=1e-5)
    assert_orthogonal(model.model.coda_proj.weight, SMALL)
    state = model.sample_initial_state(8, 100, torch.Generator().manual_seed(0))
    assert state.shape == (8, 100, 192)
    assert_truncated_normal(state, SMALL)


def test_scaled_zero_with_concat_injection():
    weight = make(init_scheme="scaled_zero", injection="concat").model.injection.proj.weight
    assert_truncated_normal(weight, SMALL)


@pytest.mark.parametrize("way", WAYS)
def test_diagonal_injection_starts_at_a_decay_of_one_over_sqrt_5(way):
    """dt = .8047, decay = exp(-dt) = .4472, B the identity: in every init scheme."""
    for scheme in ("scaled_zero", "normal"):
        injection = make(way, init_scheme=scheme, injection="diagonal").model.injection
        torch.testing.assert_close(injection.log_rate.detach(), torch.zeros(128), rtol=0, atol=0)
        torch.testing.assert_close(injection.dt_bias.detach(), torch.full((128,), 0.2119), rtol=0, atol=5e-5)
        torch.testing.assert_close(injection.input_proj.weight.detach(), torch.eye(128), rtol=0, atol=0)
        state, embedded = torch.randn(2, 3, 128), torch.randn(2, 3, 128)
        expected = state / math.sqrt(5) + math.log(math.sqrt(5)) * embedded
        torch.testing.assert_close(injection(state, embedded), expected)


@pytest.mark.parametrize("way", WAYS)
def test_takase(way):
    """Huginn and RDM: sqrt(2/5d), outputs divided by sqrt(2L), L = P + Q + C * num_loops layers in a pass."""
    model = make(way, init_scheme="takase", injection="concat", coda_input="linear")
    inputs = weights_of(model, INPUTS + ("embed_tokens", "lm_head", "injection.proj", "coda_proj"))
    assert len(inputs) == 4 * 5 + 4
    for name, weight in inputs.items():
        assert_truncated_normal(weight, SMALL, name)
    for name, weight in weights_of(model, OUTPUTS).items():
        assert_truncated_normal(weight, SMALL / math.sqrt(2 * (1 + 1 + 2 * 5)), name)


@pytest.mark.parametrize("way", WAYS)
def test_zero_output(way):
    """Table 3 of the fully looped transformer."""
    model = make(way, init_scheme="zero_output")
    assert_normal(model.model.embed_tokens.weight, 1.0)
    assert_normal(model.lm_head.weight, 0.001)
    for name, weight in weights_of(model, INPUTS).items():
        assert_uniform(weight, math.sqrt(3 / 128), name)
    for name, weight in weights_of(model, OUTPUTS).items():
        assert not weight.any(), name


def test_zero_output_with_a_latent():
    """Variance 1 / fan_in, also where the input is the latent and not the stream."""
    model = make(init_scheme="zero_output", kv_latent_size=64)
    for name, weight in weights_of(model, ("k_proj", "v_proj")).items():
        assert_uniform(weight, math.sqrt(3 / 64), name)
    for name, weight in weights_of(model, ("kv_down_proj", "q_proj")).items():
        assert_uniform(weight, math.sqrt(3 / 128), name)


@pytest.mark.parametrize("way", WAYS)
def test_torch(way):
    """What nn.Embedding and nn.Linear draw by themselves, as the readout paper's release leaves them."""
    model = make(
        way,
        init_scheme="torch",
        position_embedding="learned",
        value_embeddings=True,
        exit_gate="raw",
        attention_bias="qkv",
        coda_input="linear",
    )
    assert_normal(model.model.embed_tokens.weight, 1.0)
    assert_normal(model.model.embed_positions.weight, 1.0)
    for table in model.model.value_embeds.values():
        assert_normal(table.weight, 1.0)
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {"lm_head", "exit_gate", "model.coda_proj", "model.core.0.self_attn.q_proj"} <= set(linear)
    for name, module in linear.items():
        torch.manual_seed(0)
        theirs = torch.nn.Linear(module.in_features, module.out_features, module.bias is not None)
        for ours, wanted in ((module.weight, theirs.weight), (module.bias, theirs.bias)):
            if ours is None:
                continue
            assert ours.abs().max() <= module.in_features**-0.5, name
            if ours.numel() > 1000:
                assert_uniform(ours, module.in_features**-0.5, name)
                assert abs(ours.std() / wanted.std() - 1) < 0.05, name
            else:
                assert len(ours) == 1 or ours.std() > 0.02, name
        assert module.bias is None or module.bias.any(), name


def test_torch_ties_its_head_to_embeddings_of_unit_variance():
    model = make(init_scheme="torch", tie_word_embeddings=True)
    assert_normal(model.lm_head.weight, 1.0)


@pytest.mark.parametrize("way", WAYS)
def test_readouts_with_parameters_of_their_own(way):
    """alpha as configured and s_ref 1, of every loop; a taper starts as the norm it takes away."""
    part = make(way, readout_norm="alpha", readout_alpha=0.3, num_readout_alphas=3).model.alpha_readout
    torch.testing.assert_close(torch.sigmoid(part.logit.detach()), torch.full((3,), 0.3))
    assert part.log_scale.tolist() == [0.0] * 3
    fixed = make(way, readout_norm="final_alpha", readout_alpha=0.3, readout_alpha_learned=False).model
    assert [name for name, _ in fixed.alpha_readout.named_parameters()] == ["log_scale"]
    norm = make(way, readout_norm="taper").model.norm
    for tensor in (norm.weight, norm.linear_weight, norm.gate, norm.scale):
        assert (tensor == 1).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scheme", ["normal", "scaled_zero", "takase", "zero_output"])
@pytest.mark.covering
def test_what_is_the_same_in_every_scheme(scheme, way):
    """Norms are 1, biases 0, damping sigmoid(2), the gate on changes 0; positions and gate are drawn with 0.02."""
    model = make(
        way,
        init_scheme=scheme,
        readout_norm="layernorm",
        inter_loop_norm="own",
        prelude_norm=True,
        loop_damping=True,
        loop_change_gate=True,
        block_norm="branch_sandwich",
        qk_norm="learned",
        attention_bias="qkv",
        exit_gate="raw",
        position_embedding="learned",
    )
    seen = set()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
            seen.add(name.rsplit(".", 2)[-2])
        elif "norm" in name:
            assert (parameter == 1).all(), name
    assert seen == {"q_proj", "k_proj", "v_proj", "norm", "exit_gate"}
    assert model.model.damping.logit.tolist() == [2.0]
    assert not model.model.change_gate.factor.any()
    assert_truncated_normal(model.model.embed_positions.weight, 0.02)
    assert 0.01 < model.exit_gate.weight.std() < 0.03


@pytest.mark.parametrize("way", WAYS)
def test_a_tied_head_is_drawn_as_an_embedding(way):
    model = make(way, init_scheme="zero_output", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_normal(model.lm_head.weight, 1.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scheme", ["normal", "scaled_zero", "takase", "zero_output"])
@pytest.mark.covering
def test_the_padding_token_starts_at_zero(scheme, way):
    embedding = make(way, init_scheme=scheme, pad_token_id=7).model.embed_tokens.weight
    assert not embedding[7].any()
    assert embedding.any(dim=1).sum() == 299


def test_classification_heads_start_small():
    torch.manual_seed(0)
    model = LoopedForTokenClassification(LoopedConfig(**SIZES, init_scheme="zero_output", num_labels=50))
    assert_truncated_normal(model.score.weight, 0.02)
    assert not model.score.bias.any()


@pytest.mark.parametrize("scheme", ["normal", "scaled_zero", "zero_output"])
def test_depth_and_residual_scale_leave_the_initial_weights_alone(scheme):
    """What transfers over depth does so by the residual scale and the rates (residual scaling, appendix 8.2)."""
    plain = make(init_scheme=scheme, num_loops=1)
    scaled = make(init_scheme=scheme, num_loops=8, residual_scaling="factored", residual_reference_layers=12)
    for (name, ours), theirs in zip(plain.named_parameters(), scaled.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("missing", ["log_rate", "dt_bias", "logit", "norm.bias", "exit_gate.weight"])
def test_what_a_checkpoint_has_is_kept_and_only_the_rest_is_drawn(missing):
    """Also where a module finds one of its parameters and lacks another."""
    fields = {
        "injection": "diagonal",
        "loop_damping": True,
        "readout_norm": "layernorm",
        "exit_gate": "raw",
        "pad_token_id": 7,
    }
    fresh = make(**fields)
    state = {name: torch.randn_like(value) for name, value in fresh.state_dict().items()}
    (lacking,) = [name for name in state if name.endswith(missing)]
    loaded = LoopedForCausalLM.from_pretrained(
        None, config=fresh.config, state_dict={name: value for name, value in state.items() if name != lacking}
    ).state_dict()
    for name in state:
        if name != lacking:
            assert torch.equal(loaded[name], state[name]), name
    if missing == "exit_gate.weight":
        assert 0.01 < loaded[lacking].std() < 0.03
    else:
        assert torch.equal(loaded[lacking], fresh.state_dict()[lacking])


@pytest.mark.parametrize(
    ("fields", "std"),
    [({}, SMALL), ({"embedding_scale": math.sqrt(128)}, SMALL * math.sqrt(128)), ({"state_init_std": 0.7}, 0.7)],
)
def test_noise_for_the_initial_state(fields, std):
    """Truncated normal, like the scaled embeddings (Huginn, Parcae), from the generator alone."""
    model = make(state_init="normal", injection="diagonal", **fields)
    draws = [model.sample_initial_state(4, 50, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)]
    assert draws[0].shape == (4, 50, 128)
    assert_truncated_normal(draws[0], std)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
