"""What is built for any causal LM of transformers works as it is: pipelines, PEFT, Trainer, TRL, accelerate."""

import json
import os
from collections import Counter
from functools import partial

import accelerate
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, Trainer, TrainingArguments, pipeline
from transformers.utils.generic import find_labels

from modeling_looped import (
    ExitRule,
    LoopedForCausalLM,
    LoopedForQuestionAnswering,
    LoopedForSequenceClassification,
    LoopedForTokenClassification,
)
from modeling_looped.formats.writing import save_public
from tests.helpers import SECTIONS, quick_and_slow, random_ids, tiny_model, tiny_tokenizer


SYSTEMS = {
    "plain": {},
    "flt": {"preset": "flt"},
    "parcae": {"preset": "parcae", **SECTIONS},
    "ouro": {"preset": "ouro"},
    "first_keys": {"num_key_value_loops": 1, "injection": "add"},
}


def over_systems(*quick):
    return pytest.mark.parametrize("system", quick_and_slow(SYSTEMS, *quick))


VOCABULARY = len(tiny_tokenizer())


def build(system: str, model_class=LoopedForCausalLM, **fields):
    return tiny_model(model_class, **{"vocab_size": VOCABULARY, "pad_token_id": 0, **fields, **SYSTEMS[system]})


def alphabet(count: int, seed: int = 0) -> list[dict]:
    """Runs of the alphabet, of mixed length: easy to learn, and a batch has padding."""
    generator = torch.Generator().manual_seed(seed)
    starts, lengths = (torch.randint(low, high, (count,), generator=generator) for low, high in ((4, 18), (3, 12)))
    runs = [list(range(start, start + length)) for start, length in zip(starts.tolist(), lengths.tolist())]
    return [{"input_ids": run, "labels": run} for run in runs]


# Pipelines


@over_systems("plain", "parcae")
def test_text_generation_pipeline(system, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    model = build(system, eos_token_id=None)
    model.save_pretrained(tmp_path)
    arguments = {"max_new_tokens": 4, "do_sample": False, "return_tensors": True}
    pipe = pipeline("text-generation", model=str(tmp_path), device="cpu")
    for num_loops in (1, 4):
        ids = tokenizer("a b c", return_tensors="pt")["input_ids"]
        expected = model.generate(ids, num_loops=num_loops, max_new_tokens=4, do_sample=False)[0].tolist()
        assert pipe("a b c", num_loops=num_loops, **arguments)[0]["generated_token_ids"] == expected
        # and in a batch with a longer prompt, which pads it on the left
        batch = pipe(["a b c", "a b c d e f"], num_loops=num_loops, batch_size=2, **arguments)
        padded = batch[0][0]["generated_token_ids"]
        assert padded == [tokenizer.pad_token_id] * 3 + expected


def test_classification_pipelines(tmp_path):
    for task, model_class in (
        ("text-classification", LoopedForSequenceClassification),
        ("token-classification", LoopedForTokenClassification),
    ):
        model = build("plain", model_class, num_labels=3)
        pipe = pipeline(task, model=model, tokenizer=tiny_tokenizer(), device="cpu")
        with torch.no_grad():
            logits = model(**tiny_tokenizer()("a b c", return_tensors="pt", return_token_type_ids=False)).logits
        best = [model.config.id2label[label] for label in logits.argmax(-1).flatten().tolist()]
        found = pipe("a b c")
        assert [entry.get("label", entry.get("entity")) for entry in found] == best


# PEFT


def train_on(model, ids, steps: int = 10) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@over_systems("plain", "parcae")
@pytest.mark.covering
@pytest.mark.parametrize("target_modules", [["q_proj", "k_proj", "v_proj", "o_proj"], "all-linear"], ids=str)
@pytest.mark.some(1)
def test_lora_trains_saves_and_merges(system, target_modules, tmp_path):
    peft = pytest.importorskip("peft")
    ids = random_ids(4, 9, VOCABULARY)
    base = build(system, eos_token_id=None)
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    untrained = base(ids).logits.detach()
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=target_modules, task_type="CAUSAL_LM"))
    torch.testing.assert_close(model(input_ids=ids).logits, untrained)
    losses = train_on(model, ids)
    assert losses[-1] < 0.9 * losses[0]

    model.eval()
    with torch.no_grad():
        adapted = {depth: model(input_ids=ids, num_loops=depth).logits for depth in (1, 3, 4)}
    tokens = model.generate(input_ids=ids, num_loops=2, max_new_tokens=4, do_sample=False)
    model.save_pretrained(tmp_path)
    assert {name for name in os.listdir(tmp_path) if name.endswith((".py", ".json"))} == {"adapter_config.json"}

    loaded = peft.PeftModel.from_pretrained(build(system, eos_token_id=None), tmp_path).eval()
    merged = model.merge_and_unload()
    assert type(merged) is LoopedForCausalLM
    for depth, logits in adapted.items():
        with torch.no_grad():
            assert torch.equal(loaded(input_ids=ids, num_loops=depth).logits, logits)
            torch.testing.assert_close(merged(ids, num_loops=depth).logits, logits, rtol=1e-3, atol=1e-4)
    assert torch.equal(merged.generate(ids, num_loops=2, max_new_tokens=4, do_sample=False), tokens)
    touched = {name.rsplit(".", 1)[0].rsplit(".", 1)[-1] for name, w in merged.state_dict().items()
               if not torch.equal(w, before[name])}  # fmt: skip
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= touched
    assert "embed_tokens" not in touched


