"""Mocks of clients that nobody here wrote: engines with a cache of their own, quantisers that replace layers, trainers
that run the trunk alone, exporters that want batches of any size; and the real ones where they are installed."""

import copy
import importlib
import sys
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    TorchAoConfig,
    Trainer,
    TrainingArguments,
)
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.quantizers import AutoHfQuantizer

from modeling_looped import LoopedConfig, LoopedForCausalLM, depths_of_step, save_public
from modeling_looped.checks import check_pass
from modeling_looped.depth import plan_depths
from modeling_looped.serving_engines import check_for_engine
from tests.helpers import Graphs, quick_and_slow, random_ids, shake, tiny_config, tiny_model, tiny_tokenizer


SYSTEMS = {
    "plain": {},
    "sections": {"num_prelude_layers": 1, "num_coda_layers": 1, "injection": "add", "value_embeddings": True},
    "windows": {"window_pattern": "SL", "sliding_window": 4},
    "ouro": {"preset": "ouro"},
    "huginn": {"preset": "huginn", "num_prelude_layers": 1, "num_coda_layers": 1},
    "parcae": {"preset": "parcae", "num_prelude_layers": 1, "num_coda_layers": 1},
    "flt": {"preset": "flt"},
}
over_systems = pytest.mark.parametrize("system", SYSTEMS)


def build(system: str, **fields):
    return tiny_model(**{"num_loops": 3, "eos_token_id": None, "pad_token_id": 0, **SYSTEMS[system], **fields})


def greedy(model, ids, **how):
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, **how)


# Engines that keep keys and values by `module.layer_idx`


class Engine:
    """Keys and values of one sequence by slot; a pass brings new tokens, and attends to all that were."""

    def __init__(self):
        self.keys, self.values = {}, {}

    def attend(self, module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        slot = module.layer_idx
        self.keys[slot] = torch.cat([self.keys[slot], key], 2) if slot in self.keys else key
        self.values[slot] = torch.cat([self.values[slot], value], 2) if slot in self.values else value
        length, new = self.keys[slot].shape[2], key.shape[2]
        places = torch.arange(length)
        distance = places[-new:, None] - places
        window = length if module.sliding_window is None else module.sliding_window
        mask = torch.where((distance >= 0) & (distance < window), 0.0, float("-inf"))[None, None]
        return eager_attention_forward(module, query, self.keys[slot], self.values[slot], mask, scaling)


@over_systems
def test_an_engine_with_its_own_cache(system):
    model, ids, engine = build(system), random_ids(1, 9), Engine()
    AttentionInterface.register("engine", engine.attend)
    AttentionMaskInterface.register("engine", eager_mask)
    wanted = model(ids, use_cache=False).logits
    model.set_attn_implementation("engine")
    chunks = []
    for start, end in ((0, 5), (5, 6), (6, 9)):
        positions = torch.arange(start, end)[None]
        chunks.append(model(ids[:, start:end], position_ids=positions, use_cache=False).logits)
    torch.testing.assert_close(torch.cat(chunks, 1), wanted, rtol=1e-4, atol=1e-4)
    assert sorted(engine.keys) == list(range(model.config.num_hidden_layers))


def engine_of_vllm(ranks: int = 1, stages: int = 1, saved: dict | None = None, generation_config: str = "auto"):
    """What its configuration says of parallelism and of the generation config that was saved with the model."""
    parallel = SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=stages)
    served = SimpleNamespace(generation_config=generation_config, try_get_generation_config=lambda: saved or {})
    return SimpleNamespace(parallel_config=parallel, model_config=served)


REFUSED_BY_ENGINES = {
    "stages": ({"stages": 2}, {}, "pipeline_parallel_size=2"),
    "wide_norms": ({"ranks": 2}, {"qk_norm": "all_heads"}, "tensor_parallel_size=2: qk_norm='all_heads'"),
    "deltas": ({"ranks": 2}, {"loop_lora_rank": 2}, "tensor_parallel_size=2: loop_lora_rank=2"),
    "few_heads": ({"ranks": 3}, {}, "does not divide num_key_value_heads=4"),
    "exits": ({"saved": {"exit_criterion": "kl", "min_loops": 1}}, {}, "says exit_criterion='kl', but"),
    "drafts": ({"saved": {"draft_loops": 1}}, {}, "says draft_loops=1, but"),
    "depth": ({"saved": {"num_loops": 5}}, {}, "says num_loops=5.*To serve num_loops=3"),
}


@pytest.mark.parametrize("case", REFUSED_BY_ENGINES)
def test_what_vllm_would_pass_over_is_refused(case, monkeypatch):
    engine, fields, says = REFUSED_BY_ENGINES[case]
    config = tiny_config(num_loops=3, **fields)
    monkeypatch.setattr("modeling_looped.serving_engines.look_up", lambda *names: lambda: engine_of_vllm(**engine))
    check_for_engine(config)  # of a model that transformers runs
    config._attn_implementation_internal = "vllm"
    with pytest.raises(ValueError, match=says):
        check_for_engine(config)
    if "saved" in engine:
        own = engine_of_vllm(**engine, generation_config="vllm")
        monkeypatch.setattr("modeling_looped.serving_engines.look_up", lambda *names: lambda: own)
        check_for_engine(config)
        monkeypatch.setattr("modeling_looped.serving_engines.look_up", lambda *names: lambda: engine_of_vllm(**engine))
        config.update({"num_loops": 3})  # as its --hf-overrides do
        check_for_engine(config)


