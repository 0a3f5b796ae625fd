"""SGLang's fallback for models of transformers, `sglang/srt/models/transformers.py` itself, on our models.

Its engine wants a GPU, so what that file takes from the rest of SGLang are stand-ins here, one rank of them: linear
layers, norms, tables, and attention that keeps keys and values by the layer it is asked for. Skipped where SGLang is
not installed; `pip install --no-deps sglang` is enough.
"""

import importlib.util
import pathlib
import sys
import types
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from tests.serving.systems import NEW_TOKENS, PROMPTS, SYSTEMS, build, greedy


ROOT = importlib.util.find_spec("sglang")  # not imported, which would want a GPU
if ROOT is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)
MISSING = ["sglang"] if importlib.util.find_spec("triton") else ["sglang", "triton"]
REAL = {"sglang.srt.models.transformers": "transformers.py", "sglang.srt.models.utils": "utils.py"}


class Linear(nn.Linear):
    """Returns the bias that it left out, too."""

    def __init__(self, input_size, output_size, bias, quant_config, prefix, **kwargs):
        super().__init__(input_size, output_size, bias=bias)

    def forward(self, x):
        return super().forward(x), None


class RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps, **kwargs):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(hidden_size))

    def forward(self, x, residual=None):
        assert residual is None
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Table(nn.Embedding):
    def __init__(self, num_embeddings, embedding_dim, **kwargs):
        super().__init__(num_embeddings, embedding_dim)


class Attention(nn.Module):
    """Of one request, all of whose tokens so far are kept by layer, each at its place: loops may ask for one layer."""

    def __init__(self, num_heads, head_dim, scaling, num_kv_heads, layer_id, sliding_window_size, **kwargs):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.scaling = num_heads, num_kv_heads, head_dim, scaling
        self.layer_id = layer_id
        assert sliding_window_size == -1  # whose meaning in a kernel is not that of a stand-in

    def forward(self, q, k, v, forward_batch):
        new = torch.stack([k, v]).view(2, len(q), self.kv_heads, self.head_dim).transpose(1, 2)
        kept = forward_batch.get(self.layer_id, new)[:, :, : forward_batch["tokens before"]]
        keys, values = forward_batch[self.layer_id] = torch.cat([kept, new], 2)
        places = torch.arange(keys.shape[1])
        mask = places[-len(q) :, None] >= places
        queries = q.view(len(q), self.heads, self.head_dim).transpose(0, 1)
        output = F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], mask, scale=self.scaling, enable_gqa=True
        )
        return output[0].transpose(0, 1).reshape(len(q), -1)


class LogitsProcessor(nn.Module):
    def __init__(self, config, logit_scale):
        super().__init__()
        self.softcap = getattr(config, "final_logit_softcapping", None)

    def forward(self, input_ids, hidden_states, lm_head, forward_batch, aux):
        logits = hidden_states @ lm_head.weight.T
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


PARALLEL = types.SimpleNamespace(
    tp_size=1, pp_group=types.SimpleNamespace(world_size=1, is_first_rank=True, is_last_rank=True)
)


def load_weight(parameter, weight):
    assert parameter.shape == weight.shape
    parameter.data.copy_(weight)


STAND_INS = {
    "is_cuda": lambda: False,
    "is_hip": lambda: False,
    "default_weight_loader": load_weight,
    "divide": lambda number, by: number // by,
    "direct_register_custom_op": lambda **kwargs: None,
    "get_parallel": lambda: PARALLEL,
    "get_hf_text_config": lambda config: config,
    "get_device": lambda: "cpu",
    "RadixAttention": Attention,
    "PPMissingLayer": nn.Identity,
    "RMSNorm": RMSNorm,
    "VocabParallelEmbedding": Table,
    "ParallelLMHead": Table,
    "LogitsProcessor": LogitsProcessor,
    **dict.fromkeys(["ColumnParallelLinear", "RowParallelLinear", "ReplicatedLinear"], Linear),
}


class StandIn(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return STAND_INS.get(name) or MagicMock()


class Finder:
    """The two files as they are, and a stand-in for every other module of SGLang."""

    def find_spec(self, name, path=None, target=None):
        if name in REAL:
            file = pathlib.Path(ROOT.submodule_search_locations[0], "srt", "models", REAL[name])
            return importlib.util.spec_from_file_location(name, file)
        if name.split(".")[0] in MISSING:
            return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


@pytest.fixture(scope="module")
def backend():
    """The class that SGLang makes for an architecture that it does not know."""
    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        from sglang.srt.models.transformers import TransformersForCausalLM

        yield TransformersForCausalLM
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] in MISSING]:
            del sys.modules[name]


def served(backend, folder: str):
    from transformers import AutoConfig

    model = backend(AutoConfig.from_pretrained(folder, trust_remote_code=True))
    model.load_weights(load_file(f"{folder}/model.safetensors").items())
    return model.eval()


@torch.no_grad()
def decode(model, prompt: list[int]) -> tuple[list[int], list[float]]:
    kept, tokens, told, new = {}, [], [], torch.tensor(prompt)
    for _ in range(NEW_TOKENS):
        places = torch.arange(len(prompt) + len(tokens))[-len(new) :]
        kept["tokens before"] = int(places[0])
        logits = model(new, places, kept)[-1].log_softmax(-1)
        new = logits.argmax()[None]
        tokens.append(int(new))
        told.append(float(logits[new]))
    return tokens, told


@pytest.mark.parametrize("system", [system for system in SYSTEMS if system != "windows"])
def test_every_system(backend, system, tmp_path):
    model = build(system)
    model.save_pretrained(tmp_path)
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    engine = served(backend, str(tmp_path))
    for prompt, (tokens, probabilities, rounding) in zip(PROMPTS, expected):
        found, told = decode(engine, prompt)
        assert found == tokens
        torch.testing.assert_close(torch.tensor(told), torch.tensor(probabilities), rtol=0, atol=rounding)


@pytest.mark.parametrize(
    ("system", "says", "fields"),
    [
        ("ouro", "attention_softcap=20.0", {"attention_softcap": 20.0}),
        ("windows", "sliding_window=8", {}),
        ("ouro", "exit_criterion='kl'.*json-model-override-args", None),
    ],
)
def test_what_it_would_pass_over_is_refused(backend, system, says, fields, tmp_path):
    model = build(system)
    if fields is None:
        model.generation_config.exit_criterion = "kl"
    else:
        model.config.update(fields)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=says):
        served(backend, str(tmp_path))
