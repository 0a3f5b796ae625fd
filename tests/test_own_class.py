"""A class of the user's own: its folder opens by its own code, and recipes train it."""

import json
import shutil
import sys
from itertools import count
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, modeling_utils

from looped_eval.budget.command import main as budget
from looped_eval.common.run_folder import open_runs
from looped_eval.halting.command import check as check_halting
from looped_eval.halting.options import parse as parse_halting
from looped_eval.harness.looped_lm import LoopedLM
from looped_eval.show_loops.command import main as show
from looped_recipes.common.metrics import read_metrics
from looped_recipes.engine.beginning import build_model
from looped_recipes.engine.checkpoint import CheckpointError
from looped_recipes.engine.resume import checksum_of_code
from looped_recipes.engine.training import Pretraining
from looped_recipes.export import main as export
from looped_recipes.pretrain import main
from looped_recipes.settings.model_file import MODULES, class_in_file
from looped_recipes.settings.recipe import RecipeError, load_recipe
from looped_recipes.settings.run_checks import check_run
from looped_recipes.sweep import run_sweep
from modeling_looped import SAMPLERS, LoopedConfig, LoopedForCausalLM
from modeling_looped.exit_criteria import CRITERIA
from modeling_looped.formats import save_public
from modeling_looped.loading import LoopedCheckpointError

from .helpers import TINY, random_ids, tiny_config, tiny_tokenizer
from .helpers_pretrain import SMOKE, logged_losses, smoke_settings


CODE = """
import torch
from torch import nn
from transformers import initialization as init

from modeling_looped import LoopedForCausalLM
from modeling_looped.injection import Injection


class Gated(Injection):
    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Parameter(torch.empty(config.hidden_size))

    def init_parameters(self):
        init.constant_(self.gate, 0.5)

    def forward(self, state, embedded):
        return state + torch.sigmoid(self.gate) * embedded


class GatedForCausalLM(LoopedForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.injection = Gated(config)
        self.post_init()
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Return a function that writes a file of code, whose module is forgotten after the test."""

    def write(code: str, name: str = "own_gated"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
        path = tmp_path / f"{name}.py"
        MODULES.pop(path.resolve(), None)
        path.write_text(code)
        return str(path)

    return write


def test_its_folder_opens_by_the_code_in_it(written, tmp_path):
    own = class_in_file(written(CODE))
    model = own(tiny_config(injection="add")).eval()
    torch.nn.init.normal_(model.model.injection.gate)
    model.save_pretrained(tmp_path / "saved")
    ids = random_ids(2, 7)
    expected = model(ids).logits
    for opener in (LoopedForCausalLM, AutoModelForCausalLM):
        with pytest.raises(
            LoopedCheckpointError, match="GatedForCausalLM, a class that is not .* trust_remote_code=True"
        ):
            opener.from_pretrained(tmp_path / "saved")
        opened = opener.from_pretrained(tmp_path / "saved", trust_remote_code=True).eval()
        assert type(opened).__name__ == "GatedForCausalLM" and isinstance(opened, LoopedForCausalLM)
        assert torch.equal(opened(ids).logits, expected)
        opened.save_pretrained(tmp_path / opener.__name__)  # with its code again
        again = opener.from_pretrained(tmp_path / opener.__name__, trust_remote_code=True).eval()
        assert torch.equal(again(ids).logits, expected)


def test_its_trunk_alone_does_not_open_and_the_class_that_does_is_named(written, tmp_path):
    class_in_file(written(CODE))(tiny_config(injection="add")).save_pretrained(tmp_path / "saved")
    with pytest.raises(LoopedCheckpointError, match="no LoopedModel of .*: open it by AutoModelForCausalLM or that"):
        AutoModel.from_pretrained(tmp_path / "saved", trust_remote_code=True)


def test_trusted_code_of_our_own_class_changes_nothing(tmp_path):
    model = LoopedForCausalLM(tiny_config())
    model.save_pretrained(tmp_path)
    opened = LoopedForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(opened) is LoopedForCausalLM


def test_tensors_of_another_class_are_not_said_to_be_of_no_account(written, tmp_path, monkeypatch):
    class_in_file(written(CODE))(tiny_config(injection="add")).save_pretrained(tmp_path / "saved")
    told = []
    monkeypatch.setattr(modeling_utils.logger, "warning", lambda text, *_: told.append(text))
    with pytest.raises(LoopedCheckpointError, match="saved by GatedForCausalLM"):
        LoopedForCausalLM.from_pretrained(tmp_path / "saved")
    assert not told
    LoopedForCausalLM.from_pretrained(tmp_path / "saved", strict=False)
    assert "model.injection.gate" in "".join(told)  # transformers' report


def test_a_class_in_a_copy_of_the_package_opens_what_it_saved(tmp_path):
    """As a file beside the weights defines one, with `from .causal_lm import LoopedForCausalLM`."""
    own = type("Own", (LoopedForCausalLM,), {"__module__": "modeling_looped.own"})
    own(tiny_config()).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Own"]
    assert type(own.from_pretrained(tmp_path)) is own
    with pytest.raises(LoopedCheckpointError, match="saved by Own, .*LoopedForCausalLM may compute something else"):
        LoopedForCausalLM.from_pretrained(tmp_path)


def test_code_of_another_family_is_refused(written, tmp_path):
    own = class_in_file(written(CODE))
    own(tiny_config(injection="add")).save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "own_gated.py").write_text("class GatedForCausalLM:\n    pass\n")
    message = "defines GatedForCausalLM, which is no LoopedForCausalLM .* process that does not import modeling_looped"
    with pytest.raises(LoopedCheckpointError, match=message):
        LoopedForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)