@pytest.mark.parametrize("implementation", ["paged|sdpa", "vllm"])
def test_learned_positions_in_rows_of_many_requests(implementation):
    """All of them together may be longer than any one of them. Engines check each, so positions are not looked at."""
    model = tiny_model(position_embedding="learned", max_position_embeddings=8, use_cache=False)
    ids, places = random_ids(1, 12), torch.arange(12)[None]
    with pytest.raises(ValueError, match="12 tokens are more than the max_position_embeddings=8"):
        model(ids, position_ids=places)
    model.config._attn_implementation_internal = implementation
    check_pass(model.config, plan_depths(1, 1), model.model.embed_tokens(ids), places, None, None, False, {})


# Clients that replace layers


class Replaced(nn.Module):
    """What a quantiser puts in the place of a linear layer: it has a forward pass and nothing else."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.run = [lambda x: F.linear(x, linear.weight, linear.bias)]

    def forward(self, x):
        return self.run[0](x)


def is_linear(module) -> bool:
    return type(module) is nn.Linear  # what quantisers look for


def num_linear(model) -> int:
    return sum(map(is_linear, model.modules()))


@over_systems
@pytest.mark.some(3)
def test_layers_that_are_replaced(system):
    model, ids = build(system), random_ids(2, 7)
    replaced = copy.deepcopy(model)
    for name, module in list(replaced.named_modules()):
        if is_linear(module):
            replaced.set_submodule(name, Replaced(module))
    assert not any(isinstance(module, nn.Linear) for module in replaced.modules())
    torch.testing.assert_close(replaced(ids).logits, model(ids).logits)
    ways = [{}, {"exit_criterion": "latent_diff", "exit_threshold": 0.6}, {"draft_loops": 1, "draft_tokens": 2}]
    for how in ways:
        assert torch.equal(greedy(replaced, ids, **how), greedy(model, ids, **how))
    loss = replaced.train()(ids, labels=ids).loss
    torch.testing.assert_close(loss, model.train()(ids, labels=ids).loss)


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 99}


def test_as_many_layers_are_linear_as_in_llama():
    llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SIZES))
    assert num_linear(build("plain", num_core_layers=2)) == num_linear(llama) == 15


@pytest.mark.filterwarnings("ignore")  # of torch about its own successor of this function
@over_systems
def test_dynamic_quantisation_of_torch(system):
    torch.manual_seed(0)
    model = LoopedForCausalLM(tiny_config(**{"pad_token_id": 0, "eos_token_id": None, **SYSTEMS[system]})).eval()
    ids = random_ids(2, 7)
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})
    kind = torch.ao.nn.quantized.dynamic.Linear
    assert sum(isinstance(module, kind) for module in quantised.modules()) == num_linear(model) > 0
    exact, found = model(ids).logits, quantised(ids).logits
    assert not torch.equal(exact, found)
    assert (exact - found).norm() < 0.2 * exact.norm()
    assert greedy(quantised, ids).shape == (2, 12)


def of_bitsandbytes():
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(load_in_8bit=True), lambda module: type(module).__name__ == "Linear8bitLt"


def of_torchao():
    quantization = pytest.importorskip("torchao.quantization")
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    return config, lambda module: is_linear(module) and type(module.weight) is not nn.Parameter


@pytest.mark.slow
@pytest.mark.parametrize("quantiser", [of_bitsandbytes, of_torchao])
@over_systems
def test_quantised_loading(system, quantiser, tmp_path):
    settings, is_quantised = quantiser()
    torch.manual_seed(0)
    model = shake(
        LoopedForCausalLM(tiny_config(hidden_size=64, intermediate_size=64, **SYSTEMS[system])), std=0.02
    ).eval()
    model.save_pretrained(tmp_path)
    ids = random_ids(2, 7)
    quantised = LoopedForCausalLM.from_pretrained(tmp_path, quantization_config=settings, device_map="cpu")
    left = [name for name, module in quantised.named_modules() if is_linear(module) and not is_quantised(module)]
    assert left == ["lm_head"]  # as in Llama
    assert sum(map(is_quantised, quantised.modules())) == num_linear(model) - 1
    exact, found = model(ids).logits, quantised(ids).logits.float()
    assert not torch.equal(exact, found)
    assert (exact - found).norm() < 0.2 * exact.norm()


def dequantised(layer) -> torch.Tensor:
    """What its blocks of 128 x 128 with a scale for each stand for."""
    scales = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return layer.weight.float() * scales


@pytest.fixture
def fp8_on_a_cpu(monkeypatch):
    """transformers' own, but for the wish for a GPU and its kernel."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    quantizer = importlib.import_module("transformers.quantizers.quantizer_finegrained_fp8")
    monkeypatch.setattr(quantizer.FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    monkeypatch.setattr(fp8.FP8Linear, "forward", lambda layer, x: F.linear(x, dequantised(layer), layer.bias))
    return fp8.FP8Linear


def test_fp8_replaces_as_many_layers_as_in_llama(fp8_on_a_cpu):
    with torch.device("meta"):
        models = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SIZES)), build("plain", num_core_layers=2)
    for model in models:
        AutoHfQuantizer.from_config(FineGrainedFP8Config())._process_model_before_weight_loading(model)
        assert sum(isinstance(module, fp8_on_a_cpu) for module in model.modules()) == 14
        assert [name for name, module in model.named_modules() if is_linear(module)] == ["lm_head"]