@over_systems("flt")
def test_prefix_tuning(system):
    """Its learned keys and values fill every slot of the cache."""
    peft = pytest.importorskip("peft")
    ids = random_ids(3, 6, VOCABULARY)
    base = build(system, eos_token_id=None)
    model = peft.get_peft_model(base, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    slots, width = base.config.num_hidden_layers, base.config.num_key_value_heads * base.config.head_dim
    assert model.prompt_encoder["default"].embedding.weight.shape == (3, 2 * slots * width)
    losses = train_on(model, ids)
    assert losses[-1] < losses[0]
    # every layer of every loop has a prefix of its own, and all of them are learned
    model(input_ids=ids, labels=ids).loss.backward()
    gradient = model.prompt_encoder["default"].embedding.weight.grad.view(3, 2 * slots, width)
    assert (gradient.abs().amax((0, 2)) > 0).all()

    model.eval()
    tokens = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    assert torch.equal(logits[:, -5:-1].argmax(-1), tokens[:, -4:])  # cached decoding sees the prefix as scoring does
    with pytest.raises(ValueError, match="use_cache=False does not go with prefix tuning"):
        model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, use_cache=False)
    if not base.config.shares_keys:
        with pytest.raises(ValueError, match="cache_sharing='last' does not go with prefix tuning"):
            model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, cache_sharing="last")


