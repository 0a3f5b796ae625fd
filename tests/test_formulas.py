"""Every value of every axis against a second, naive implementation of the formulas, in float64: see naive.py.

Each case is compared at every depth up to one more than trained, in its gradients, decoded token by token from a
cache, and with rows of different depths. Weights are random throughout, so that nothing hides behind a zero or a one.
"""

import functools
import random
import typing

import pytest
import torch

from modeling_looped import LoopedConfig, LoopedForCausalLM
from modeling_looped.injection import DiagonalInjection
from tests import naive
from tests.helpers import quick_and_slow, shake, tiny_config, tiny_model


BASE = {
    "vocab_size": 61,
    "hidden_size": 40,  # more than the 32 channels that value gates read
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "head_dim": 6,  # not hidden_size / num_attention_heads
    "max_position_embeddings": 16,
    "num_prelude_layers": 1,
    "num_core_layers": 2,
    "num_coda_layers": 1,
    "num_loops": 3,
    "rms_norm_eps": 1e-3,  # large enough to be seen
    "rope_parameters": {"rope_type": "default", "rope_theta": 30.0},
    "initializer_range": 0.2,
}
NESTED_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 30.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5.0},
}
NO_CODA = {"num_coda_layers": 0}
WIDE_CORE = {"core_hidden_size": 56, "core_intermediate_size": 30, "coda_input": "linear"}
AXES = {
    "injection": [
        {"injection": "none"},
        {"injection": "add"},
        {"injection": "add", "state_init": "zeros"},
        {"injection": "concat"},
        {"injection": "diagonal"},
        {"injection": "residual_all"},
        {"injection": "attention_first"},
        {"injection": "attention_all"},
        {"injection": "attention_all", "prelude_norm": True},
        {"injection": "attention_all", "kv_latent_size": 10, "qk_norm": "free"},
    ],
    "injection_norm": [
        {"injection_norm": True, "injection": "add", "state_init": "zeros"},
        {"injection_norm": True, "injection": "add", "inter_loop_norm": "shared", "norm_affine": False},
        {"injection_norm": True, "injection": "concat"},
        {"injection_norm": True, "injection": "diagonal", "prelude_norm": True},
        {"injection_norm": True, "injection": "residual_all", "prelude_norm": True, "inter_loop_norm": "own"},
    ],
    "core_hidden_size": [
        {**WIDE_CORE, "injection": "diagonal", "state_init": "normal", "prelude_norm": True},
        {**WIDE_CORE, "injection": "concat", "state_init": "zeros", "inter_loop_norm": "own", "loop_damping": True},
        {**WIDE_CORE, "injection": "concat", "state_init": "normal", "injection_norm": True, "exit_gate": "raw"},
        {
            **WIDE_CORE,
            "injection": "diagonal",
            "state_init": "zeros",
            "num_key_value_heads": 2,
            "core_num_attention_heads": 6,
        },
        {
            **WIDE_CORE,
            "injection": "diagonal",
            "state_init": "zeros",
            "value_embeddings": True,
            "core_num_attention_heads": 2,
        },
        {**WIDE_CORE, "injection": "diagonal", "state_init": "zeros", "kv_latent_size": 10, **NO_CODA},
    ],
    "key_value_interval": [
        {"key_value_interval": 2},
        {"key_value_interval": 2, "injection": "attention_all", "kv_latent_size": 10, "qk_norm": "free"},
        {"key_value_interval": 2, "value_embeddings": True, "qk_norm": "learned", "num_key_value_heads": 2},
    ],
    "num_key_value_loops": [
        {"num_key_value_loops": 1, "injection": "residual_all", "attention_bias": "qkv", "qk_norm": "all_heads"},
        {"num_key_value_loops": 2, "window_pattern": "SL", "sliding_window": 3, "value_embeddings": True},
        {"num_key_value_loops": 1, "loop_lora_rank": 2, "loop_norms": True, "qk_norm": "learned"},
    ],
    "state_init": [
        {"state_init": "zeros", "injection": "diagonal"},
        {"state_init": "normal", "injection": "diagonal", "prelude_norm": True},
        {"state_init": "normal", "injection": "concat", "state_init_std": 0.3},
    ],
    "prelude_norm": [{"prelude_norm": True}, {"prelude_norm": True, "num_prelude_layers": 0}],
    "block_norm": [
        {"block_norm": "branch_sandwich"},
        {"block_norm": "residual_sandwich"},
        {"block_norm": "branch_sandwich", "residual_scaling": "sqrt"},
        {"block_norm": "residual_sandwich", "residual_scaling": "sqrt"},
        {"block_norm": "residual_sandwich", "norm_affine": False},
        {"block_norm": "post", "residual_scaling": "sqrt"},
        {"block_norm": "post", "injection": "attention_all"},
    ],
    "norm_offset": [
        {"norm_offset": 1.0, "qk_norm": "learned", "prelude_norm": True, "inter_loop_norm": "own"},
        {"norm_offset": -0.5, "readout_norm": "taper", "norm_rounding": "before_weight"},
        {"norm_offset": 1.0, "injection": "add", "injection_norm": True, "readout_norm": "layernorm"},
        {"norm_offset": 1.0, "norm_affine": False, "qk_norm": "all_heads", "coda_input": "norm"},
    ],
    "norm_rounding": [{"norm_rounding": "before_weight"}, {"norm_rounding": "before_weight", "norm_affine": False}],
    "norm_affine": [
        {"norm_affine": False, "inter_loop_norm": "own", "prelude_norm": True},
        {"norm_affine": False, "readout_norm": "layernorm"},
        {"norm_affine": True, "qk_norm": "learned"},
    ],
    "readout_norm": [
        {"readout_norm": "layernorm"},
        {"readout_norm": "none"},
        {"readout_norm": "final_only"},
        {"readout_norm": "final_only", **NO_CODA},
        {"readout_norm": "final_raw", **NO_CODA},
        {"readout_norm": "alpha", "num_readout_alphas": 2, **NO_CODA},
        {"readout_norm": "alpha", "readout_alpha": 0.3, "readout_alpha_learned": False, "num_readout_alphas": 3},
        {"readout_norm": "final_alpha", "readout_alpha": 0.3},
        {"readout_norm": "taper"},
        {"readout_norm": "taper", "norm_affine": False, **NO_CODA},
    ],
    "inter_loop_norm": [
        {"inter_loop_norm": "own"},
        {"inter_loop_norm": "shared"},
        {"inter_loop_norm": "shared", "readout_norm": "layernorm"},
        {"inter_loop_norm": "shared", "readout_norm": "final_only"},
        {"inter_loop_norm": "shared", "readout_norm": "final_raw", **NO_CODA},
        {"inter_loop_norm": "own", "injection": "attention_all"},
    ],
    "loop_damping": [
        {"loop_damping": True},
        {"loop_damping": True, "inter_loop_norm": "own"},
        {"loop_damping": True, "injection": "residual_all"},
    ],
    "loop_change_gate": [
        {"loop_change_gate": True},
        {"loop_change_gate": True, "loop_damping": True, "inter_loop_norm": "own"},
        {"loop_change_gate": True, "injection": "attention_all"},
        {"loop_change_gate": True, "injection": "concat", "state_init": "zeros"},
    ],
    "coda_input": [
        {"coda_input": "norm"},
        {"coda_input": "norm", "readout_norm": "final_only"},
        {"coda_input": "norm", "readout_norm": "layernorm"},
        {"coda_input": "norm", "readout_norm": "final_raw"},
        {"coda_input": "linear"},
        {"coda_input": "linear", **NO_CODA},
    ],
    "exit_gate": [
        {"exit_gate": "raw"},
        {"exit_gate": "normed"},
        {"exit_gate": "normed", "inter_loop_norm": "shared", **NO_CODA},
        {"exit_gate": "normed", "readout_norm": "final_only"},
        {"exit_gate": "normed", "readout_norm": "final_raw", "inter_loop_norm": "shared", **NO_CODA},
        {"exit_gate": "normed", "readout_norm": "taper", "inter_loop_norm": "shared"},
    ],
    "residual_scaling": [
        {"residual_scaling": rule, "residual_depth": depth, "residual_scale": 1.3, "residual_reference_layers": 3}
        for rule in ("none", "sqrt", "linear", "factored")
        for depth in ("trained", "run")
    ],
    "qk_norm": [{"qk_norm": value, "attention_bias": "qk"} for value in ("all_heads", "none", "learned", "free")]
    + [{"qk_norm": "all_heads", "num_key_value_heads": 2, "kv_latent_size": 10}],
    "attention_bias": [{"attention_bias": "qkvo", "residual_scaling": "sqrt"}, {"attention_bias": "qkv"}],
    "attention_scores": [
        {"attention_softcap": 0.7, "attention_scale": 0.3},
        {"attention_softcap": 0.4, "num_key_value_heads": 2, "window_pattern": "SL", "sliding_window": 2},
        {"attention_scale": 1.5, "window_pattern": "SL", "sliding_window": 2},
    ],
    "rope": [
        {"rope_parameters": NESTED_ROPE, "rope_pattern": "RRN", "window_pattern": "SLS", "sliding_window": 2},
        {"rope_pattern": "NR", "rope_rounding": "rotated"},
        {"rope_parameters": NESTED_ROPE, "window_pattern": "SSL", "sliding_window": 2, "injection": "attention_all"},
        {"rope_parameters": NESTED_ROPE, "window_pattern": "SSSS", "sliding_window": 2, "value_embeddings": True},
        {"rope_pattern": "N", "qk_norm": "free"},
    ],
    "kv_latent_size": [
        {"kv_latent_size": 10},
        {"kv_latent_size": 10, "num_key_value_heads": 2, "attention_bias": "qkv", "qk_norm": "learned"},
    ],
    "window_pattern": [
        {"window_pattern": "SL", "sliding_window": 2},
        {"window_pattern": "LS", "sliding_window": 3},
        {"window_pattern": "S", "sliding_window": 2},
        {"window_pattern": "SSL", "max_position_embeddings": 12},  # a quarter of the context
        {"window_pattern": "LSSS", "sliding_window": 2},  # a letter for each layer
        {"window_pattern": "S", "sliding_window": 3, "injection": "attention_all", **NO_CODA},
    ],
    "grouped_query": [{"num_key_value_heads": 2}, {"num_key_value_heads": 1}],
    "position_embedding": [
        {"position_embedding": "learned"},
        {"position_embedding": "learned", "qk_norm": "free", "embedding_scale": 3.0},
        {"position_embedding": "learned", "head_dim": 5},
    ],
    "mlp": [
        {"mlp_gated": False, "mlp_bias": True},
        {"mlp_bias": True, "hidden_act": "relu2", "mlp_activation_scale": 0.5},
        {"mlp_gated": False},
        {"hidden_act": "relu2"},
        {"mlp_gated": False, "hidden_act": "relu2", "mlp_activation_scale": 0.5},
        {"mlp_activation_scale": 0.5},
        {"hidden_act": "gelu"},
    ],
    "value_embeddings": [
        {"value_embeddings": True},
        {"value_embeddings": True, "num_coda_layers": 2, "num_key_value_heads": 2},
        {"value_embeddings": True, "hidden_size": 24},  # less than the 32 channels
        {"value_embeddings": True, "injection": "attention_all", "kv_latent_size": 10},
        {"value_embeddings": True, "num_prelude_layers": 0, "num_coda_layers": 0, "num_core_layers": 3},
    ],
    "logit_softcap": [{"logit_softcap": 2.0}],
    "embedding_scale": [{"embedding_scale": 5.0}],
    "tie_word_embeddings": [{"tie_word_embeddings": True}, {"tie_word_embeddings": True, "embedding_scale": 5.0}],
    "sections": [
        {"num_prelude_layers": 0, "num_coda_layers": 0, "num_core_layers": 1},
        {"num_prelude_layers": 2, "num_coda_layers": 2, "num_core_layers": 1},
    ],
}