OWN_CONFIG = "\nclass Config(LoopedConfig):\n    pass\nclass Own(LoopedForCausalLM):\n    config_class = Config\n"


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        ("x = 1", "own_none", "must define one subclass of LoopedForCausalLM, but it defines none"),
        (CODE + "class More(GatedForCausalLM):\n    pass", "own_two", "defines GatedForCausalLM, More"),
        ("import no_such_part", "own_parts", "imports what is not found .*no_such_part.* no file beside it"),
        ("from .parts import x", "own_relative", r"imports \.parts: .* no file beside it"),
        ("try:\n    from .parts import x\nexcept ImportError:\n    x = 1", "own_optional", r"imports \.parts: "),
        ("from modeling_looped import LoopedConfig, LoopedForCausalLM" + OWN_CONFIG, "own_config", "config_class"),
    ],
)
def test_a_file_that_does_not_serve_is_refused(code, name, message, written):
    with pytest.raises(RecipeError, match=message):
        class_in_file(written(code, name))


def test_a_neighbour_is_refused_unless_other_processes_find_it_too(written, tmp_path, monkeypatch):
    written("", "own_neighbour")
    path = written(CODE + "import json, own_neighbour\n")
    monkeypatch.syspath_prepend(tmp_path)  # as the current folder is, of a process started there by `python -m`
    with pytest.raises(RecipeError, match="imports own_neighbour: .* no file beside it"):
        class_in_file(path)
    monkeypatch.syspath_prepend("")  # now a place that PYTHONPATH names, or where packages are installed
    assert class_in_file(path).__name__ == "GatedForCausalLM"


def test_a_file_that_is_not_there_or_hides_a_module_is_refused(written, tmp_path):
    with pytest.raises(RecipeError, match="no_such.py' is no Python file"):
        class_in_file(str(tmp_path / "no_such.py"))
    (tmp_path / "json.py").write_text(CODE)
    with pytest.raises(RecipeError, match=f"has the name of a module, {json.__file__}: rename it"):
        class_in_file(str(tmp_path / "json.py"))
    (tmp_path / "antigravity.py").write_text(CODE)  # a module that nothing has imported
    with pytest.raises(RecipeError, match="has the name of a module, .*antigravity.py: rename it"):
        class_in_file(str(tmp_path / "antigravity.py"))


