"""Recipes and sweeps with one thing changed: refused in one line, or accepted because it makes sense.

What is nonsense is said by the tables of this file, which know the fields by name and never ask recipes/common.
"""

import copy
import math
import random
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from looped_recipes.engine.sweep_runs import load_sweep
from looped_recipes.settings.costs import plan
from looped_recipes.settings.recipe import load_recipe
from tests.faults.campaign import Trial


RECIPES = Path(__file__).parents[2] / "recipes"
SECONDS = 5  # of the processor, for one try
FILES = sorted(
    path for path in RECIPES.rglob("*.yaml") if path.parent.name != "accelerate" and "sweep" not in path.name
)
SWEEPS = sorted(RECIPES.rglob("*.sweep.yaml"))


class Hang(BaseException):
    """A try that takes too long; no `except Exception` catches it."""


# Kinds of fields, by what a person would say of them


WHOLE = """data.max_documents data.tokenizer_vocab_size data.tokenizer_max_characters data.sequence_length data.stride
    data.num_proc depth.maximum depth.rows_per_draw depth.curriculum_steps optimizer.muon_momentum_steps
    schedule.warmup_steps schedule.decay_steps training.seed training.steps training.rows_per_step
    training.micro_batch_size training.save_every training.keep_last training.stop_after evaluation.every
    evaluation.rows logging.every logging.monitor_every model.vocab_size model.hidden_size model.intermediate_size
    model.num_attention_heads model.num_key_value_heads model.head_dim model.max_position_embeddings
    model.num_prelude_layers model.num_core_layers model.num_coda_layers model.num_loops""".split()
REAL = """data.validation_fraction data.expected_tokens depth.mean optimizer.lr optimizer.eps optimizer.weight_decay
    optimizer.decay_product optimizer.embedding_lr optimizer.head_lr optimizer.reference_width optimizer.muon_lr
    optimizer.muon_momentum optimizer.muon_momentum_start optimizer.muon_weight_decay
    optimizer.muon_weight_decay_end optimizer.clip schedule.decay_fraction schedule.final_ratio training.tokens
    training.epochs training.flops training.tokens_per_parameter training.taper_start training.taper_end
    training.max_loss model.residual_scale model.rms_norm_eps model.norm_penalty model.initializer_range
    model.readout_alpha model.residual_dropout model.embedding_scale model.logit_softcap""".split()
SWITCH = """data.streaming data.document_masking optimizer.update_clipping optimizer.atan2 optimizer.decay_all
    optimizer.keep_decay_product optimizer.correct_for_depth optimizer.muon_value_gates training.count_embedding
    training.compile training.gradient_checkpointing training.freeze_all_but_gate training.keep_best
    training.save_in_background
    model.tie_word_embeddings model.norm_affine model.mlp_gated model.injection_norm""".split()
WORD = """data.source data.split data.text_field data.tokenizer data.packing data.cropped data.document_tokens
    data.cache_dir depth.sampler depth.per depth.split optimizer.name schedule.name training.output_dir
    model.preset model.injection model.readout_norm model.window_pattern model.hidden_act model.loop_loss
    logging.project""".split()
NUMBERS = {*WHOLE, *REAL}
ZERO_IS_FINE = """optimizer.muon_momentum_steps schedule.warmup_steps training.seed optimizer.weight_decay
    optimizer.decay_product optimizer.muon_momentum optimizer.muon_momentum_start optimizer.muon_weight_decay
    optimizer.muon_weight_decay_end schedule.final_ratio training.taper_start model.num_prelude_layers
    model.num_coda_layers model.norm_penalty model.readout_alpha model.residual_dropout""".split()
ONE_OF = """data.packing data.cropped data.document_tokens depth.sampler depth.per depth.split optimizer.name
    schedule.name model.preset model.injection model.readout_norm model.window_pattern model.hidden_act
    model.loop_loss""".split()
AT_MOST_ONE = """data.validation_fraction optimizer.muon_momentum optimizer.muon_momentum_start schedule.final_ratio
    schedule.decay_fraction training.taper_start training.taper_end model.readout_alpha model.residual_dropout
    optimizer.decay_product""".split()