def label(fields: dict) -> str:
    return "-".join(str(value) for value in fields.values() if not isinstance(value, dict))


def choices(name: str) -> tuple:
    return typing.get_args(LoopedConfig.__dataclass_fields__[name].type)


NORM_ROUNDING, ROPE_ROUNDING = choices("norm_rounding"), choices("rope_rounding")


def random_config(seed: int) -> LoopedConfig:
    """A value for every axis at once; pairs that the config refuses are drawn again."""
    draw = random.Random(seed)
    while True:
        fields = {**BASE, "num_loops": draw.choice([1, 2, 3])}
        for name in ("injection", "state_init", "inter_loop_norm", "readout_norm", "coda_input", "exit_gate",
                     "block_norm", "qk_norm", "attention_bias", "position_embedding", "residual_scaling",
                     "residual_depth"):  # fmt: skip
            fields[name] = draw.choice(choices(name))
        for name in ("norm_affine", "loop_damping", "loop_change_gate", "prelude_norm", "injection_norm", "mlp_gated",
                     "value_embeddings", "tie_word_embeddings"):  # fmt: skip
            fields[name] = draw.random() < 0.5
        fields["num_prelude_layers"], fields["num_coda_layers"] = draw.randrange(3), draw.randrange(3)
        fields["num_core_layers"] = draw.randint(1, 3)
        fields["num_key_value_heads"] = draw.choice([1, 2, 4])
        fields["kv_latent_size"] = draw.choice([None, 10])
        fields["hidden_act"] = draw.choice(["silu", "relu2", "gelu"])
        fields["mlp_activation_scale"] = draw.choice([1.0, 0.5])
        fields["logit_softcap"] = draw.choice([None, 2.0])
        fields["embedding_scale"] = draw.choice([1.0, 3.0])
        fields["residual_scale"], fields["residual_reference_layers"] = draw.choice([1.0, 0.6]), draw.choice([1, 4])
        fields["window_pattern"] = draw.choice([None, None, "SL", "SSL", "S"])
        fields["sliding_window"] = None if fields["window_pattern"] is None else draw.choice([2, 3])
        fields["mlp_bias"], fields["rope_pattern"] = draw.random() < 0.5, draw.choice([None, "RN", "NNR"])
        fields["norm_offset"] = draw.choice([0.0, 1.0])
        fields["norm_rounding"], fields["rope_rounding"] = draw.choice(NORM_ROUNDING), draw.choice(ROPE_ROUNDING)
        fields["attention_softcap"] = draw.choice([None, 0.5])
        fields["attention_scale"] = draw.choice([None, 0.7])
        fields["rope_parameters"] = draw.choice([BASE["rope_parameters"], NESTED_ROPE])
        try:
            return LoopedConfig(**fields)
        except ValueError:
            continue