def test_another_name_of_the_class_is_no_second_class(written):
    assert class_in_file(written(CODE + "Alias = GatedForCausalLM\n")).__name__ == "GatedForCausalLM"


TIED = CODE.replace("self.post_init()", "self.model.core[1] = self.model.core[0]\n        self.post_init()")


def test_a_recipe_trains_it_and_goes_on_bit_for_bit(written, training_text, tmp_path, capsys):
    path = written(TIED)

    def train(name: str, *more: str):
        own = [f"training.model_file={path}", "training.steps=2"]
        arguments = smoke_settings(training_text, tmp_path / name, *own, *more)
        main([str(SMOKE / "lt.yaml"), "model.injection=add", *arguments])
        return tmp_path / name

    whole = train("whole")
    weights = load_file(whole / "final" / "model.safetensors")
    gate = weights["model.injection.gate"]
    assert not torch.equal(gate, torch.full_like(gate, 0.5))  # it has learnt
    assert f"looped halting {whole} --trust-remote-code" in capsys.readouterr().out
    card = (whole / "final" / "README.md").read_text()
    assert "`own_gated.py`, which needs modeling_looped installed: by `pip install .` in a clone" in card

    parts = train("parts", "training.stop_after=1")
    train("parts")
    resumed = load_file(parts / "final" / "model.safetensors")
    assert resumed.keys() == weights.keys() and all(torch.equal(resumed[name], weights[name]) for name in weights)

    written(TIED)  # the same again, not imported yet
    with pytest.raises(CheckpointError, match="own_gated.py', whose code would be run here: .*--trust-remote-code"):
        export([str(whole), str(tmp_path / "exported")])
    assert Path(path) not in MODULES and not (tmp_path / "exported").exists()
    export([str(whole), str(tmp_path / "exported"), "--trust-remote-code"])
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", trust_remote_code=True)
    assert opened.model.core[1] is opened.model.core[0]
    assert not any(name.startswith("model.core.1") for name in weights)

    asked = [str(whole / "final"), "a", "--max-new-tokens", "2", "--output", str(tmp_path / "page.html")]
    with pytest.raises(LoopedCheckpointError):
        show(asked)
    show([*asked, "--trust-remote-code"])
    assert (tmp_path / "page.html").is_file()
    (tmp_path / "text.jsonl").write_text('{"text": "a b"}\n')
    asked = [
        str(whole / "final"),
        "--text",
        str(tmp_path / "text.jsonl"),
        "--num-loops",
        "1",
        "--output",
        str(tmp_path),
    ]
    with pytest.raises(LoopedCheckpointError):
        budget(asked)
    budget([*asked, "--trust-remote-code"])
    assert (tmp_path / "budget.json").is_file()
    said = capsys.readouterr().out
    assert f"looped chat {tmp_path / 'exported'} --trust-remote-code" in said
    assert f"looped halting {whole / 'final'} --trust-remote-code" in said


HEADER = "class GatedForCausalLM(LoopedForCausalLM):\n"
ADDING = (
    CODE.replace("        self.gate =", "        self.bias = config.gate_bias\n        self.gate =")
    .replace("0.5)", "self.bias)")
    .replace(HEADER, HEADER + "    added_fields = {'gate_bias': 0.5, 'gate_name': 'a', 'gate_list': None}\n\n")
)


def test_fields_that_a_class_adds_to_the_config(written, tmp_path, logged):
    own = class_in_file(written(ADDING))
    plain, other = own(tiny_config(injection="add")), tiny_config(injection="add")
    other.gate_bias = -2.0
    assert plain.config.gate_bias == 0.5 and (plain.model.injection.gate == 0.5).all()
    model = own(other)
    assert (model.model.injection.gate == -2).all() and model.config.gate_name == "a"
    model.save_pretrained(tmp_path / "saved")
    transformers.utils.logging.enable_propagation()
    try:
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    finally:
        transformers.utils.logging.disable_propagation()
    assert opened.config.gate_bias == -2 and not [record for record in logged if "gate" in record.getMessage()]
    assert own.from_pretrained(tmp_path / "saved", gate_bias=4.0).config.gate_bias == 4
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))
    dense = own.from_dense(llama, injection="add", gate_bias=3.0)
    assert dense.config.gate_bias == 3 and (dense.model.injection.gate == 3).all()