@pytest.mark.filterwarnings("ignore:Position ids")
@pytest.mark.parametrize("method", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_virtual_tokens_before_a_prompt(method):
    """Cached decoding sees them once, as scoring does."""
    peft = pytest.importorskip("peft")
    ids, settings = random_ids(3, 6, VOCABULARY), {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    model = peft.get_peft_model(build("flt", eos_token_id=None), getattr(peft, method)(**settings)).eval()
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    tokens = model.generate(**arguments)
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
    assert torch.equal(logits[:, -6:-1].argmax(-1), tokens[:, -5:])
    with pytest.raises(ValueError, match="virtual tokens, as prefix .*leave out .* and cache_dtype"):
        model.generate(**arguments, cache_dtype="int8")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("section", ["prelude", "core"])
def test_adapters_of_single_rows(section):
    """Right where rows keep their places, and refused where they do not."""
    peft = pytest.importorskip("peft")
    settings = {"task_type": "CAUSAL_LM", "init_lora_weights": False, "target_modules": rf".*{section}.*q_proj"}
    model = peft.get_peft_model(build("parcae", eos_token_id=None), peft.LoraConfig(**settings)).eval()
    model.add_adapter("two", peft.LoraConfig(**settings))
    ids, names, alone = random_ids(2, 6, VOCABULARY), ["default", "two"], []
    found = model(input_ids=ids, adapter_names=names, num_loops=2).logits
    for row, name in zip(ids, names):
        model.set_adapter(name)
        alone.append(model(input_ids=row[None], num_loops=2).logits)
    torch.testing.assert_close(found, torch.cat(alone))
    assert not torch.allclose(alone[0], model(input_ids=ids[:1], num_loops=2).logits, atol=1e-3)

    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "adapter_names": names}
    assert model.generate(**arguments).shape == (2, 9)
    for change in ({"draft_loops": 1}, {"exit_criterion": "latent_diff"}, {"cache_dtype": "int8"}):
        with pytest.raises(ValueError, match="not with adapters of single rows"):
            model.generate(**arguments, **change)
        clean(model)
    with pytest.raises(ValueError, match="adapters of single rows .* follow the places of rows in the batch"):
        model(input_ids=ids, adapter_names=names, num_loops=[1, 3])
    clean(model)
    for depth in ({}, {"num_loops": [1, 3]}):
        with pytest.raises(ValueError, match="adapters of single rows .* which generate_batch changes"):
            model.generate_batch(ids.tolist(), max_new_tokens=3, adapter_names=names, **depth)


def clean(model):
    """PEFT leaves its hooks where a call ends with an error."""
    for module in model.modules():
        module._forward_pre_hooks.clear()


def test_layers_with_deltas_of_loops_are_adapted_by_name():
    peft = pytest.importorskip("peft")
    ids = random_ids(2, 5, VOCABULARY)
    for targets in (None, ["q_proj", "down_proj"]):
        base = tiny_model(vocab_size=VOCABULARY, loop_lora_rank=2)
        model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets))
        model(input_ids=ids, labels=ids).loss.backward()
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert {name.split(".")[-4] for name in trained} == set(targets or ["q_proj", "v_proj"])


# Trainer


def trainer(folder, model, **arguments):
    arguments = {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 3e-3,
        "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "seed": 0, **arguments,
    }  # fmt: skip
    tokenizer = tiny_tokenizer()
    return Trainer(
        model, TrainingArguments(**arguments), train_dataset=alphabet(16), eval_dataset=alphabet(5, seed=1),
        data_collator=DataCollatorForSeq2Seq(tokenizer), processing_class=tokenizer,
    )  # fmt: skip


def test_label_smoothing_compares_with_the_next_token(tmp_path):
    model = build("plain").eval()
    run = trainer(tmp_path, model, label_smoothing_factor=0.2)
    ids = random_ids(2, 6, VOCABULARY)
    with torch.no_grad():
        loss = run.compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
        log_p = model(ids).logits[:, :-1].log_softmax(-1)
    wanted = -0.8 * log_p.gather(-1, ids[:, 1:, None])[..., 0] - 0.2 * log_p.mean(-1)
    torch.testing.assert_close(loss, wanted.mean())


def logged_losses(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_heads_return_no_states_of_loops():
    """For which their outputs have no room; the trunk returns them."""
    model, ids = tiny_model(LoopedForSequenceClassification, num_labels=2, pad_token_id=0), random_ids(1, 4)
    for name in ("output_loop_hidden_states", "output_loop_logits", "output_exit_probabilities"):
        with pytest.raises(ValueError, match=f"does not take {name}: its `model` returns the states of loops"):
            model(ids, **{name: True})
    with pytest.raises(ValueError, match="does not take exit_rule: "):
        model(ids, exit_rule=ExitRule("latent_diff", 1e9))
    assert model.model(ids, output_loop_hidden_states=True).loop_hidden_states


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize(
    ("task", "head"),
    [
        ("SEQ_CLS", LoopedForSequenceClassification),
        ("TOKEN_CLS", LoopedForTokenClassification),
        ("QUESTION_ANS", LoopedForQuestionAnswering),
    ],
)
def test_prefix_tuning_of_a_head(task, head):
    """The head reads states that have seen the prefix, as a cache that is passed to it."""
    peft = pytest.importorskip("peft")
    base, ids = tiny_model(head, num_labels=2, pad_token_id=0), random_ids(2, 5)
    model = peft.get_peft_model(base, peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=3)).eval()
    mask = torch.ones(2, 8, dtype=torch.long)
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=mask[:, 3:])
        wanted = base(input_ids=ids, attention_mask=mask, past_key_values=model.get_prompt(2))
        without = base(input_ids=ids)
    name = "start_logits" if task == "QUESTION_ANS" else "logits"
    assert torch.equal(found[name], wanted[name]) and not torch.equal(found[name], without[name])