def preset_config(name: str) -> LoopedConfig:
    """A named system at a tiny size and without dropout, with all else as published."""
    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    original = LoopedConfig.from_preset(name)
    sections = {key: min(getattr(original, key), 2) for key in ("num_prelude_layers", "num_core_layers")}
    dropouts = {f"{part}_dropout": 0.0 for part in ("attention", "residual", "embedding")}
    coda = min(original.num_coda_layers, 1)
    return LoopedConfig.from_preset(
        name, **sizes, **sections, **dropouts, num_coda_layers=coda, num_loops=3, head_dim=6
    )


RANDOM = range(24)
CASES = {
    **{f"{axis}: {label(fields)}": LoopedConfig(**{**BASE, **fields}) for axis in AXES for fields in AXES[axis]},
    **{f"random {seed}": random_config(seed) for seed in RANDOM},
    **{f"preset {name}": preset_config(name) for name in LoopedConfig.preset_names()},
}
# make test takes two values of every axis, a sixth of the random ones, and leaves presets to test_systems.py
LEFT_TO_TEST_ALL = {
    *(f"random {seed}" for seed in RANDOM if seed % 6),
    *(f"preset {name}" for name in LoopedConfig.preset_names()),
    *(f"{axis}: {label(fields)}" for axis in AXES for fields in AXES[axis][2:]),
}
READ_AT_EVERY_LOOP = [name for name, config in CASES.items() if config.residual_depth == "trained"]
READ_AT_THE_LAST_LOOP = [name for name in CASES if name not in READ_AT_EVERY_LOOP]