@pytest.mark.parametrize("system", quick_and_slow(SYSTEMS, "sections"))
def test_fp8_of_transformers(system, fp8_on_a_cpu, tmp_path):
    """Layers that its blocks do not divide have to be left out, and are named."""
    small = {"sections": ["value_gate"], "parcae": ["value_gate"], "ouro": ["exit_gate"]}.get(system, [])
    model = LoopedForCausalLM(tiny_config(hidden_size=128, intermediate_size=128, **SYSTEMS[system]))
    shake(model, std=0.02).eval().save_pretrained(tmp_path / "plain")
    if small:
        with pytest.raises(ValueError, match=rf"{small[0]} \(.*modules_to_not_convert=\['lm_head', '{small[0]}'\]"):
            LoopedForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=FineGrainedFP8Config())
    settings = FineGrainedFP8Config(modules_to_not_convert=["lm_head", *small] if small else None)
    quantised = LoopedForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=settings)
    layers = {name: layer for name, layer in quantised.named_modules() if isinstance(layer, fp8_on_a_cpu)}
    left = {name for name, module in model.named_modules() if is_linear(module)} - set(layers)
    assert {name.split(".")[-1] for name in left} == {"lm_head", *small}
    assert all(layer.weight.dtype == torch.float8_e4m3fn for layer in layers.values())
    with torch.no_grad():
        for name, layer in layers.items():
            model.get_submodule(name).weight.copy_(dequantised(layer))
    ids = random_ids(2, 7)
    quantised.save_pretrained(tmp_path / "fp8")
    for found in (quantised, LoopedForCausalLM.from_pretrained(tmp_path / "fp8")):
        torch.testing.assert_close(found(ids).logits, model(ids).logits)


def test_fp8_of_a_release_that_stores_several_matrices_as_one_tensor(fp8_on_a_cpu, tmp_path):
    model = shake(
        LoopedForCausalLM(tiny_config(hidden_size=128, intermediate_size=128, **SYSTEMS["huginn"])), std=0.02
    )
    model.save_pretrained(tmp_path / "plain")
    save_public(model, tmp_path / "huginn", "huginn")
    plain, public = (
        LoopedForCausalLM.from_pretrained(tmp_path / name, quantization_config=FineGrainedFP8Config())
        for name in ("plain", "huginn")
    )
    assert sum(isinstance(module, fp8_on_a_cpu) for module in public.modules()) == num_linear(model) - 1  # the head
    torch.testing.assert_close(public.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_gguf_is_refused(tmp_path):
    with pytest.raises(ValueError, match="gguf_file='model.gguf': transformers reads no looped model from GGUF"):
        LoopedForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")


# Trainers that run the trunk, and make the loss themselves

LOSSES = {
    "terminal": {},
    "per_loop": {"loop_loss": "per_loop"},
    "last_third": {"loop_loss": "last_third"},
    "exit_weighted": {"preset": "ouro"},
    "exit_weighted_logits": {"loop_loss": "exit_weighted_logits", "exit_gate": "raw"},
    "gate": {"preset": "ouro", "loop_loss": "gate"},
    "norm_penalty": {"norm_penalty": 0.1},
}


def trl_or_skip():
    trl = pytest.importorskip("trl")
    pytest.importorskip("datasets")
    return trl


def fine_tuning(trainer_class, model, folder, **arguments):
    import datasets
    from trl import SFTConfig

    tokenizer = tiny_tokenizer()
    texts = datasets.Dataset.from_dict({"text": ["a b c d e f", "g h i j"] * 2})
    settings = {"max_steps": 1, "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    arguments = SFTConfig(str(folder), **{**settings, "disable_tqdm": True, **arguments})
    return trainer_class(model, arguments, train_dataset=texts, processing_class=tokenizer)


@pytest.fixture
def warnings_of_clients(monkeypatch):
    """Each is given once a process otherwise."""
    said = []
    for name in ("clients", "training_warnings"):
        monkeypatch.setattr(f"modeling_looped.{name}.logger.warning_once", said.append)
    return said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss", quick_and_slow(LOSSES, "terminal", "exit_weighted", "norm_penalty"))
@pytest.mark.some(1)
def test_fine_tuning_has_the_models_own_loss(loss, tmp_path, warnings_of_clients):
    trl = trl_or_skip()
    from modeling_looped.trainers import OwnLoss

    class Finetuning(OwnLoss, trl.SFTTrainer):
        pass

    model = tiny_model(vocab_size=30, eos_token_id=None, pad_token_id=0, **LOSSES[loss])
    trainer = fine_tuning(Finetuning, model, tmp_path, per_device_train_batch_size=4)
    [batch] = trainer.get_train_dataloader()
    model.train()
    wanted = model(**{key: batch[key] for key in ("input_ids", "attention_mask", "labels") if key in batch}).loss
    items = (batch["labels"][:, 1:] != -100).sum()
    for given, times in ((None, 1), (items, 1), (3 * items, 3)):  # TRL may count labels over several batches
        found = trainer.compute_loss(model, batch, num_items_in_batch=given)
        assert times * found.item() == pytest.approx(wanted.item(), rel=1e-5)
    trainer.train()
    assert not warnings_of_clients


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("per", ["batch", "sequence"])
@pytest.mark.some(1)
def test_fine_tuning_at_drawn_depths(per, tmp_path):
    """Depths, loops with gradients and noise of every step; a run that goes on draws what the whole one drew."""
    trl = trl_or_skip()
    from modeling_looped.trainers import DrawnDepths, OwnLoss

    class Finetuning(OwnLoss, trl.SFTTrainer):
        depths = DrawnDepths("poisson", mean=5, backprop_loops=2, per=per)

    def train(steps: int, resume: bool = False):
        seen, names = [], ("num_loops", "backprop_loops", "initial_state")
        model = tiny_model(vocab_size=30, eos_token_id=None, pad_token_id=0, injection="concat", state_init="normal")
        settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "seed": 7, "max_steps": steps}
        saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}
        trainer = fine_tuning(Finetuning, model, tmp_path, **settings, **saving)
        trainer.eval_dataset = trainer.train_dataset
        model.register_forward_pre_hook(
            lambda _, args, given: seen.append({name: given.get(name) for name in names}), with_kwargs=True
        )
        trainer.train(resume_from_checkpoint=resume)
        drawn = list(seen)
        trainer.evaluate()
        assert all(value is None for call in seen[len(drawn) :] for value in call.values())
        return drawn

    train(2)
    rest, whole = train(4, resume=True), train(4)
    assert len(whole) == 8 and [call["num_loops"] for call in rest] == [call["num_loops"] for call in whole[4:]]
    for number, call in enumerate(whole):
        step, row = divmod(number, 2)
        (depth,) = depths_of_step("poisson", 5, 7, step, [row], per=per)
        assert call["num_loops"] == (depth if per == "batch" else [depth]) and call["backprop_loops"] == 2
    noise = [call["initial_state"] for call in whole]
    assert not torch.equal(noise[0][:, :3], noise[1][:, :3]) and torch.equal(rest[0]["initial_state"], noise[4])