def test_fields_that_mean_something_already_cannot_be_added():
    for name in ("temperature", "dropout", "loop_loss", "shares_keys", "to_dict", "num_steps"):
        with pytest.raises(ValueError, match=f"Own.added_fields has '{name}', which already means something"):
            type("Own", (LoopedForCausalLM,), {"added_fields": {name: 0.5}})


def test_added_fields_are_inherited_and_each_model_has_its_own(logged):
    first = type("First", (LoopedForCausalLM,), {"added_fields": {"gate_sizes": [1]}})
    second = type("Second", (first,), {"added_fields": {"gate_bias": 0.5}})
    model, other = second(tiny_config()), second(tiny_config())
    model.config.gate_sizes.append(5)
    assert other.config.gate_sizes == [1] and other.config.gate_bias == 0.5
    assert not hasattr(LoopedForCausalLM(tiny_config()).config, "gate_bias")
    transformers.utils.logging.enable_propagation()
    try:
        LoopedConfig.from_dict(model.config.to_dict())  # as a run that goes on reads it
    finally:
        transformers.utils.logging.disable_propagation()
    assert not [record for record in logged if "gate" in record.getMessage()]


def test_a_recipe_sets_them(written, training_text, tmp_path):
    recipe = [str(SMOKE / "lt.yaml"), "model.injection=add", f"training.model_file={written(ADDING)}"]

    def train(name, *more):
        main([*recipe, *smoke_settings(training_text, tmp_path / name), "training.steps=2", *more])
        return tmp_path / name

    first = train("first", "model.gate_bias=2")
    saved = json.loads((first / "final" / "config.json").read_text())
    assert saved["gate_bias"] == 2 and saved["gate_name"] == "a"
    train("first", "model.gate_bias=2", "training.steps=3")
    with pytest.raises(CheckpointError, match="model.gate_bias was 2.*, is 4"):
        train("first", "model.gate_bias=4", "training.steps=4")
    start = f"training.initialize_from={first / 'final'}"
    for name, given, wanted in (("same", (), 2), ("other", ("model.gate_bias=-1.5",), -1.5)):
        folder = train(name, start, *given)
        assert json.loads((folder / "final" / "config.json").read_text())["gate_bias"] == wanted


def test_a_sweep_goes_over_them(written, training_text, tmp_path):
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        f"recipe: {SMOKE / 'lt.yaml'}\nset: {{model.injection: add}}\n"
        "grid: {model.gate_bias: [0.5, 2.0], model.num_loops: [1, 2]}\n"
        "plot: {x: model.gate_bias, curve: model.num_loops}\n"
    )
    own = f"training.model_file={written(ADDING)}"
    run_sweep(str(sweep), [*smoke_settings(training_text, tmp_path / "runs"), "training.steps=1", own], None)
    results = [json.loads(line) for line in (tmp_path / "runs" / "results.jsonl").read_text().splitlines()]
    assert sorted(result["model.gate_bias"] for result in results) == [0.5, 0.5, 2, 2]
    assert "model.gate_bias" in next((tmp_path / "runs").glob("*.svg")).read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.gate_bais=2"], "unknown key in model: 'gate_bais'; did you mean 'gate_bias'"),
        (["model.gate_bias=x"], "gate_bias='x' must be of the type float, as its default 0.5 in GatedForCausalLM"),
        (["model.gate_name=3"], "gate_name=3 must be of the type str"),
        (["model.gate_bias=1e400"], "model.gate_bias must be a number of at most 1e.09"),
        (["model.num_steps=3"], "did you mean `num_loops`"),
        (["depth.sampler=posson"], "depth.sampler must be one of fixed, poisson, .*, got 'posson'"),
    ],
)
def test_what_neither_the_config_nor_the_class_has_is_refused(settings, message, written, training_text, tmp_path):
    own = f"training.model_file={written(ADDING)}"
    with pytest.raises(RecipeError, match=message):
        main([str(SMOKE / "lt.yaml"), *smoke_settings(training_text, tmp_path / "run"), own, *settings])
    assert not (tmp_path / "run").exists()