def over(names, left_to_test_all=LEFT_TO_TEST_ALL):
    return pytest.mark.parametrize("name", quick_and_slow(names, *(set(names) - set(left_to_test_all))))


class Case(typing.NamedTuple):
    model: LoopedForCausalLM  # float64
    weights: dict  # its state dict, as leaves with gradients
    ids: torch.Tensor
    arguments: dict  # initial_state, where there is one

    @property
    def config(self) -> LoopedConfig:
        return self.model.config

    @property
    def depths(self) -> range:
        return range(1, self.config.num_loops + 2)

    def rows(self, selected: slice, positions: slice = slice(None)) -> dict:
        return {"input_ids": self.ids[selected, positions]} | {
            key: value[selected, positions] for key, value in self.arguments.items()
        }


@functools.cache
def case(name: str) -> Case:
    config = CASES[name]
    torch.manual_seed(0)
    model = shake(LoopedForCausalLM(config).double(), std=0.3).eval()
    if config.position_embedding == "rope":
        model.model.rotary_emb = naive.double_rotary(config)
    if config.readout_norm == "taper":
        model.model.norm.gate.fill_(0.6)
        model.model.norm.scale.fill_(1.7)
    weights = {key: value.clone().requires_grad_() for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    ids = torch.randint(3, config.vocab_size, (3, 6))
    arguments = {}
    if config.state_init == "normal":
        arguments["initial_state"] = torch.randn(3, 6, config.state_size, dtype=torch.float64)
    return Case(model, weights, ids, arguments)


@functools.cache
def expected(name: str, num_loops: int) -> tuple:
    """The naive states, logits and exit distribution of a run of `num_loops`."""
    this = case(name)
    return naive.forward(this.config, this.weights, this.ids, num_loops, **this.arguments)


def expected_logits(name: str, depth: int) -> torch.Tensor:
    """Logits of a run of `depth` loops: of the deepest run's first loops, unless these depend on where it ends."""
    config = CASES[name]
    return expected(name, depth if config.residual_depth == "run" else config.num_loops + 1)[1][depth - 1]


def assert_equal(actual, expected, message: str = ""):
    torch.testing.assert_close(
        actual, expected.detach(), rtol=1e-9, atol=1e-10, msg=lambda details: f"{message}\n{details}"
    )


def test_every_value_of_every_axis_has_a_case():
    used = list(CASES.values())
    for field in ("injection", "state_init", "inter_loop_norm", "readout_norm", "coda_input", "exit_gate",
                  "block_norm", "qk_norm", "attention_bias", "position_embedding", "residual_scaling",
                  "residual_depth", "norm_rounding", "rope_rounding"):  # fmt: skip
        assert {getattr(config, field) for config in used} == set(choices(field)), field
    for field in ("norm_affine", "loop_damping", "loop_change_gate", "prelude_norm", "injection_norm", "mlp_gated",
                  "value_embeddings", "mlp_bias"):  # fmt: skip
        assert {getattr(config, field) for config in used} == {True, False}, field


# where every loop is read, the next test compares the same logits in one run
@over(CASES, left_to_test_all=READ_AT_EVERY_LOOP)
@pytest.mark.some(5, "cases")
def test_logits_at_every_depth(name):
    this = case(name)
    for depth in this.depths:
        with torch.no_grad():
            logits = this.model.eval()(**this.rows(slice(None)), num_loops=depth).logits
        assert_equal(logits, expected_logits(name, depth), f"depth {depth}")


@over(READ_AT_EVERY_LOOP)
@pytest.mark.some(16, "cases")
def test_readouts_of_every_loop_and_gradients(name):
    this = case(name)
    has_gate = this.config.exit_gate != "none"
    depth = this.config.num_loops + 1
    outputs = this.model.train()(
        **this.rows(slice(None)),
        num_loops=depth,
        output_loop_hidden_states=True,
        output_loop_logits=True,
        output_exit_probabilities=has_gate,
    )
    states, logits, exits = expected(name, depth)
    assert len(outputs.loop_hidden_states) == len(outputs.loop_logits) == depth
    for loop in range(depth):
        assert_equal(outputs.loop_hidden_states[loop], states[loop], f"state of loop {loop}")
        assert_equal(outputs.loop_logits[loop], logits[loop], f"logits of loop {loop}")
    assert (outputs.exit_probabilities is None) == (not has_gate)
    if has_gate:
        assert_equal(outputs.exit_probabilities, exits, "exit distribution")

    compare_gradients(
        this,
        [*outputs.loop_hidden_states, *outputs.loop_logits] + [outputs.exit_probabilities] * has_gate,
        [*states, *logits] + [exits] * has_gate,
    )


@over(READ_AT_THE_LAST_LOOP)
def test_gradients_where_only_the_last_loop_is_read(name):
    this = case(name)
    depth = this.config.num_loops + 1
    logits = this.model.train()(**this.rows(slice(None)), num_loops=depth).logits
    compare_gradients(this, [logits], [expected_logits(name, depth)])


def compare_gradients(this: Case, outputs: list, references: list):
    """Of one random weighted sum of all outputs, with respect to every weight."""
    generator = torch.Generator().manual_seed(2)
    weightings = [torch.randn(output.shape, generator=generator, dtype=output.dtype) for output in outputs]

    def gradients(values, variables):
        total = sum((value * weighting).sum() for value, weighting in zip(values, weightings))
        return torch.autograd.grad(total, variables, retain_graph=True, allow_unused=True)

    parameters = dict(this.model.named_parameters())
    ours = gradients(outputs, parameters.values())
    theirs = gradients(references, [this.weights[key] for key in parameters])
    for key, gradient, expected_gradient in zip(parameters, ours, theirs):
        if expected_gradient is None:
            assert gradient is None or not gradient.any(), key
        else:
            torch.testing.assert_close(
                gradient,
                expected_gradient,
                rtol=1e-8,
                atol=1e-10 * float(1 + expected_gradient.abs().max()),
                msg=lambda details, key=key: f"gradient of {key}\n{details}",
            )


@over(CASES)
@pytest.mark.some(33, "cases")
def test_cached_decoding(name):
    """A prompt of three tokens, then one by one."""
    this = case(name)
    whole = expected_logits(name, this.config.num_loops)
    cache, logits = None, []
    with torch.no_grad():
        for positions in [slice(0, 3), slice(3, 4), slice(4, 5), slice(5, 6)]:
            outputs = this.model.eval()(**this.rows(slice(None), positions), past_key_values=cache, use_cache=True)
            cache = outputs.past_key_values
            logits.append(outputs.logits)
    assert_equal(torch.cat(logits, dim=1), whole)


@over(CASES)
@pytest.mark.some(33, "cases")
def test_depth_per_row(name):
    """Every row as if it were alone; its exits end with its own last loop."""
    this = case(name)
    has_gate = this.config.exit_gate != "none"
    depths = [this.config.num_loops, this.config.num_loops + 1, 1]
    with torch.no_grad():
        outputs = this.model.eval()(**this.rows(slice(None)), num_loops=depths, output_exit_probabilities=has_gate)
    for row, depth in enumerate(depths):
        assert_equal(outputs.logits[row], expected_logits(name, depth)[row], f"row {row} at depth {depth}")
        if has_gate:
            exits = expected(name, depth)[2][row]
            assert_equal(outputs.exit_probabilities[row, :, :depth], exits, f"exits of row {row}")
            assert not outputs.exit_probabilities[row, :, depth:].any()


@pytest.mark.parametrize("name", ["injection: attention_all", "window_pattern: SL-2", "kv_latent_size: 10"])
def test_eager_attention(name):
    """Its softmax is in float32, as in Llama."""
    this = case(name)
    this.model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = this.model.eval()(this.ids).logits
    this.model.set_attn_implementation("sdpa")
    torch.testing.assert_close(logits, expected_logits(name, 3).detach(), rtol=1e-4, atol=1e-4)


def test_a_window_of_one_token_is_refused():
    """Its cache would hold no past token, which the sliding caches of transformers cannot."""
    with pytest.raises(ValueError, match="sliding_window=1 must be at least 2"):
        LoopedConfig(**{**BASE, "window_pattern": "SL", "sliding_window": 1})


@pytest.mark.parametrize("theta", [None, 30.0, 50000.0])
def test_rotary_table(theta):
    """Channel i of either half turns by position * theta^(-2i/d); theta is 10000 unless given."""
    fields = {**BASE, "rope_parameters": None if theta is None else {"rope_type": "default", "rope_theta": theta}}
    rotary = LoopedForCausalLM(LoopedConfig(**fields)).model.rotary_emb
    positions = torch.arange(16)[None]
    tables = rotary(torch.zeros(1, dtype=torch.float64), position_ids=positions)
    for table, function in zip(tables, (torch.cos, torch.sin)):
        for i in range(6):
            angles = positions[0].double() * (10000.0 if theta is None else theta) ** (-2 * (i % 3) / 6)
            torch.testing.assert_close(table[0, :, i], function(angles), rtol=0, atol=2e-6)


@pytest.mark.parametrize("position_embedding", ["rope", "learned"])
def test_single_precision_with_its_own_rotary_table(position_embedding):
    config = LoopedConfig(**{**BASE, "position_embedding": position_embedding})
    torch.manual_seed(0)
    model = shake(LoopedForCausalLM(config), std=0.1).eval()
    ids = torch.randint(3, 61, (2, 9))
    weights = {key: value.double() for key, value in model.state_dict().items()}
    with torch.no_grad():
        logits = model(ids).logits
    expected = naive.forward(config, weights, ids)[1][-1]
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_decay_of_bfloat16_parameters_is_in_single_precision():
    injection = shake(DiagonalInjection(tiny_config(injection="diagonal"))).bfloat16()
    rate, bias = injection.log_rate.double(), injection.dt_bias.double()
    step = (1 + bias.exp()).log()
    for found, wanted in zip(injection.decay_and_step(), (torch.exp(-step * rate.exp()), step)):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)


def test_factors_that_stay_in_single_precision_leave_the_stream_as_it_is():
    """As where only large matrices are converted."""
    model = tiny_model(loop_change_gate=True, loop_damping=True).bfloat16()
    ids = torch.arange(3, 9)[None]
    expected = model(ids).logits
    for part in (model.model.change_gate, model.model.damping):
        part.float()
    assert torch.equal(model(ids).logits, expected)