OF_LOOPS = {"injection": "concat", "num_prelude_layers": 1, "num_coda_layers": 1}
COUNTED = {  # fields, and how depths are drawn
    "one_loop": ({"num_loops": 1}, None),
    "several": ({"num_loops": 3}, None),
    "without_gradients": ({"num_loops": 2}, ("fixed", 5, 1)),
    "drawn": ({"num_loops": 2}, ("poisson", 4, 2)),
    "deltas": ({"num_loops": 4, "loop_lora_rank": 8}, None),
    "modulation": ({"num_loops": 3, "loop_embedding": "modulation"}, None),
    "time": ({"num_loops": 3, "loop_embedding": "time"}, ("fixed", 4, 2)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("per", ["batch", "sequence"])
@pytest.mark.parametrize("case", COUNTED)
@pytest.mark.some(3)
def test_operations_of_training_are_those_that_torch_counts(case, per, tmp_path):
    """But for the products of attention, which transformers leaves out too, and for what a loop computes once for all
    tokens."""
    from modeling_looped.trainers import DrawnDepths, OwnLoss

    fields, drawn = COUNTED[case]

    class Training(OwnLoss, Trainer):
        depths = drawn and DrawnDepths(drawn[0], mean=drawn[1], backprop_loops=drawn[2], per=per)

    model = tiny_model(**OF_LOOPS, **fields)
    length = 32 if "loop_embedding" in fields else 6  # so that what is computed once for all tokens is little
    rows = [{"input_ids": row, "labels": row} for row in random_ids(10, length).tolist()]
    arguments = {"max_steps": 3, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": "none"}
    trainer = Training(model, TrainingArguments(str(tmp_path), save_strategy="no", **arguments), train_dataset=rows)
    with FlopCounterMode(display=False) as counter:
        trainer.train()
    counted = counter.get_flop_counts()["Global"]  # torch 2.15 counts attention on a CPU, 2.13 does not
    without_attention = sum(count for kind, count in counted.items() if "attention" not in str(kind))
    assert trainer.state.total_flos == pytest.approx(without_attention, rel=0.03)


def test_operations_are_counted_of_shards_too():
    """As under FSDP, where a process has flat parts of some parameters, and nothing of the others."""
    from modeling_looped.trainers import OwnLoss

    class Counting(OwnLoss, Trainer):
        def __init__(self, model):
            self.model = model

    fields = {"num_loops": 4, "loop_lora_rank": 8, "loop_embedding": "modulation"}
    whole = tiny_model(**OF_LOOPS, **fields)
    inputs, first, second = {"input_ids": random_ids(2, 6)}, copy.deepcopy(whole), copy.deepcopy(whole)
    limit, place = sum(p.numel() for p in whole.parameters()) // 2, 0
    for of_first, of_second in zip(first.parameters(), second.parameters()):
        flat, here = of_first.detach().flatten(), max(0, limit - place)
        place += len(flat)
        of_first.data, of_second.data = flat[:here], flat[here:]
    counted = [Counting(model).floating_point_ops(inputs) for model in (first, second)]
    assert all(counted) and sum(counted) == pytest.approx(Counting(whole).floating_point_ops(inputs), rel=1e-4)


def test_rows_are_counted_anew_where_a_trainer_begins_anew():
    """After a batch that was too large for `auto_find_batch_size`, or in a second `train()`."""
    from modeling_looped.trainers import DrawnDepths, OwnLoss

    class AtDepths(OwnLoss):
        args, accelerator = SimpleNamespace(seed=0, world_size=1, process_index=0), SimpleNamespace()
        depths = DrawnDepths("poisson", mean=9, per="sequence")

    trainer, model = AtDepths(), tiny_model()
    trainer.accelerator.unwrap_model = lambda model: model
    for num_rows in (4, 2):
        trainer.state, micro_batch = SimpleNamespace(global_step=0), {"input_ids": random_ids(num_rows, 5)}
        drawn = [trainer._drawn(model, micro_batch)["num_loops"] for _ in range(2)]
        assert sum(drawn, []) == depths_of_step("poisson", 9, 0, 0, range(2 * num_rows), per="sequence")


def test_drawn_depths_do_not_go_with_a_prefix():
    peft = pytest.importorskip("peft")
    from modeling_looped.trainers import DrawnDepths, OwnLoss

    class AtDepths(OwnLoss):
        state, args = SimpleNamespace(global_step=0), SimpleNamespace(seed=0, world_size=1, process_index=0)
        accelerator, depths = SimpleNamespace(unwrap_model=lambda model: model), DrawnDepths("poisson", mean=3)

    inputs, noisy = {"input_ids": random_ids(2, 5)}, {"injection": "concat", "state_init": "normal"}
    for kind, fields, fits in [
        ("PrefixTuningConfig", {}, False),
        ("PromptTuningConfig", noisy, False),
        ("PromptTuningConfig", {}, True),
    ]:
        method = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model = peft.get_peft_model(tiny_model(**fields), method)
        if fits:
            assert AtDepths()._drawn(model, inputs)["num_loops"] >= 1
        else:
            with pytest.raises(ValueError, match=f"{kind} does not go with DrawnDepths"):
                AtDepths()._drawn(model, inputs)


@pytest.mark.parametrize(
    ("zero_3", "policy", "refused"), [(False, None, False), (True, None, True), (False, "blocks", True)]
)
def test_depths_of_rows_do_not_go_with_weights_that_are_gathered_in_loops(zero_3, policy, refused, monkeypatch):
    from modeling_looped import trainers

    class AtDepths(trainers.OwnLoss):
        state = SimpleNamespace(global_step=0)
        accelerator = SimpleNamespace(
            unwrap_model=lambda model: model,
            state=SimpleNamespace(fsdp_plugin=SimpleNamespace(auto_wrap_policy=policy)),
        )

    trainer, inputs = AtDepths(), {"input_ids": random_ids(2, 5)}
    monkeypatch.setattr(trainers, "is_deepspeed_zero3_enabled", lambda: zero_3)
    for per, processes in product(("sequence", "batch"), (1, 2)):
        trainer.args = SimpleNamespace(seed=0, world_size=processes, process_index=0)
        trainer.depths = trainers.DrawnDepths("poisson", mean=3, per=per)
        is_refused = refused and per == "sequence" and processes > 1
        with pytest.raises(ValueError, match="per='sequence' lets 2 .*ZeRO-3") if is_refused else nullcontext():
            trainer._drawn(tiny_model(), inputs)


def test_depths_that_can_not_be_drawn():
    from modeling_looped.trainers import DrawnDepths, OwnLoss

    class AtDepths(OwnLoss):
        state, args = SimpleNamespace(global_step=0), SimpleNamespace(seed=0, world_size=1, process_index=0)
        accelerator = SimpleNamespace(unwrap_model=lambda model: model)

    model, ids, trainer = (
        tiny_model(num_loops=3, injection="concat", state_init="normal"),
        random_ids(2, 5),
        AtDepths(),
    )
    trainer.depths = DrawnDepths("poisson", maximum=3)
    states = [
        trainer._drawn(model, inputs)["initial_state"]
        for inputs in ({"input_ids": ids}, {"inputs_embeds": model.get_input_embeddings()(ids)})
    ]  # of the same step
    assert states[0].shape == states[1].shape == (2, 5, model.config.hidden_size)
    for depths, said in [
        (DrawnDepths("poisson", maximum=2), "maximum=2 is below the mean depth 3"),
        (DrawnDepths("poisson", mean=4.5, maximum=4), "maximum=4 is below the mean depth 4.5"),
        (4, r"depths=4 must be DrawnDepths, such as DrawnDepths\(mean=4\)"),
    ]:
        trainer.depths = depths
        with pytest.raises(ValueError, match=said):
            trainer._drawn(model, {"input_ids": ids})


def test_several_processes_are_told_of_a_gate_without_gradient(warnings_of_clients, monkeypatch):
    """DistributedDataParallel would say that some parameter was not used, and not which."""
    model, ids = tiny_model(exit_gate="raw").train(), random_ids(2, 5)
    model.model(ids)
    assert not warnings_of_clients
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    model.model(ids)
    assert "model.exit_gate.requires_grad_(False)" in warnings_of_clients[0]


def test_trainers_turn_all_dropout_off():
    from trl.trainer.utils import disable_dropout_in_model

    rates = {"attention_dropout": 0.3, "residual_dropout": 0.3, "embedding_dropout": 0.3}
    model, ids = tiny_model(num_loops=5, **rates).train(), random_ids(2, 9)
    assert not torch.equal(model(ids).logits, model(ids).logits)
    disable_dropout_in_model(model)
    assert torch.equal(model(ids).logits, model.eval()(ids).logits)


def test_no_two_rows_of_a_step_draw_alike():
    """Also where the last micro-batch of a step is smaller, in each of two processes."""
    from modeling_looped.trainers import OwnLoss

    class OfRows(OwnLoss):
        state = SimpleNamespace(global_step=3)
        accelerator = SimpleNamespace(unwrap_model=lambda model: model)
        depths = SimpleNamespace(of_step=lambda model, seed, step, rows, length, device: rows)

    drawn = []
    for process in (0, 1):
        trainer = OfRows()
        trainer.args = SimpleNamespace(seed=0, world_size=2, process_index=process)
        drawn += [row for size in (4, 4, 1) for row in trainer._drawn(None, {"input_ids": random_ids(size, 2)})]
    assert sorted(drawn) == list(range(18))


def fused_head_or_skip():
    """How TRL multiplies the trunk's state with the head; without it, its trainers pass labels to the model."""
    from trl.trainer import utils

    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this TRL has no fused head, and so takes the model's own loss")
    return utils.add_fused_lm_head


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss", quick_and_slow(LOSSES, "per_loop", "gate"))
def test_a_trainer_with_another_loss_is_said_to_be_one(loss, tmp_path, warnings_of_clients):
    trl = trl_or_skip()
    fused_head_or_skip()
    model = tiny_model(vocab_size=30, eos_token_id=None, pad_token_id=0, **LOSSES[loss])
    trainer = fine_tuning(trl.SFTTrainer, model, tmp_path)
    trainer.train()
    if loss == "terminal":
        assert not warnings_of_clients
    else:
        said = warnings_of_clients[0]
        assert "no part in this training" in said and "OwnLoss" in said
        named = {"loop_loss": model.config.loop_loss} if model.config.loop_loss != "terminal" else LOSSES[loss]
        assert all(f"{field}={value!r}" in said for field, value in named.items())


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_in_evaluation_that_makes_no_perplexity_is_said_to_be_one(loss, warnings_of_clients):
    model, ids = tiny_model(**{**LOSSES[loss], "num_loops": 4}), random_ids(2, 5)
    with torch.no_grad():
        model.train()(ids, labels=ids)
        outputs = model.eval()(ids, labels=ids, output_loop_losses=True)
        assert warnings_of_clients == []
        model(ids, labels=ids)
    assert bool(warnings_of_clients) == (
        outputs.loss.item() != pytest.approx(outputs.loop_losses[-1].item(), abs=1e-6)
    )
    assert bool(warnings_of_clients) == (loss != "terminal")


def test_what_a_trainer_can_not_do_with_the_models_own_loss(tmp_path, warnings_of_clients):
    trl = trl_or_skip()
    from modeling_looped.trainers import OwnLoss

    class Finetuning(OwnLoss, trl.SFTTrainer):
        pass

    model, ids = tiny_model(vocab_size=30, loop_loss="per_loop"), random_ids(2, 5, 30)
    trainer = fine_tuning(Finetuning, model, tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="label_smoothing_factor=0.1"):
        trainer.compute_loss(model, {"input_ids": ids, "labels": ids})
    trainer = fine_tuning(Finetuning, model, tmp_path)
    trainer.args.use_liger_kernel = True  # asking for it needs the package
    with pytest.raises(ValueError, match="use_liger_kernel=True replaces layers of the families"):
        trainer.compute_loss(model, {"input_ids": ids, "labels": ids})
    trainer = fine_tuning(Finetuning, model, tmp_path, loss_type="dft")
    with pytest.raises(ValueError, match="loss_type='dft' would be replaced by the model's own loss"):
        trainer.compute_loss(model, {"input_ids": ids, "labels": ids})
    trainer.args = SimpleNamespace(label_smoothing_factor=0, use_liger_kernel=False, loss_type=["sigmoid"])  # of DPO
    with pytest.raises(ValueError, match="is for a Trainer and for TRL's SFTTrainer; Finetuning computes a loss of"):
        trainer.compute_loss(model, {"input_ids": ids, "labels": ids})
    model.train()(ids)  # as transformers' Trainer calls it for label smoothing: without labels
    assert len(warnings_of_clients) == 1


@pytest.mark.parametrize("function", [None, lambda outputs, labels, num_items_in_batch=None: outputs.logits.sum() * 0])
def test_a_function_that_computes_the_loss_is_refused_beside_the_models_own(function, tmp_path):
    from modeling_looped.trainers import OwnLoss

    class Training(OwnLoss, Trainer):
        pass

    model, ids = tiny_model(loop_loss="per_loop"), random_ids(2, 5)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = Training(model, arguments, compute_loss_func=function)
    inputs = {"input_ids": ids, "labels": ids}
    if function is None:
        wanted = model(ids, labels=ids).loss.item()
        assert trainer.compute_loss(model, inputs).item() == pytest.approx(wanted, rel=1e-6)
    else:
        with pytest.raises(ValueError, match="compute_loss_func would replace the model's own loss: leave it out"):
            trainer.compute_loss(model, inputs)


def test_bases_in_the_wrong_order_are_refused():
    from modeling_looped.trainers import OwnLoss

    class Other(Trainer):
        def compute_loss(self, *args, **kwargs): ...

    class Plain(Trainer): ...

    for base, owner in [(Trainer, "Trainer"), (Other, "Other"), (Plain, "Trainer")]:
        message = rf"loss of {owner}, .*: write class Mine\(OwnLoss, {base.__name__}\)"
        with pytest.raises(ValueError, match=message):
            type("Mine", (base, OwnLoss), {})

    class Weighed(OwnLoss, Trainer):  # on purpose
        def compute_loss(self, *args, **kwargs): ...

    class Noted:  # calls what follows
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)  # pyrefly: ignore[missing-attribute]

    type("Mine", (Weighed,), {})
    type("Mine", (Noted, OwnLoss, Other), {})


def test_a_trainer_of_trl_with_another_loss_does_not_take_the_models_own(tmp_path):
    """Also where its arguments are those of SFTTrainer, as in distillation, whose teacher would be left out."""
    trl = trl_or_skip()
    gkd = pytest.importorskip("trl.experimental.gkd")
    from modeling_looped.trainers import OwnLoss

    class OfDistillation(gkd.GKDTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    class OfSupervision(trl.SFTTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    model, ids = tiny_model(vocab_size=30, loop_loss="per_loop"), random_ids(2, 5, 30)
    args = SimpleNamespace(label_smoothing_factor=0, use_liger_kernel=False, loss_type="nll")
    for base, named in [
        (gkd.GKDTrainer, "GKDTrainer"),
        (OfDistillation, "GKDTrainer"),
        (trl.RewardTrainer, "RewardTrainer"),
        (trl.DPOTrainer, "DPOTrainer"),
    ]:
        trainer = object.__new__(type("Mixed", (OwnLoss, base), {}))  # without its teacher or pairs
        trainer.__dict__.update(args=args, label_smoother=None)
        with pytest.raises(ValueError, match=f"{named} computes a loss of its own: take it as it is"):
            trainer.compute_loss(model, {"input_ids": ids, "labels": ids})
    trainer = fine_tuning(type("Mixed", (OwnLoss, OfSupervision), {}), model, tmp_path)
    wanted = model(ids, labels=ids).loss.item()
    assert trainer.compute_loss(model, {"input_ids": ids, "labels": ids}).item() == pytest.approx(wanted, rel=1e-6)


def test_a_pass_that_trains_nothing_warns_of_nothing(warnings_of_clients):
    model, ids = tiny_model(loop_loss="per_loop"), random_ids(2, 5)
    model(ids)
    with torch.no_grad():
        model.train()(ids)
    model(ids, labels=ids)
    assert not warnings_of_clients


def test_sampling_by_saved_exits_in_training_is_said(warnings_of_clients):
    """GRPO would train the last loop on tokens of another."""
    model, ids = tiny_model(eos_token_id=None), random_ids(1, 4)
    arguments = {"max_new_tokens": 2, "generation_config": GenerationConfig(do_sample=True)}
    model.train().generate(ids, **arguments)
    model.generate(ids, num_loops=2, exit_criterion="entropy", exit_threshold=0.1, **arguments)
    assert not warnings_of_clients
    model.generation_config.exit_criterion, model.generation_config.exit_threshold = "max_prob", 0.01
    model.eval().generate(ids, **arguments)
    assert not warnings_of_clients
    model.train().generate(ids, **arguments)
    (said,) = warnings_of_clients
    assert "(exit_criterion='max_prob')" in said and "generation_config.exit_criterion to None" in said


def test_sampling_otherwise_than_training_is_said_however_it_is_asked_for(warnings_of_clients):
    """TRL passes what its user asks for in a generation config, or decodes in a continuous batch."""
    model, ids = tiny_model(preset="huginn", eos_token_id=None).train(), random_ids(1, 4)
    model.generate(ids, max_new_tokens=2, generation_config=GenerationConfig(do_sample=True, num_loops=1))
    assert "(num_loops=1)" in warnings_of_clients.pop()
    model.generation_config.state_seed = 3
    model.generate(ids, max_new_tokens=2, do_sample=True)
    assert "(state_seed=3)" in warnings_of_clients.pop()
    model.generation_config.state_seed, model.generation_config.num_loops = None, 1
    asked = GenerationConfig(max_new_tokens=2, do_sample=True)
    batches = [model.generate_batch([ids[0].tolist()], asked)]
    assert "(num_loops=1)" in warnings_of_clients.pop()
    batches.append(model.eval().generate_batch([ids[0].tolist()], asked))
    assert not warnings_of_clients
    assert [result.token_loops for results in batches for result in results.values()] == [[1, 1], [1, 1]]


def test_a_model_that_is_made_larger_twice_is_the_same():
    """PEFT saves the new rows of embeddings and head with an adapter, and whoever opens it resizes the model again."""
    fields = {"value_embeddings": True, "num_prelude_layers": 1, "injection": "add"}
    tables = []
    for seed in (0, 1):
        model = tiny_model(**fields)
        size = model.config.vocab_size
        torch.manual_seed(seed)
        model.resize_token_embeddings(size + 2, mean_resizing=False)
        table = next(iter(model.model.value_embeds.values()))
        torch.testing.assert_close(table.weight[size:], table.weight[:size].mean(0).expand(2, -1))
        tables.append(table.weight)
    assert torch.equal(*tables)


@pytest.mark.filterwarnings("ignore")
@over_systems
def test_log_probabilities_of_policies(system):
    """What GRPO, RLOO, DPO and KTO compute from the trunk's state and the head's weight is what the model says."""
    trl_or_skip()
    add_fused_lm_head = fused_head_or_skip()
    model, ids = build(system, logit_softcap=3.0), random_ids(2, 7)
    wanted = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    add_fused_lm_head(model)
    found = model(ids, labels=ids, fused_lm_head=True).log_probs
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bf16", [False, True])
def test_a_model_decodes_by_rows_after_a_trainer_of_trl(bf16, tmp_path):
    trl = trl_or_skip()
    import datasets

    texts = datasets.Dataset.from_dict({"prompt": ["a b c"] * 2, "chosen": [" d e"] * 2, "rejected": [" f"] * 2})
    model, ids = tiny_model(vocab_size=30, eos_token_id=None, pad_token_id=0), random_ids(1, 4, 30)
    settings = {"max_steps": 1, "use_cpu": True, "bf16": bf16, "report_to": "none", "save_strategy": "no"}
    arguments = trl.DPOConfig(str(tmp_path), disable_tqdm=True, **settings)
    reference = copy.deepcopy(model)
    trl.DPOTrainer(model, reference, arguments, train_dataset=texts, processing_class=tiny_tokenizer()).train()
    model.eval()
    plain = model.generate(ids, max_new_tokens=4)
    assert torch.equal(model.generate(ids, max_new_tokens=4, draft_loops=1), plain)
    assert torch.equal(model.generate(ids, max_new_tokens=4, exit_criterion="kl", exit_threshold=0.0), plain)


def test_a_changed_forward_is_refused_within_the_fused_head_of_trl():
    trl_or_skip()
    add_fused_lm_head = fused_head_or_skip()
    model, forward = tiny_model(), LoopedForCausalLM.forward
    model.forward = lambda *arguments, **named: forward(model, *arguments, **named)
    add_fused_lm_head(model)
    with pytest.raises(ValueError, match="a forward, loop or attention that is not the model's own"):
        model.generate(random_ids(1, 4), max_new_tokens=2, draft_loops=1)


def test_the_softcap_has_the_name_that_others_read(tmp_path):
    config = LoopedConfig(final_logit_softcapping=5.0)
    assert config.logit_softcap == config.final_logit_softcapping == 5.0
    config.save_pretrained(tmp_path)
    assert LoopedConfig.from_pretrained(tmp_path).final_logit_softcapping == 5.0
    assert LoopedConfig().final_logit_softcapping is None


def test_a_config_is_read_as_transformers_reads_it():
    class Renamed(LoopedConfig):
        attribute_map = {"n_embd": "hidden_size", "vocab_size": "hidden_size"}

    renamed = Renamed(n_embd=96, num_attention_heads=12)
    assert (renamed.n_embd, renamed.hidden_size, renamed.vocab_size) == (96, 96, 96)
    with pytest.raises(AttributeError, match="'LoopedConfig' object has no attribute 'n_embd'"):
        LoopedConfig().n_embd  # noqa: B018
    with pytest.raises(RuntimeError, match="'hidden_size' is a per-layer attribute"):  # which no model here has
        LoopedConfig(per_layer_config={0: {"hidden_size": 32}})


def test_reading_a_config_takes_one_call_of_python():
    """Of transformers' own it takes two, whose four looks take more than a microsecond."""
    config, called, before = LoopedConfig(), [], sys.getprofile()
    sys.setprofile(lambda frame, event, argument: called.append(frame.f_code) if event == "call" else None)
    try:
        config.hidden_size  # noqa: B018
    finally:
        sys.setprofile(before)
    assert called == [LoopedConfig.__getattribute__.__code__]


# PEFT


def test_peft_knows_which_layers_to_adapt():
    peft = pytest.importorskip("peft")
    ids = random_ids(2, 5)
    adapted = peft.get_peft_model(build("sections"), peft.LoraConfig(task_type="CAUSAL_LM"))
    adapted(input_ids=ids, labels=ids).loss.backward()
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert {name.split(".")[-4] for name in trained} == {"q_proj", "v_proj"}
    assert all(parameter.grad is not None for parameter in adapted.parameters() if parameter.requires_grad)
    norms = peft.get_peft_model(build("plain"), peft.LNTuningConfig(task_type="CAUSAL_LM"))
    assert {"input_layernorm", "post_attention_layernorm", "norm"} == {
        name.split(".")[-4] for name, parameter in norms.named_parameters() if parameter.requires_grad
    }


def test_norms_without_weights_are_not_tuned(tmp_path):
    """Named with others they are passed over; a model that has no others is refused, and Llama is tuned as before."""
    peft = pytest.importorskip("peft")
    ids = random_ids(2, 5)
    names = ["free_norm", "input_layernorm"]  # the first has no weight
    settings = peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=names)
    adapted = peft.get_peft_model(build("parcae"), settings)
    adapted.add_adapter("other", settings)
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[-4] for name in trained} == {"input_layernorm"} and len(trained) == 4
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(0.3)
    adapted.save_pretrained(tmp_path)
    opened = peft.PeftModel.from_pretrained(build("parcae"), tmp_path)
    assert torch.equal(opened.eval()(ids).logits, adapted.eval()(ids).logits)
    defaults = peft.LNTuningConfig(task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="have none .*input_layernorm and 4 more.*, as norm_affine=False says"):
        peft.get_peft_model(build("plain", norm_affine=False), defaults)
    llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SIZES))
    tuned = peft.get_peft_model(llama, peft.LNTuningConfig(task_type="CAUSAL_LM"))
    assert sum(parameter.requires_grad for parameter in tuned.parameters()) == 5
    with pytest.raises(ValueError, match="nonexistent|No modules were targeted"):  # PEFT's own words
        peft.get_peft_model(llama, peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["nonexistent"]))