SETS_OF_LOOPS = """
import torch
from torch import nn
from transformers import initialization as init

from modeling_looped import LoopedForCausalLM


class Gain(nn.Module):
    is_by_loop = True

    def __init__(self, mlp, config):
        super().__init__()
        self.mlp, self.gain = mlp, nn.Parameter(torch.empty(config.num_loop_sets, config.hidden_size))

    def init_parameters(self):
        init.ones_(self.gain)

    def forward(self, x, loop_set):
        gain = self.gain[loop_set]
        return self.mlp(x, None) * (gain if gain.ndim == 1 else gain.unsqueeze(1))


class GainForCausalLM(LoopedForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.num_loop_sets = config.num_loop_sets
        for block in self.model.core:
            block.mlp = Gain(block.mlp, config)
        self.post_init()
"""


def test_a_recipe_says_how_many_sets_of_loops_it_has(written, training_text, tmp_path):
    settings = [*smoke_settings(training_text, tmp_path / "run"), "model.num_loop_parameters=2"]
    with pytest.raises(RecipeError, match="num_loop_parameters=2 would have no effect without a loop_lora_rank"):
        check_run(load_recipe(SMOKE / "lt.yaml", settings))
    recipe = load_recipe(SMOKE / "lt.yaml", [*settings, f"training.model_file={written(SETS_OF_LOOPS, 'own_gain')}"])
    model = recipe.model_class(check_run(recipe)).eval()
    plain, ids = LoopedForCausalLM(model.config).eval(), random_ids(2, 7)
    weights = {name.replace("mlp.mlp", "mlp"): weight for name, weight in model.state_dict().items()}
    plain.load_state_dict({name: weight for name, weight in weights.items() if "gain" not in name})
    for ours, theirs in zip(model.model.core, plain.model.core):
        torch.nn.init.zeros_(ours.mlp.gain[1])
        calls = count()
        theirs.mlp.register_forward_hook(lambda *call, calls=calls: call[-1] * (next(calls) == 0))
    # of two sets the second is that of all loops but the first
    assert model.model.core[0].mlp.gain.shape == (2, model.config.hidden_size)
    torch.testing.assert_close(model(ids[1:], num_loops=4).logits, plain(ids[1:], num_loops=4).logits)
    found = model(ids, num_loops=[1, 4]).logits
    torch.testing.assert_close(found[1:], model(ids[1:], num_loops=4).logits)


def test_a_sampler_of_depths_of_its_own(written, training_text, tmp_path):
    adding = "\nfrom modeling_looped import SAMPLERS\nSAMPLERS['always_two'] = lambda mean, least, generator: 2\n"
    path = written(CODE + adding)
    settings = [*smoke_settings(training_text, tmp_path / "run"), "training.steps=2", "logging.every=1"]
    try:
        own = [f"training.model_file={path}", "model.injection=add", "depth.sampler=always_two", "depth.mean=4"]
        main([str(SMOKE / "lt.yaml"), *settings, *own])
    finally:
        SAMPLERS.pop("always_two", None)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["loops"] for record in records if "loops" in record] == [2, 2]
    (run,) = open_runs([tmp_path / "run"])
    assert run.operations.mean_depth == 4  # its file is not imported to read it


MEASURES = """
from torch.nn.functional import cross_entropy

from modeling_looped import LoopedForCausalLM


class MeasuresForCausalLM(LoopedForCausalLM):
    calls, seen = 0, []

    def auxiliary_loss(self, outputs, labels):
        if self.training:
            logits = self.logits(outputs.last_hidden_state).detach()
            self.seen.append(cross_entropy(logits.flatten(0, 1), labels.flatten()))

    def training_metrics(self):
        self.calls += 1
        mean = sum(self.seen[-2:]) / 2
        return {"loss": mean, "calls": self.calls, "nan": float("nan"), "tensor": mean.new_tensor([float("inf")])}
"""