def test_the_trainer_finds_our_labels():
    assert find_labels(LoopedForCausalLM) == ["labels"]
    assert find_labels(LoopedForSequenceClassification) == find_labels(LoopedForTokenClassification) == ["labels"]
    assert find_labels(LoopedForQuestionAnswering) == ["start_positions", "end_positions"]


@over_systems("ouro")
def test_trainer_learns_evaluates_and_saves(system, tmp_path):
    model = build(system)
    run = trainer(tmp_path, model, max_steps=25, learning_rate=1e-2)
    before = run.evaluate()["eval_loss"]
    run.train()
    losses = logged_losses(run)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert run.evaluate()["eval_loss"] < before

    predictions = run.predict(alphabet(5, seed=1))
    assert predictions.predictions.shape[::2] == (5, VOCABULARY)
    run.save_model()
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = random_ids(2, 6, VOCABULARY)
    assert torch.equal(opened(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize(
    "fields", [{}, {"loop_loss": "per_loop"}, {"preset": "ouro"}], ids=["terminal", "per_loop", "exit"]
)
def test_evaluation_is_the_mean_over_tokens(fields, tmp_path):
    model = tiny_model(vocab_size=VOCABULARY, pad_token_id=0, **fields)
    run = trainer(tmp_path, model, per_device_eval_batch_size=5)
    total, tokens = 0.0, 0
    for example in alphabet(5, seed=1):
        ids = torch.tensor([example["input_ids"]])
        with torch.no_grad():
            total += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
    assert run.evaluate()["eval_loss"] == pytest.approx(total / tokens, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    quick_and_slow([{}, {"loop_loss": "per_loop", "norm_penalty": 0.1}, {"preset": "ouro"}], {"preset": "ouro"}),
    ids=["terminal", "per_loop", "exit"],
)
def test_accumulated_gradients_are_those_of_the_whole_batch(fields, tmp_path):
    """The examples differ in length, so a mean of means would not be the mean over tokens."""
    runs = []
    for batch_size, accumulation in ((4, 1), (2, 2), (1, 4)):
        model = tiny_model(vocab_size=VOCABULARY, pad_token_id=0, **fields)
        arguments = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        run = trainer(tmp_path, model, optim="sgd", learning_rate=0.1, **arguments)
        run.train()
        runs.append((model, logged_losses(run)))
    (whole, losses), *others = runs
    for model, found in others:
        assert found == pytest.approx(losses, rel=1e-4)
        for a, b in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_training_resumes_bit_for_bit(tmp_path):
    dropouts = {"attention_dropout": 0.1, "residual_dropout": 0.1, "embedding_dropout": 0.1}
    model, resumed = (build("plain", **dropouts) for _ in range(2))
    run = trainer(tmp_path, model, save_strategy="steps", save_steps=2)
    run.train()
    again = trainer(tmp_path / "again", resumed, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged_losses(again) == logged_losses(run)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
    # a checkpoint is a folder like any other
    assert "AutoModelForCausalLM" in json.load(open(tmp_path / "checkpoint-2" / "config.json"))["auto_map"]


@over_systems("plain")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_trainer_with_gradient_checkpointing(system, tmp_path):
    model, checkpointed = build(system), build(system)
    run = trainer(tmp_path, model, optim="sgd")
    run.train()
    other = trainer(tmp_path, checkpointed, optim="sgd", gradient_checkpointing=True)
    other.train()
    assert checkpointed.is_gradient_checkpointing and not model.is_gradient_checkpointing
    assert logged_losses(other) == pytest.approx(logged_losses(run), rel=1e-5)
    for a, b in zip(model.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_(en|dis)able` is deprecated")
def test_checkpointing_runs_every_block_call_again():
    model, calls = build("plain", **SECTIONS).train(), []
    for block in [*model.model.prelude, *model.model.core, *model.model.coda]:
        block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable()
    ids = random_ids(2, 6, VOCABULARY)
    loss = model(ids, labels=ids, num_loops=4).loss
    assert len(calls) == 1 + 2 * 4 + 1
    loss.backward()
    assert len(calls) == 2 * (1 + 2 * 4 + 1)
    model.gradient_checkpointing_disable()
    model(ids, labels=ids, num_loops=4).loss.backward()
    assert len(calls) == 3 * (1 + 2 * 4 + 1)


@over_systems("plain", "parcae", "first_keys")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_(en|dis)able` is deprecated")
def test_reentrant_checkpointing_changes_no_gradient(system):
    """It differentiates what comes to a block by position only; value embeddings are learned too."""
    model, checkpointed = build(system).train(), build(system).train()
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    checkpointed.enable_input_require_grads()
    ids = random_ids(2, 6, VOCABULARY)
    for each in (model, checkpointed):
        each(ids, labels=ids).loss.backward()
    gradients = ({name: p.grad for name, p in each.named_parameters()} for each in (model, checkpointed))
    torch.testing.assert_close(*gradients)


# whose weights step, fields, arguments of the pass, whether reentrant checkpoints are refused
STEPS_WITHIN_BACKWARD = {
    "loops": ("core", {}, {}, True),
    "one_loop": ("core", {}, {"num_loops": 1}, False),
    "gradients_of_one_loop": ("core", {}, {"backprop_loops": 1}, False),
    "tied_layers": ("tied", {}, {"num_loops": 1}, True),
    "coda": ("coda", {}, {}, False),
    "coda_after_all": ("coda", {"loop_loss": "per_loop"}, {}, True),
    "lomo": ("core", {}, {}, True),
}


@pytest.mark.parametrize("reentrant", [False, True, "by a framework"])
@pytest.mark.parametrize("case", STEPS_WITHIN_BACKWARD)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_(en|dis)able` is deprecated")
def test_weights_step_once_within_backward(case, reentrant):
    """So do LOMO and the optimizers of transformers that are called layerwise. Of a block that has several reentrant
    checkpoints they would change the weights between one and the next."""
    section, fields, how, refused = STEPS_WITHIN_BACKWARD[case]
    model, ids, steps = build("plain", **SECTIONS, **fields).train(), random_ids(2, 6, VOCABULARY), Counter()
    if section == "tied":
        model.model.core[1] = model.model.core[0]
    if reentrant == "by a framework":
        model._set_gradient_checkpointing(True, lambda run, *args: checkpoint(run, *args, use_reentrant=True))
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for weight in getattr(model.model, "coda" if section == "coda" else "core").parameters():
        step = partial(lambda weight, _: steps.update([weight]), weight)
        if case == "lomo":
            step.__module__ = "lomo_optim.lomo"
            weight.register_hook(step)
        else:
            weight.register_post_accumulate_grad_hook(step)
    if refused and reentrant:
        with pytest.raises(ValueError, match="gradient_checkpointing_kwargs=.*False"):
            model(ids, labels=ids, **how)
    else:
        model(ids, labels=ids, **how).loss.backward()
        assert steps and set(steps.values()) == {1}


def test_what_peft_takes_of_layers():
    peft = pytest.importorskip("peft")

    def adapted(**fields) -> set[str]:
        sizes = {"num_prelude_layers": 1, "num_core_layers": 2, "num_coda_layers": 1}
        config = peft.LoraConfig(target_modules=["q_proj"], **fields)
        model = peft.get_peft_model(build("plain", **sizes), config)
        names = [name for name, _ in model.named_parameters() if "lora_A" in name]
        return {name.removeprefix("base_model.model.model.").split(".self_attn")[0] for name in names}

    assert adapted(layers_to_transform=[0]) == {"prelude.0", "core.0", "coda.0"}
    assert adapted(layers_to_transform=[1]) == {"core.1"}
    assert adapted(layers_to_transform=[0], layers_pattern="core") == {"core.0"}
    with pytest.raises(ValueError, match="Could not locate the layers"):
        adapted(layer_replication=[[0, 2], [1, 3]])
    prompts = peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=2, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="Unsupported model type for adaption prompt: 'looped'"):
        peft.get_peft_model(build("plain"), prompts)


# TRL


@pytest.mark.covering
@pytest.mark.parametrize("system", ["plain", "ouro"])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.filterwarnings("ignore")  # of TRL about its own defaults
@pytest.mark.some(1)
def test_supervised_fine_tuning_with_trl(system, packing, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    tokenizer = tiny_tokenizer()
    texts = datasets.Dataset.from_dict({"text": [tokenizer.decode(run["input_ids"]) for run in alphabet(24)]})
    arguments = trl.SFTConfig(
        str(tmp_path), max_steps=12, per_device_train_batch_size=4, learning_rate=1e-2, lr_scheduler_type="constant",
        packing=packing, max_length=16, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True,
        bf16=False, disable_tqdm=True,
    )  # fmt: skip
    run = trl.SFTTrainer(
        build(system), arguments, train_dataset=texts, eval_dataset=texts.select(range(4)), processing_class=tokenizer
    )
    before = run.evaluate()["eval_loss"]
    run.train()
    losses = logged_losses(run)
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert run.evaluate()["eval_loss"] < 0.8 * before


# accelerate


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=str)
def test_device_map(device_map, tmp_path):
    model, ids = build("parcae", eos_token_id=None), random_ids(2, 6, VOCABULARY)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@over_systems("parcae", "ouro")
def test_weights_on_disk(system, tmp_path):
    """A layer's weights are read again at every loop."""
    model, ids = build(system, eos_token_id=None), random_ids(2, 6, VOCABULARY)
    model.save_pretrained(tmp_path / "model")
    children = [f"model.{name}" for name, _ in model.model.named_children()] + ["lm_head"]
    children += ["exit_gate"] if model.exit_gate is not None else []
    resident = ("model.embed_tokens", "lm_head")  # may be one tensor
    device_map = {name: "cpu" if name in resident else "disk" for name in children}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=str(tmp_path / "offload")
    )
    assert loaded.model.core[0].mlp.up_proj.weight.device.type == "meta"
    with torch.no_grad():
        for num_loops in (3, [1, 4]):
            assert torch.equal(loaded(ids, num_loops=num_loops).logits, model(ids, num_loops=num_loops).logits)
    arguments = {"num_loops": 2, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(loaded.generate(ids, **arguments), model.generate(ids, **arguments))


def test_an_offloaded_embedding(tmp_path):
    model = build("plain", state_init="normal", injection="concat")
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map={"": "disk"}, offload_folder=str(tmp_path / "offload")
    )
    assert loaded.device.type == "meta"
    arguments = {"max_new_tokens": 4, "do_sample": False}
    ids = random_ids(2, 5, VOCABULARY)
    seeded = [each.generate(ids, state_seed=1, **arguments) for each in (loaded, model)]
    assert torch.equal(*seeded)
    answers = [each.generate_batch(ids.tolist(), num_loops=2, **arguments) for each in (loaded, model)]
    assert len({str([output.generated_tokens for output in of_model.values()]) for of_model in answers}) == 1
    assert all(output.generated_tokens for output in answers[0].values())
    with pytest.raises(ValueError, match="tensors are offloaded .*embed_tokens.*save_pretrained"):
        save_public(loaded, tmp_path / "public", "huginn")


def test_blocks_are_not_split_over_devices():
    with accelerate.init_empty_weights():
        model = build("plain", **SECTIONS)
    block = sum(p.numel() * 4 for p in model.model.core[0].parameters())
    device_map = accelerate.infer_auto_device_map(
        model, max_memory={"cpu": 3 * block, "disk": 10**9}, no_split_module_classes=model._no_split_modules
    )
    assert {"cpu", "disk"} == set(device_map.values())
    assert not any("self_attn" in name or "mlp" in name for name in device_map)


@over_systems("flt")
def test_accelerate_prepares_and_trains(system):
    model, plain = build(system), build(system)
    ids = random_ids(4, 8, VOCABULARY)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        accelerator.backward(prepared(input_ids=ids, labels=ids).loss)
        plain(ids, labels=ids).loss.backward()
        for step in (optimizer, reference):
            step.step()
            step.zero_grad()
    unwrapped = accelerator.unwrap_model(prepared)
    assert all(torch.equal(a, b) for a, b in zip(unwrapped.parameters(), plain.parameters(), strict=True))