# Graphs for batches of any size


def num_graphs(model, batch_sizes, **inputs) -> int:
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for batch_size in batch_sizes:
        ids = random_ids(batch_size, 7)
        labels = {"labels": ids} if inputs.get("train") else {}
        model.train(bool(labels))
        found, wanted = (each(ids, use_cache=False, **labels) for each in (compiled, model))
        torch.testing.assert_close(found.logits, wanted.logits)
        torch.testing.assert_close(found.loss, wanted.loss)
    torch._dynamo.reset()
    return graphs.count


CASES = [(system, train) for system in SYSTEMS for train in (False, True)]


@pytest.mark.parametrize(("system", "train"), quick_and_slow(CASES))
def test_compiled_graphs_are_as_few_as_llamas(system, train):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 99}
    llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
    batch_sizes = (2, 3, 5)
    assert num_graphs(build(system, num_loops=2), batch_sizes, train=train) == num_graphs(llama, batch_sizes) == 2


@pytest.mark.parametrize("system", quick_and_slow(SYSTEMS, "sections"))
def test_exported_programs_take_any_batch(system):
    model = build(system, num_loops=2)
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=32)
    program = torch.export.export(
        model,
        (),
        kwargs={"input_ids": random_ids(2, 7), "use_cache": False},
        dynamic_shapes={"input_ids": {0: batch, 1: length}, "use_cache": None},
        strict=False,
    ).module()
    for ids in (random_ids(2, 7), random_ids(1, 9), random_ids(5, 3)):
        found = program(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(found, model(ids, use_cache=False).logits)


@pytest.mark.filterwarnings("ignore")  # torch wants its exporter in the place of this
@pytest.mark.parametrize("system", quick_and_slow(SYSTEMS, "sections"))
def test_traced_models_take_any_batch(system):
    class Logits(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(ids, use_cache=False, return_dict=False)[0]

    model = build(system)
    with torch.no_grad():
        traced = torch.jit.trace(Logits(model), random_ids(2, 7), check_trace=False)
        for batch_size in (1, 2, 5):
            ids = random_ids(batch_size, 7, seed=batch_size)
            torch.testing.assert_close(traced(ids), model(ids, use_cache=False).logits)


# Devices


@over_systems
def test_weights_are_drawn_on_meta_where_another_device_is_the_default(system):
    model = build(system).to("meta")
    with torch.device("cpu"):
        model.init_weights()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_kernels_of_the_hub_are_refused(tmp_path):
    """They replace layers by names that none of ours has."""
    model = tiny_model()
    model.save_pretrained(tmp_path)
    for ask in (
        lambda: type(model).from_pretrained(tmp_path, use_kernels=True),
        lambda: model.set_use_kernels(True),
        lambda: setattr(model, "use_kernels", True),
    ):
        with pytest.raises(ValueError, match="use_kernels=True replaces layers that the kernels hub knows"):
            ask()
    model.set_use_kernels(False)
    assert not any(hasattr(type(module), "kernel_layer_name") for module in model.modules())