TEXTS_FOR_NUMBERS = ["many", "1:30", "one", "1e", "--3", "0x", "3,5", "1 000", "nan", "Infinity", "", "４"]
INHERITED = {
    "dtype": "banana",
    "output_hidden_states": "banana",
    "return_dict": False,
    "chunk_size_feed_forward": -3,
    "is_encoder_decoder": True,
    "id2label": {0: "x", "y": None},
    "label2id": "nonsense",
    "problem_type": "regression",
    "architectures": ["Nonsense"],
    "transformers_version": "0.0",
    "pad_token_id": 10**9,
    "eos_token_id": -7,
    "bos_token_id": [],
    "num_hidden_layers": 7,
    "layer_types": ["banana"],
    "rope_parameters": {"rope_type": "default", "rope_thetta": 1e4},
    "rope_scaling": {"type": "linear"},
    "torch_dtype": "float8",
}
ROPE = [
    {"rope_type": "default", "rope_theta": float("nan")},
    {"rope_type": "default", "rope_theta": -1.0},
    {"rope_type": "spiral", "rope_theta": 1e4},
    {"rope_type": "default", "rope_theta": "large"},
    {"rope_type": "linear", "rope_theta": 1e4},
    {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    [],
    "default",
    3,
]
PATTERNS = ["", "s", "SX", "LLLL", "S L", "S" * 5000, "SL" * 400, "ЅL", 3, ["S", "L"]]

# pairs that contradict each other, or of which one has no effect
PAIRS = [
    {"optimizer.name": "adamw", "optimizer.muon_lr": 0.5},
    {"optimizer.name": "adamw", "optimizer.muon_weight_decay": 0.1},
    {"optimizer.name": "adamw", "optimizer.muon_value_gates": True},
    {"schedule.name": "cosine", "schedule.decay_steps": 3, "schedule.decay_fraction": None},
    {"schedule.name": "constant", "schedule.decay_fraction": 0.5, "schedule.decay_steps": None},
    {"schedule.name": "constant", "schedule.final_ratio": 0.5},
    {"schedule.name": "wsd", "schedule.decay_steps": 3, "schedule.decay_fraction": 0.5},
    {"schedule.name": "wsd", "schedule.decay_steps": None, "schedule.decay_fraction": None},
    {"schedule.warmup_steps": 10**11},
    {"optimizer.decay_product": 1e-5, "optimizer.weight_decay": 0.123},
    {"depth.sampler": "fixed", "depth.per": "sequence", "depth.rows_per_draw": None},
    {"depth.sampler": "fixed", "depth.maximum": 8},
    {"depth.sampler": "fixed", "depth.mean": 8},
    {"depth.sampler": "poisson", "depth.mean": 8, "depth.maximum": 2},
    {"depth.sampler": "uniform", "depth.mean": 2.3},
    {"depth.sampler": "poisson", "depth.split": "prefix", "depth.mean": 3, "depth.backprop_loops": 4},
    {"depth.per": "micro_batch", "depth.rows_per_draw": None},
    {"depth.per": "sequence", "depth.rows_per_draw": 3},
    {"depth.curriculum": "linear", "depth.curriculum_steps": None},
    {"depth.curriculum": None, "depth.curriculum_steps": None, "depth.curriculum_target": "both"},
    {"data.packing": "concatenate", "data.cropped": "drop"},
    {"data.packing": "best_fit", "data.joined_by": None, "data.stride": 8},
    {"data.packing": "concatenate", "data.stride": 10**6, "data.sequence_length": 64},
    {"data.validation_source": "other.jsonl", "data.validation_fraction": 0.3},
    {"data.tokenizer": "gpt2", "data.start_token": None, "data.tokenizer_vocab_size": 512},
    {"data.tokenizer": "bpe", "data.start_token": "<s>", "data.document_tokens": "both"},
    {"data.tokenizer": "bpe", "data.tokenizer_vocab_size": 20},
    {"data.source": "embedded", "data.source_config": "sample", "data.validation_source": None},
    {"data.document_masking": True, "data.document_tokens": "none", "data.start_token": None},
    {"data.joined_by": "x", "data.validation_split": "v"},
    {"data.document_start": "(", "data.joined_by": None},
    {"training.taper_start": 0.9, "training.taper_end": 0.1},
    {"training.push_to_hub": "../../x"},
    {"training.push_to_hub": "nobody"},
    {"training.output_dir": "/dev/null/run"},
    {"training.output_dir": "/proc/run"},
    {"training.output_dir": "runs/" + "x" * 300},
    {"training.output_dir": "~nobody-of-this-name/run"},
    {"training.output_dir": "runs/a\0b"},
    {"evaluation.loops": []},
    {"evaluation.loops": [2, 2]},
    {"evaluation.loops": [10**9]},
    {"evaluation.loops": [1, "x"]},
    {"optimizer.betas": [0.9]},
    {"optimizer.betas": [0.9, 1.0]},
    {"optimizer.betas": [0.9, float("nan")]},
    {"optimizer.betas": "0.9"},
    {"logging.trackers": ["tensorboard", "tensorboard"]},
    {"logging.trackers": "wandb"},
    {"logging.trackers": ["nonsense"]},
    {"logging.trackers": [], "logging.project": "mine"},
    {"training.seed": -1},
    {"training.seed": 2**32},
    {"training.seed": 10**30},
    {"model.residual_scaling": "none", "model.residual_scale": 0.3},
    {"model.state_init": "embedding", "model.injection": "add", "model.state_init_std": 0.3},
    {"model.hidden_size": 100, "model.num_attention_heads": 7, "model.head_dim": None},
    {"model.num_core_layers": 10**6},
    {"model.num_core_layers": 600},
    {"model.num_core_layers": 120, "model.num_loops": 300},
    {"model.use_cache": False},
    {"model.classifier_dropout": 0.1},
    {"training.steps": 10, "training.stop_after": 11},
    {"training.steps": 10, "logging.profile_steps": 2, "logging.profile_from": 10},
    {"model.num_core_layers": 900, "model.num_loops": 4000},
    {"model.num_loops": 10**9},
    {"model.hidden_size": 10**9},
    {"model.vocab_size": 10**12},
]


# Mutations: (words, changes of sections, nonsense or None where either is right)


def field_mutations(draw: random.Random, recipe: dict) -> tuple[str, dict, bool]:
    kind = draw.choice(
        [number_mutation, number_mutation, switch_mutation, word_mutation, model_mutation, pair_mutation]
    )
    return kind(draw, recipe)


def number_mutation(draw, recipe):
    key = draw.choice(sorted(NUMBERS))
    value, nonsense = draw.choice(
        [
            (math.nan, True),
            (math.inf, True),
            (-math.inf, True),
            (-1, True),
            (-1e-9, True),
            (-(10**20), True),
            (0, key not in ZERO_IS_FINE),
            (1e40, True),
            (10**40, True),
            (10**400, True),
            (True, True),
            (False, True),
            ([1], True),
            ([], True),
            ({"a": 1}, True),
            ({}, True),
            (draw.choice(TEXTS_FOR_NUMBERS), True),
            (0.5, key in WHOLE),
            (1.5, key in WHOLE or key in AT_MOST_ONE),
        ]
    )
    return f"{key}={value!r:.60}", {key: value}, nonsense


def switch_mutation(draw, recipe):
    key = draw.choice(SWITCH)
    value = draw.choice([0, 1, 2, -1, "maybe", "", [True], {"a": True}, 1.0, math.nan, "True "])
    return f"{key}={value!r}", {key: value}, True


def word_mutation(draw, recipe):
    key = draw.choice(WORD)
    value, nonsense = draw.choice(
        [(3, True), (1.5, True), (True, True), ([], True), (["a"], True), ({"a": "b"}, True), ("", True), ("  ", True)]
        + [(word, True) for word in ("a\nb", "a\0b", "x" * 10_000)]
        + [(word, key in ONE_OF) for word in ("naïve", "日本", "🙂", "a b", "Adamw", "MUON", "[a]", "None")]
    )
    return f"{key}={value!r:.60}", {key: value}, nonsense


def model_mutation(draw, recipe):
    kind = draw.randrange(3)
    if kind == 0:
        key, value = draw.choice(sorted(INHERITED.items(), key=str))
    elif kind == 1:
        key, value = "rope_parameters", draw.choice(ROPE)
    else:
        key, value = "window_pattern", draw.choice(PATTERNS)
    return f"model.{key}={value!r:.60}", {f"model.{key}": value}, True


def pair_mutation(draw, recipe):
    changes = draw.choice(PAIRS)
    return f"{changes!r:.100}", changes, True


def renamed(draw: random.Random, recipe: dict) -> tuple[str, dict]:
    """A key or a section whose name has one letter more, less or another."""
    recipe = copy.deepcopy(recipe)
    section = draw.choice(sorted(recipe))
    holder = recipe
    name = section
    if draw.random() < 0.8 and isinstance(recipe[section], dict) and recipe[section]:
        holder, name = recipe[section], draw.choice(sorted(recipe[section]))
    at = draw.randrange(len(name))
    wrong = draw.choice([name[:at] + name[at + 1 :], name[:at] + "q" + name[at:], name[:at] + "é" + name[at + 1 :]])
    wrong = wrong or "q"
    holder[wrong] = holder.pop(name)
    return f"{name} is called {wrong}", recipe


def twice(draw: random.Random, text: str) -> tuple[str, str] | None:
    """A line of the file once more, with another value or the same, right behind it."""
    lines = text.splitlines()
    keys = [i for i, line in enumerate(lines) if ":" in line and not line.lstrip().startswith(("#", "-"))]
    at = draw.choice(keys)
    key = lines[at].partition(":")[0]
    if lines[at].rstrip().endswith(":"):  # a section: once more at the end
        return f"section {key} twice", "\n".join([*lines, f"{key}: {{}}" if draw.random() < 0.5 else f"{key}:", ""])
    value = draw.choice([lines[at].partition(":")[2], " 7", " null"])
    return f"{key.strip()} twice", "\n".join([*lines[: at + 1], f"{key}:{value}", *lines[at + 1 :], ""])


BROKEN = [
    ("tab", lambda text: text.replace("\n  ", "\n\t", 1) if "\n  " in text else "\ta: 1"),
    ("unclosed list", lambda text: text + "\nevaluation: ["),
    ("two documents", lambda text: text + "\n---\n" + text),
    ("NUL", lambda text: text + "\0"),
    ("a list", lambda text: "- " + text.replace("\n", "\n  ")),
    ("a number", lambda text: "0"),
    ("an empty list", lambda text: "[]"),
    ("a false", lambda text: "false"),
    ("a word", lambda text: "recipe"),
    ("very deep", lambda text: text + "\nmodel: " + "[" * 5000),
    ("an alias of itself", lambda text: "model: &a {rope_parameters: *a}\ntraining: {steps: 3}"),
    ("a python object", lambda text: text + "\nx: !!python/object/apply:os.getcwd []"),
    ("a huge number", lambda text: "training: {steps: " + "9" * 6000 + "}"),
    ("a wrong tag", lambda text: "training: {steps: !!timestamp 3}"),
    ("a key that is a list", lambda text: "? [a]\n: 1"),
    ("a section that is a list", lambda text: "training: [1, 2]"),
    ("a section that is a word", lambda text: "training: hello"),
    ("extends a list", lambda text: "extends: [a]"),
    ("extends nothing", lambda text: "extends: ''"),
    ("extends itself", lambda text: "extends: mutated.yaml"),
    ("extends a folder", lambda text: "extends: ."),
    ("extends what is not there", lambda text: "extends: missing/x.yaml"),
    ("latin-1", lambda text: (text + "# ä").encode("latin-1", "replace")),
    ("laughs", lambda text: "\n".join(
        ["model: &a0 [x, x, x]"] + [f"m{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    )),
    ("no length", lambda text: "training: {rows_per_step: 3}"),
]  # fmt: skip


# Sweeps


SWEEP_FAULTS = [
    {"set": {"training.output_dir": "x"}},
    {"set": []},
    {"set": "a"},
    {"set": {"steps": 3}},
    {"set": {"training.stepps": 3}},
    {"set": {3: 3}},
    {"set": {"optimizer.lr": math.nan}},
    {"grid": {}},
    {"grid": []},
    {"grid": {"optimizer.lr": 3}},
    {"grid": {"optimizer.lr": "abc"}},
    {"grid": {"optimizer.lr": []}},
    {"grid": {"optimizer.lr": [[1]]}},
    {"grid": {"optimizer.lr": [-1.0]}},
    {"grid": {"optimizer.lr": [1e-3, 1e-3]}},
    {"grid": {"training.output_dir": ["a", "b"]}},
    {"grid": {f"model.a{i}": list(range(100)) for i in range(8)}},
    {"grid": "x"},
    {"grid": [3]},
    {"grid": {"recipe": [3]}},
    {"grid": {"recipe": ["missing.yaml"]}},
    {"grid": {"name": ["a", "b"]}},
    {"runs": []},
    {"runs": {}},
    {"runs": [3]},
    {"runs": ["a"]},
    {"runs": [None]},
    {"runs": [{"name": "../../x"}]},
    {"runs": [{"name": "../x", "training.seed": 2}]},
    {"runs": [{"name": "/tmp/x"}]},
    {"runs": [{"name": ".."}]},
    {"runs": [{"name": "."}]},
    {"runs": [{"name": ""}]},
    {"runs": [{"name": " "}]},
    {"runs": [{"name": 3}]},
    {"runs": [{"name": "1e3", "training.seed": "x"}]},
    {"runs": [{"name": ["a"]}]},
    {"runs": [{"name": "a\0b"}]},
    {"runs": [{"name": "x" * 300}]},
    {"runs": [{"name": "results.jsonl"}]},
    {"runs": [{"name": "a"}, {"name": "a", "training.seed": 3}]},
    {"runs": [{"name": "a", "recipe": 3}]},
    {"runs": [{"name": "a", "recipe": "~nobody-of-this-name/x.yaml"}]},
    {"recipe": None, "runs": [{"name": "a"}]},
    {"recipe": ["a"], "runs": [{"name": "a"}]},
    {"recipe": "missing.yaml", "runs": [{"name": "a"}]},
    {"runs": [{"name": "a"}], "grid": {"training.seed": [1]}},
    {"nothing": 1},
    {"grid": {"training.seed": [1, 2]}, "set": {"training.seed": 3}},
    {"grid": {"training.seed": [1]}, "plot": {"x": "optimizer.lr", "curve": "training.seed"}},
    {"grid": {"training.seed": [1]}, "plot": {"x": "training.seed"}},
    {"grid": {"training.seed": [1]}, "plot": "x"},
    {"grid": {"training.seed": [0]}, "plot": {"x": "training.seed", "curve": "training.seed"}},
    {"grid": {"optimizer.lr": [1e-3], "data.split": ["a", "b"]}, "plot": {"x": "data.split", "curve": "optimizer.lr"}},
]
SWEEPS_THAT_MAKE_SENSE = [
    {"grid": {"training.seed": [1, 2]}},
    {"runs": [{"name": "größer [1]", "training.seed": 3}, {"name": "a b"}]},
    {"grid": {"data.cache_dir": ["../../shards", "~/🙂"]}},
    {
        "grid": {"training.seed": [1, 2], "optimizer.lr": ["1e-3"]},
        "plot": {"x": "optimizer.lr", "curve": "training.seed"},
    },
]


# Trials


def trials(seed: int, folder: Path) -> Iterator[Trial]:
    draw = random.Random(seed)
    deck: list = []
    while True:
        if not deck:  # every kind once, then again
            deck = (
                [broken_file] * 2 + [sweep_file] * 3 + [changed_file] * 14 + [misnamed_file] * 2 + [doubled_file] * 2
            )
            deck += [emptied_section]
            draw.shuffle(deck)
        yield deck.pop()(draw, folder)


def changed_file(draw: random.Random, folder: Path) -> Trial:
    path = draw.choice(FILES)
    recipe = yaml.safe_load(path.read_text()) or {}
    words, changes, nonsense = field_mutations(draw, recipe)
    mutated = copy.deepcopy(recipe)
    for key, value in changes.items():
        section, _, name = key.partition(".")
        mutated.setdefault(section, {})[name] = value
    return judged(f"{path.relative_to(RECIPES)}: {words}", write(mutated, path, folder), nonsense)


def misnamed_file(draw: random.Random, folder: Path) -> Trial:
    path = draw.choice(FILES)
    words, mutated = renamed(draw, yaml.safe_load(path.read_text()))
    return judged(f"{path.relative_to(RECIPES)}: {words}", write(mutated, path, folder), True)


def doubled_file(draw: random.Random, folder: Path) -> Trial:
    path = draw.choice([*FILES, *SWEEPS])
    words, text = twice(draw, based(path.read_text(), path))
    sweep = path in SWEEPS
    mutated = folder / ("mutated.sweep.yaml" if sweep else "mutated.yaml")
    mutated.write_text(text)
    return judged(f"{path.relative_to(RECIPES)}: {words}", mutated, True)


def broken_file(draw: random.Random, folder: Path) -> Trial:
    path = draw.choice(FILES)
    words, broken = draw.choice(BROKEN)
    content = broken(based(path.read_text(), path))
    name = folder / draw.choice(["mutated.yaml", "mutated.sweep.yaml"])
    name.write_bytes(content if isinstance(content, bytes) else content.encode())
    return judged(f"{path.relative_to(RECIPES)}: {words} as {name.name}", name, True)


def sweep_file(draw: random.Random, folder: Path) -> Trial:
    nonsense = draw.random() < 0.85
    changes = draw.choice(SWEEP_FAULTS if nonsense else SWEEPS_THAT_MAKE_SENSE)
    sweep = {"recipe": str(RECIPES / "smoke/lt.yaml"), **changes}
    if not {"grid", "runs"} & set(sweep):
        sweep["runs"] = [{"name": "a"}]
    path = folder / "mutated.sweep.yaml"
    path.write_text(yaml.safe_dump(sweep, allow_unicode=True))
    return judged(f"sweep: {changes!r:.100}", path, nonsense, inside=Path("runs/mutated"))


def emptied_section(draw: random.Random, folder: Path) -> Trial:
    """An empty section in a recipe that extends another changes nothing."""
    path = draw.choice([path for path in FILES if "extends" not in path.read_text()])
    section = draw.choice(sorted(set(yaml.safe_load(path.read_text()))))
    name = folder / "mutated.yaml"
    name.write_text(f"extends: {path}\n{section}:{draw.choice(['', ' {}', ' null', ' ~'])}\n")
    fault = f"{path.relative_to(RECIPES)}: extended with an empty {section}"
    outcome, detail, found = attempt(name)
    if outcome != "right":
        return Trial(fault, "traceback" if outcome == "traceback" else "silent", detail)
    same = found == [load_recipe(path).to_dict()]
    return Trial(fault, "right" if same else "silent", "" if same else "the base's section is lost")


def write(recipe: dict, path: Path, folder: Path) -> Path:
    if isinstance(recipe.get("extends"), str):
        recipe = {**recipe, "extends": str(path.parent / recipe["extends"])}
    mutated = folder / "mutated.yaml"
    mutated.write_text(yaml.safe_dump(recipe, allow_unicode=True), encoding="utf-8")
    return mutated


def based(text: str, path: Path) -> str:
    """A recipe's text, whose base is found from any folder."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        for key in ("extends: ", "recipe: "):
            if line.startswith(key):
                lines[i] = f"{key}{path.parent / line.removeprefix(key)}"
    return "\n".join([*lines, ""])


def judged(fault: str, path: Path, nonsense: bool, inside: Path | None = None) -> Trial:
    outcome, detail, found = attempt(path)
    if outcome == "right" and nonsense:
        return Trial(fault, "silent", "accepted")
    if outcome == "refused" and inside is not None and not nonsense:
        return Trial(fault, "silent", f"refused although it makes sense: {detail}")
    if outcome == "right" and inside is not None:
        folders = [Path(recipe["training"]["output_dir"]) for recipe in found]
        if not all(folder.parent == inside and folder.name not in (".", "..") for folder in folders):
            return Trial(fault, "silent", f"runs are written to {folders}")
    return Trial(fault, outcome, detail if outcome == "traceback" else "")


def attempt(path: Path) -> tuple[str, str, list[dict]]:
    """right, refused or traceback; what was said; and the recipes that were read."""
    try:
        with limited(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if path.name.endswith(".sweep.yaml"):
                recipes = [run.recipe for run in load_sweep(path)]
            else:
                recipes = [load_recipe(path)]
            for recipe in recipes[:2]:
                plan(recipe)
            return "right", "", [recipe.to_dict() for recipe in recipes]
    except ValueError as error:
        said = str(error)
        good = len(said.split()) > 5 and "\n" not in said and len(said) < 3000  # more than the name of a key
        return ("refused" if good else "traceback"), f"{type(error).__name__}: {said[:300]!r}", []
    except (Exception, Hang) as error:
        return "traceback", f"{type(error).__name__}: {str(error)[:300]!r}", []


@contextmanager
def limited(seconds: int):
    def ring(*_):
        raise Hang(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
