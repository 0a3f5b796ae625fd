"""A model asked for K loops gives the same logits whichever way K was said; the depth of training is another thing.

What it must be is `forward(num_loops=K)` of the model that was saved, whose own correctness other tests show.
"""

import copy
import json

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoConfig, AutoModelForCausalLM

from looped_eval.harness.looped_lm import LoopedLM
from modeling_looped import LoopedConfig, LoopedForCausalLM
from modeling_looped.readouts import has_reached

from .helpers import quick_and_slow, random_ids, tiny_config, tiny_model, tiny_tokenizer


K, N = 2, 3
IDS = random_ids(2, 7)
# what reads the depth of training, and one of each other kind of loop
SYSTEMS = {
    **{preset: {"preset": preset} for preset in LoopedConfig.preset_names()},
    **{rule: {"residual_scaling": rule} for rule in ("sqrt", "linear", "factored")},
    **{readout: {"readout_norm": readout} for readout in ("final_raw", "final_alpha", "alpha", "taper")},
    "run": {"residual_scaling": "linear", "residual_depth": "run"},
    "gate": {"exit_gate": "raw", "loop_loss": "exit_weighted", "loop_damping": True, "residual_scaling": "sqrt"},
    "sections": {"residual_scaling": "linear", "num_prelude_layers": 1, "num_coda_layers": 1},
    "tied": {"residual_scaling": "linear", "tie_word_embeddings": True},
    "windows": {"residual_scaling": "sqrt", "window_pattern": "SL", "sliding_window": 3},
}
READ_THE_TRAINED_DEPTH = (
    "residual_scaling", "readout_per_loop_final_only", "readout_1b4_raw", "sqrt", "linear", "factored", "final_raw",
    "final_alpha", "gate", "sections", "tied", "windows",
)  # fmt: skip


def model_of(system: str):
    return tiny_model(**{**SYSTEMS[system], "pad_token_id": 0, "eos_token_id": None})


@torch.no_grad()
def logits_of(model, **arguments):
    return model(IDS, **arguments).logits


def edit_config(folder, **fields):
    file = folder / "config.json"
    content = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def overridden_by_an_engine(folder):
    config = AutoConfig.from_pretrained(folder)
    config.update({"num_loops": K})
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("system", quick_and_slow(SYSTEMS, "linear", "final_alpha", "windows", "parcae"))
@pytest.mark.some(2)
def test_one_meaning_of_num_loops(system, tmp_path):
    model = model_of(system)
    wanted, full = logits_of(model, num_loops=K), logits_of(model)
    another = LoopedForCausalLM(tiny_config(**{**SYSTEMS[system], "num_loops": K}))
    another.load_state_dict(model.state_dict())
    is_read = not torch.equal(logits_of(another.eval()), wanted)
    assert is_read == (system in READ_THE_TRAINED_DEPTH)  # else this test could not fail

    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["trained_num_loops"] == N
    live = copy.deepcopy(model)
    live.config.num_loops = K
    live.save_pretrained(tmp_path / "live")
    ways = {
        "from_pretrained": AutoModelForCausalLM.from_pretrained(tmp_path, num_loops=K),
        "a config that was loaded": LoopedForCausalLM.from_pretrained(
            tmp_path, config=AutoConfig.from_pretrained(tmp_path, num_loops=K)
        ),
        "the config of a model": live,
        "saved at that depth": LoopedForCausalLM.from_pretrained(tmp_path / "live"),
        "an engine": overridden_by_an_engine(tmp_path),
    }
    ways["an engine"].load_state_dict(model.state_dict())
    (tmp_path / "tokenizer").mkdir()
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    stock = HFLM(str(tmp_path), tokenizer=str(tmp_path / "tokenizer"), num_loops=K, device="cpu", dtype="float32")
    ways["stock lm_eval"] = stock.model
    for way, found in ways.items():
        assert found.trained_depth == found.config.trained_depth == N or found is live
        assert torch.equal(logits_of(found.eval()), wanted), way
        assert torch.equal(logits_of(found, num_loops=N), full), way
    edit_config(tmp_path, num_loops=K)
    assert torch.equal(logits_of(LoopedForCausalLM.from_pretrained(tmp_path)), wanted)

    ours = LoopedLM(str(tmp_path), num_loops=K, tokenizer=str(tmp_path / "tokenizer"), device="cpu", dtype="float32")
    requests = [(None, row[:3], row[3:]) for row in IDS.tolist()]
    scored = stock._loglikelihood_tokens(requests, disable_tqdm=True)[0][0]
    assert ours.score_tokens(requests, disable_tqdm=True)[0, 0, 0].item() == pytest.approx(scored, abs=1e-4)

    arguments = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    by_argument = model.generate(IDS, num_loops=K, **arguments)
    by_config = ways["from_pretrained"].generate(IDS, **arguments)
    assert torch.equal(by_argument.sequences, by_config.sequences)
    torch.testing.assert_close(torch.stack(by_argument.logits), torch.stack(by_config.logits), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(by_argument.logits[0], wanted[:, -1], rtol=1e-4, atol=1e-4)


def test_a_folder_of_before_opens_as_it_did(tmp_path):
    model = model_of("linear")
    model.save_pretrained(tmp_path)
    edit_config(tmp_path, trained_num_loops=None)
    assert "trained_num_loops" not in (tmp_path / "config.json").read_text()
    for asked, depth in (({}, N), ({"num_loops": K}, K)):
        loaded = LoopedForCausalLM.from_pretrained(tmp_path, **asked)
        assert loaded.trained_depth == N and torch.equal(logits_of(loaded), logits_of(model, num_loops=depth))


def test_a_config_that_no_model_was_saved_with_trains_at_its_depth():
    config = tiny_config(residual_scaling="linear")
    models = []
    for depth in (2, 5):
        config.num_loops = depth
        models.append(LoopedForCausalLM(config))
    assert config.trained_num_loops is None and config.to_dict()["trained_num_loops"] == 5
    assert [model.trained_depth for model in models] == [model.model.trained_depth for model in models] == [2, 5]
    assert config.residual_factor(config.trained_depth) == 1 / 5


def test_saving_writes_the_depth_of_training_and_leaves_the_config(tmp_path):
    model = model_of("linear")
    model.config.num_loops = 7
    for part in (model, model.model):
        part.save_pretrained(tmp_path)
        loaded = AutoConfig.from_pretrained(tmp_path)
        assert (loaded.num_loops, loaded.trained_num_loops) == (7, N)
        assert model.config.trained_num_loops is None


def test_a_depth_of_training_is_checked():
    for value, part in ((0, "at least 1"), ("3", "'3'"), (2.5, "2.5")):
        with pytest.raises(ValueError, match="trained_num_loops") as caught:
            LoopedForCausalLM(tiny_config(trained_num_loops=value))
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="num_hidden_layers=5"):
        LoopedConfig(num_loops=2, trained_num_loops=4, num_core_layers=2, num_hidden_layers=5)


def test_has_reached_reads_the_trained_depth():
    model = tiny_model(readout_norm="final_only")
    model.config.num_loops = 1
    assert not has_reached(model.model.trained_depth, 2, "cpu") and has_reached(model.model.trained_depth, 3, "cpu")