def test_a_run_logs_what_the_class_measures(written, training_text, tmp_path):
    own = f"training.model_file={written(MEASURES, 'own_measures')}"
    every = ["logging.every=4", "logging.monitor_every=2", "training.save_every=6", "evaluation.every=6"]
    main([str(SMOKE / "lt.yaml"), *smoke_settings(training_text, tmp_path, own, *every)])
    logged = [record for record in read_metrics(tmp_path / "metrics.jsonl") if "loss" in record]
    assert [(record["step"], record["own/calls"]) for record in logged] == [(0, 1), (2, 2), (3, 3), (4, 4), (5, 5)]
    for record in logged:
        assert record["own/loss"] == pytest.approx(record["loss"], rel=1e-4)  # of both micro-batches of the step
        assert {name for name in record if name.startswith("own/")} == {"own/loss", "own/calls"}


DROPS = """
from torch import nn

from modeling_looped import LoopedForCausalLM


class DropsForCausalLM(LoopedForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.core[0].mlp = Drops(self.model.core[0].mlp)
        self.post_init()


class Drops(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp, self.dropout = mlp, nn.Dropout(0.2)

    def forward(self, x, loop_set):
        return self.dropout(self.mlp(x, loop_set))
"""


def test_what_a_class_draws_at_random_is_the_same_after_a_resume(written, training_text, tmp_path):
    own = f"training.model_file={written(DROPS, 'own_drops')}"
    for folder, stops in (("whole", [None]), ("stopped", [2, None])):
        for stop in stops:
            more = [own] if stop is None else [own, f"training.stop_after={stop}"]
            main([str(SMOKE / "lt.yaml"), *smoke_settings(training_text, tmp_path / folder, *more)])
    assert logged_losses(tmp_path / "whole") == logged_losses(tmp_path / "stopped")


EMBEDS = """
from torch import nn

from modeling_looped import LoopedForCausalLM


class EmbedsForCausalLM(LoopedForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = nn.Sequential(nn.Embedding(config.vocab_size, 8), nn.Linear(8, config.hidden_size))
        self.post_init()
"""


def test_a_run_begins_with_a_model_whose_embedding_is_no_table(written, tmp_path):
    path, saved = written(EMBEDS, "own_embeds"), tmp_path / "saved"
    class_in_file(path)(tiny_config(max_position_embeddings=64)).save_pretrained(saved)
    (tmp_path / "next.yaml").write_text("training: {steps: 5}\ndata: {sequence_length: 32}")
    start = [f"training.model_file={path}", f"training.initialize_from={saved}"]
    model = build_model(load_recipe(tmp_path / "next.yaml", start), tiny_tokenizer())
    assert len(model.get_input_embeddings()) == 2


CRITERION = """
from modeling_looped import LoopedForCausalLM
from modeling_looped.exit_criteria import CRITERIA, Criterion

CRITERIA["own_mean"] = Criterion(lambda state, memory: (state.mean(-1), {}), "state", True, -1e9, least=-float("inf"))


class MeanForCausalLM(LoopedForCausalLM):
    pass
"""


@pytest.mark.parametrize("command", ["halting", "show", "eval"])
def test_commands_know_the_criterion_that_its_file_registers(command, written, tmp_path, monkeypatch):
    monkeypatch.setitem(CRITERIA, "own_mean", None)  # forgotten after the test
    folder = tmp_path / command  # each its own, since a module is run once
    class_in_file(written(CRITERION, "own_mean"))(tiny_config(vocab_size=32)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    del CRITERIA["own_mean"]  # as in a new process
    if command == "halting":
        criteria = check_halting(parse_halting([str(folder), "--trust-remote-code"]))[2]
        assert "own_mean" in criteria
    elif command == "show":
        asked = ["--exit-criterion", "own_mean", "--max-new-tokens", "2", "--output", str(tmp_path / "page.html")]
        assert "own_mean ≥ -1e+09" in show([str(folder), "a", "--trust-remote-code", *asked]).rule
    else:
        lm = LoopedLM(str(folder), exit_criterion="own_mean", device="cpu", trust_remote_code=True)
        assert lm.rule.criterion is CRITERIA["own_mean"] and type(lm.model).__name__ == "MeanForCausalLM"


def test_changed_code_is_another_run(written, training_text, tmp_path):
    settings = smoke_settings(training_text, tmp_path / "run", "model.injection=add", "training.steps=2")
    recipe = [str(SMOKE / "lt.yaml"), *settings]
    own = f"training.model_file={written(CODE)}"
    main([*recipe, own, "training.stop_after=1"])
    with pytest.raises(CheckpointError, match="code of training.model_file was '.*', is None"):
        main(recipe)
    written(CODE + "\n# changed\n")
    with pytest.raises(CheckpointError, match="is not the code that .* was trained with"):
        export([str(tmp_path / "run"), str(tmp_path / "exported")])
    with pytest.raises(CheckpointError, match="code of training.model_file was '.*', is '.*resume=changed"):
        main([*recipe, own])
    main([*recipe, own, "training.resume=changed"])
    assert (tmp_path / "run" / "final" / "own_gated.py").read_text().endswith("# changed\n")


def test_the_code_beside_the_weights_is_that_of_the_run(written, training_text, tmp_path, monkeypatch):
    """Not that of the file at its end, which may have been edited for the next run."""
    path = written(CODE)
    train = Pretraining.train

    def edited(run):
        Path(path).write_text(CODE.replace("torch.sigmoid", "-torch.sigmoid"))
        return train(run)

    monkeypatch.setattr(Pretraining, "train", edited)
    own = [f"training.model_file={path}", "model.injection=add", "training.steps=1"]
    settings = smoke_settings(training_text, tmp_path / "run", *own)
    main([str(SMOKE / "lt.yaml"), *settings])
    assert (tmp_path / "run" / "final" / "own_gated.py").read_text() == CODE


def test_the_code_that_is_compared_is_that_of_the_run(written):
    """Not that of a file that was edited while the data of the run were prepared."""
    path = written(CODE)
    recipe = load_recipe(SMOKE / "lt.yaml", [f"training.model_file={path}"])
    before = checksum_of_code(recipe)
    class_in_file(path)
    Path(path).write_text(CODE + "# changed\n")
    assert checksum_of_code(recipe) == before
    MODULES.pop(Path(path).resolve())
    assert checksum_of_code(recipe) != before


def test_a_sweep_knows_the_class_and_the_code_of_its_results(written, training_text, tmp_path):
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        f"recipe: {SMOKE / 'lt.yaml'}\nset: {{model.injection: add}}\ngrid: {{optimizer.muon_lr: [0.02]}}\n"
    )
    settings = [*smoke_settings(training_text, tmp_path / "runs"), "training.steps=1"]
    run_sweep(str(sweep), settings, None)
    own = f"training.model_file={written(CODE)}"
    with pytest.raises(RecipeError, match="result of another recipe: .*model_file was None"):
        run_sweep(str(sweep), [*settings, own], None)
    shutil.rmtree(tmp_path / "runs")
    run_sweep(str(sweep), [*settings, own], None)
    written(CODE + "# changed\n")
    with pytest.raises(RecipeError, match="result of another recipe: code of training.model_file was"):
        run_sweep(str(sweep), [*settings, own], None)


def test_trusted_code_of_a_published_layout_is_not_run(tmp_path):
    model = LoopedForCausalLM(LoopedConfig.from_preset("ouro", **TINY))
    save_public(model, tmp_path, "ouro")
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["OuroForCausalLM"]
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling_ouro.py").write_text("raise RuntimeError('this was run')\n")
    assert type(LoopedForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)) is LoopedForCausalLM
