"""What the README and the other pages say is so: code runs, counts are those of the models, commands, paths and links
exist, and headline numbers are those of results/."""

import copy
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from datasets import load_from_disk
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import modeling_looped
from looped_recipes.common.console import COMMANDS
from looped_recipes.demo.page import after_loops, counted, hardest, listed, percent
from looped_recipes.engine.sweep_runs import load_sweep
from looped_recipes.settings.paths import recipe_file
from looped_recipes.settings.recipe import RecipeError, load_recipe
from looped_recipes.settings.sweep_files import is_sweep
from modeling_looped import LoopedConfig, LoopedForCausalLM, save_public
from modeling_looped.exit_criteria import CRITERIA, ExitRule
from tests.helpers import random_ids, shake, tiny_config, tiny_model


ROOT = Path(__file__).parent.parent
GUIDE = [ROOT / "README.md", ROOT / "MODEL_CARD.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [
    *GUIDE,
    *ROOT.glob("*.md"),
    *ROOT.glob("examples/*.md"),
    *ROOT.glob("recipes/**/*.md"),
    *ROOT.glob("results/*.md"),
]
TEXT = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}


def blocks(page: str, language: str) -> list[str]:
    fenced = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", TEXT[page], flags=re.DOTALL | re.MULTILINE)
    return [block for mark, block in fenced if mark == language]


# Code


PAGES_WITH_PYTHON = [path.relative_to(ROOT).as_posix() for path in GUIDE if "```python" in path.read_text("utf-8")]


@pytest.fixture(scope="module")
def folder_of_models(tmp_path_factory) -> Path:
    """Tiny models in folders of the names that stand in the pages."""
    folder = tmp_path_factory.mktemp("pages")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(special_tokens=["<end>"], initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    tokenizer.save_pretrained(folder / "runs/demo/final")
    LoopedForCausalLM(tiny_config(vocab_size=len(tokenizer), num_loops=4)).save_pretrained(folder / "runs/demo/final")

    for name in ("web", "code"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": f"of the {name}", "url": name}) + "\n")

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    save_public(tiny_model(preset="ouro", num_core_layers=2), folder / "ByteDance/Ouro-1.4B", "ouro")
    for name, count in {"HuggingFaceTB/SmolLM2-135M": 30, "TinyLlama/TinyLlama_v1.1": 22}.items():
        LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=count)).save_pretrained(folder / name)
    qwen = Qwen3Config(**sizes, num_hidden_layers=28, num_key_value_heads=2, head_dim=8)
    Qwen3ForCausalLM(qwen).save_pretrained(folder / "Qwen/Qwen3-0.6B")
    return folder


def probe(model, name: str):
    """Decode and score with a criterion that reads a layer of the model's own, as a page has it."""
    model.probe = torch.nn.Linear(model.config.hidden_size, 1)
    torch.nn.init.zeros_(model.probe.weight)
    ids, seen = torch.tensor([[5, 6, 7]]), set()
    for bias, loops in ((1.0, 1), (-1.0, model.config.num_loops)):
        torch.nn.init.constant_(model.probe.bias, bias)
        given = {"exit_criterion": name, "exit_threshold": 0.0, "return_dict_in_generate": True}
        written = model.generate(ids, prompt_loops=1, max_new_tokens=3, min_new_tokens=3, do_sample=False, **given)
        seen |= {loops - depth for depth in written.token_loops[0, 1:].tolist()}
        seen |= {loops - depth for depth in model(ids, exit_rule=ExitRule(name, 0.0)).token_loops[0].tolist()}
    assert seen == {0}


@torch.no_grad()
def route(trunk, name: str):
    """Decode and score with a depth that each token chooses: tokens exit where their states no longer change."""
    model, ids = tiny_model(num_loops=5, num_coda_layers=1, num_key_value_loops=1), random_ids(3, 9)
    model.model = trunk(model.config).eval()
    shake(model)
    full = model(ids, output_loop_hidden_states=True, use_cache=False)
    states = torch.stack([full.initial_state, *full.loop_hidden_states])
    changes = (states[1:] != states[:-1]).any(-1).sum(0)
    exits = model(ids, exit_rule=ExitRule(name, 0.0))
    assert torch.equal(exits.token_loops, changes.clamp(min=1)) and len(changes.unique()) > 2
    torch.testing.assert_close(exits.logits, full.logits)
    given = {"max_new_tokens": 9, "do_sample": False}
    assert torch.equal(model.generate(ids, **given, exit_criterion=name), model.generate(ids, **given))


@torch.no_grad()
def push(own_class):
    """Compare a momentum in a wider state with its formula, going on from a state, and ways of decoding."""
    fields = {"num_loops": 5, "injection": "add", "state_init": "zeros"}
    plain, model = tiny_model(**fields).double(), own_class(tiny_config(**fields)).double().eval()
    ids = random_ids(2, 9)
    shake(plain)
    model.load_state_dict(plain.state_dict())
    once = {"num_loops": 1, "output_loop_hidden_states": True}
    before = now = plain(ids, **once).initial_state
    for _ in range(5):
        after = plain(ids, **once, initial_state=now).loop_hidden_states[0] + 0.5 * (now - before)
        before, now = now, after
    torch.testing.assert_close(model(ids).logits, plain.logits_after_loop(now, 4))
    half = model(ids, num_loops=2, output_loop_hidden_states=True).loop_hidden_states[-1]
    rest = model(ids, num_loops=3, initial_state=model.model.to_next_loop(half))
    torch.testing.assert_close(rest.logits, model(ids).logits)
    given = {"max_new_tokens": 8, "do_sample": False}
    for way in ({"exit_criterion": "max_prob", "exit_threshold": 1.0}, {"draft_loops": 2}):
        assert torch.equal(model.generate(ids, **given, **way), model.generate(ids, **given))


@torch.no_grad()
def ends_of_loops(model):
    """Compare modules that each stand for one loop with the states of a pass, and a change there with what follows."""
    ids, asked = torch.tensor([[5, 6, 7]]), {"output_loop_hidden_states": True}
    states = model(ids, **asked).loop_hidden_states
    handle = model.model.ends[1].register_forward_hook(lambda end, inputs, state: 0 * state)
    changed = model(ids, **asked).loop_hidden_states
    handle.remove()
    assert len(model.model.ends) == len(states) > 2
    assert torch.equal(changed[0], states[0]) and not changed[1].any() and not torch.equal(changed[2], states[2])


@pytest.mark.parametrize("page", PAGES_WITH_PYTHON)
def test_code_runs(page, folder_of_models, monkeypatch):
    """All Python of a page as one script; a model whose width it leaves at 768 is a small one."""
    monkeypatch.chdir(folder_of_models)
    names, known = {}, set(CRITERIA)
    small = "vocab_size=99, hidden_size=32, intermediate_size=48, num_attention_heads=4, "
    script = "\n".join(blocks(page, "python"))
    code = re.sub(r'LoopedConfig(\.from_preset\("\w+", |\()(?=num_)', rf"\g<0>{small}", script)
    exec(compile(code, page, "exec"), names)
    for name in CRITERIA.keys() - known:
        route(names["Routed"], name) if name == "router" else probe(names["model"], name)
        del CRITERIA[name]
    if "model" in names:
        assert names["model"].config.model_type == "looped"
    if page == "docs/diagnose.md":
        same = copy.deepcopy(names["model"])
        assert same.model.core_pass.__self__ is same.model
        ends_of_loops(names["model"])
        names["model"].bfloat16()(torch.tensor([[5, 6, 7]]))
    if page == "docs/architecture.md":
        push(names["HeavyBallForCausalLM"])
    if page == "docs/train.md":
        assert torch.isfinite(names["outputs"].loss)
        assert load_from_disk("mixed")["text"]


def test_no_page_lost_its_code():
    assert len(PAGES_WITH_PYTHON) >= 6
    assert sum(len(blocks(page, "python")) for page in PAGES_WITH_PYTHON) >= 11


def test_a_stack_that_stands_twice_is_one_that_loops_twice():
    """The layers of Ouro 2.6B: without a norm between loops, one loop of the doubled stack is two of the small one."""
    (block,) = blocks("recipes/ouro/README.md", "python")
    found = {}
    exec(block, found)  # noqa: S102
    small = tiny_model(num_core_layers=2, num_loops=2, num_prelude_layers=1, block_norm="branch_sandwich").eval()
    large, ids = found["doubled"](small).eval(), torch.arange(12)[None]
    assert large.config.num_core_layers == 4
    assert torch.equal(large(ids, num_loops=1).logits, small(ids, num_loops=2).logits)
    assert large.num_parameters() == small.num_parameters() + sum(p.numel() for p in small.model.core.parameters())


# Commands


def written_commands() -> list[tuple[str, str]]:
    """(page, command) of every line of a shell block, and of what stands in backticks."""
    found = []
    for page, text in TEXT.items():
        shell = [block for mark in ("bash", "") for block in blocks(page, mark)]
        lines = [line for block in shell for line in block.replace("\\\n", " ").splitlines()]
        lines += [
            span.replace("\n", " ")
            for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        ]
        found += [(page, line.strip()) for line in lines]
    return found


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    looked_up = 0
    for page, line in written_commands():
        for name in re.findall(r"^looped ([a-z-]+)\b", line):
            assert name in COMMANDS, f"{page}: {line}"
            looked_up += 1
        for target in re.findall(r"^make ([a-z-]+)\b", line):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"{page}: {line}"
        for module in re.findall(r"(?:^|\s)-m ((?:looped_recipes|looped_eval|tests)\.[\w.]+)", line):
            assert find_spec(module), f"{page}: {line}"
            looked_up += 1
        only_in_clone = re.search(r"(?:^|\s)(?:-m (?:recipes|eval)\b|(?:recipes|eval)\.[a-z_]+(?![\w.]))", line)
        assert not only_in_clone, f"{page}: {line}: write looped NAME, or looped_recipes. and looped_eval."
    assert looked_up > 60


def test_recipes_exist():
    """Those named in commands, in a clone or by the short names that work everywhere."""
    named = {
        (page, word)
        for page, line in written_commands()
        if re.match(r"looped (pretrain|plan|sweep|prepare)|accelerate launch|python -m looped_recipes", line)
        for word in line.split()
        if re.fullmatch(r"[\w/.-]+/[\w.-]+\.yaml", word) and not re.search(r"\b[A-Z]+\b", word)
    }
    assert len(named) > 10
    assert [(page, name) for page, name in named if not recipe_file(name).exists()] == []


def test_recipes_take_the_settings_of_their_commands():
    begins = re.compile(
        r"(?:^|\s)(?:looped (?:pretrain|plan|sweep|prepare)|-m looped_recipes\.pretrain) (\S+\.yaml) ([^#]*)"
    )
    refused, checked = [], 0
    for _, line in written_commands():
        for path, words in begins.findall(line):
            settings = [word for word in words.split() if re.match(r"(?!slurm)\w+\.\w+=", word)]
            if not settings or not recipe_file(path).exists():
                continue
            checked += 1
            try:
                (load_sweep if is_sweep(path) else load_recipe)(path, settings)
            except RecipeError as error:
                refused.append((line, str(error)))
    assert checked > 10
    assert refused == []


WITH_NAMES = ("benchmark", "diagnose", "laws")  # each name of these has options of its own


def options_in_pages() -> list[tuple[tuple[str, ...], list[str]]]:
    """(command, with its name where it has one, and options that a page gives it)"""
    found: dict[tuple[str, ...], set[str]] = {}
    for _, line in written_commands():
        words = line.partition("#")[0].split()
        if len(words) > 2 and words[0] == "looped" and any(word.startswith("--") for word in words):
            command = tuple(words[1 : 3 if words[1] in WITH_NAMES and words[2].islower() else 2])
            found.setdefault(command, set()).update(word.partition("=")[0] for word in words if word.startswith("--"))
    return sorted((command, sorted(options)) for command, options in found.items())


@pytest.mark.slow
@pytest.mark.parametrize("command,options", options_in_pages(), ids=" ".join)
def test_options_exist(command, options):
    start = [sys.executable, "-m", "looped_recipes.common.console", *command, "--help"]
    told = subprocess.run(start, cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    # `--batch-size` is `--batch_size` where lm-eval named it
    assert [
        each for each in options if each not in told.stdout and each.replace("-", "_")[2:] not in told.stdout
    ] == []


# Facts


def published_counts() -> list[tuple[str, str, int]]:
    """(preset, overrides, parameters) of every table row that starts with a preset and ends with a number."""
    rows = re.findall(r"^\| `(\w+)` \|(.*)\| ([\d,]+) \|$", TEXT["docs/systems.md"], flags=re.MULTILINE)
    return [
        (preset, "".join(re.findall(r"`(\w+=.*)`", middle)), int(count.replace(",", "")))
        for preset, middle, count in rows
    ]


@pytest.mark.parametrize("preset,overrides,count", published_counts())
def test_parameter_counts(preset, overrides, count):
    config = LoopedConfig.from_preset(preset, **eval(f"dict({overrides})"))
    with torch.device("meta"):
        model = LoopedForCausalLM(config)
    model.tie_weights()
    assert model.num_parameters() == count


def test_every_preset_has_a_row():
    assert {preset for preset, _, _ in published_counts()} == set(LoopedConfig.preset_names())
    assert f"{len(LoopedConfig.preset_names())} presets" in TEXT["README.md"]


def speedups(file: str, command: str) -> dict[str, list[float]]:
    """Over a Llama, by type, in the measurements that this command begins, in their order."""
    found: dict[str, list[float]] = {}
    for line in map(json.loads, (ROOT / f"results/{file}.jsonl").read_text(encoding="utf-8").splitlines()):
        if line["command"].startswith(command):
            found.setdefault(line["dtype"], []).append(line["speedup_over_llama"])
    return found


def from_to(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def table_of_hops(found: dict) -> list[str]:
    """What the table under the picture says, and the line below it."""
    hops, loops = hardest(found), found["exit_loops"]
    taken = [f"{loops[each]:.1f} for {counted(each, 'hop')}" for each in loops]
    return [
        f"those of {counted(hops, 'hop')}",
        f"| a model with one loop | {percent(found['control'][hops])} |",
        f"| the looped model | {after_loops(found['accuracy'][hops])} |",
        f"as soon as its answer is {percent(found['certainty'])} sure | {percent(found['exit_accuracy'][hops])} |",
        f"the mean number of loops is {listed(taken)}.",
    ]


def test_headline_numbers_are_those_of_the_results():
    said = re.sub(r"\s+", " ", TEXT["README.md"])
    hops = json.loads((ROOT / "results/demo.json").read_text(encoding="utf-8"))["hops"]
    harness = json.loads((ROOT / "results/harness.json").read_text(encoding="utf-8"))
    served = json.loads((ROOT / "results/serving.json").read_text(encoding="utf-8"))["over_http"]
    over_vllm = {name: served[name]["tokens_per_second_over_vllm"] for name in ("full", "gate")}
    compared = [
        f"in {harness['over_runs']:.2f} of the time",
        f"{over_vllm['full']:.2f} of its tokens a second at full depth, {over_vllm['gate']:.2f} with exits by a gate",
    ]
    whole, _, shared, int8 = re.findall(r"([\d,.]+) KiB", re.findall(r"\| `ouro` .*", TEXT["docs/decode.md"])[0])
    compared.append(f"takes {whole} KiB; {shared} KiB where loops share keys and values, {int8} KiB in 8 bits")
    seeds = json.loads((ROOT / "results/claims/row.json").read_text(encoding="utf-8"))["seeds"].values()
    of_loops, of_one = (
        [100 * seed["systems"][system]["3"]["accuracy"][-1] for seed in seeds]
        for system in ("looped", "as_many_parameters")
    )
    compared.append(f"the model with four loops is right in {min(of_loops):.0f} to {max(of_loops):.0f} %")
    compared.append(f"a model with one loop of the same layer in {min(of_one):.0f} to {max(of_one):.0f} %")
    newer, older = (
        [speedups(file, f"looped benchmark llama --{rows}")["float32"] for rows in ("new", "batch 1")]
        for file in ("benchmark", "benchmark_avx2")
    )
    amx = [speedups("benchmark_amx", f"looped benchmark llama --batch {rows}")["float32"][0] for rows in (4, 1)]
    steps = speedups("benchmark_amx", "looped benchmark train")
    compared += [
        "decoding in fp32 | {} times as fast with 4 rows and {} times with one on an AMD".format(*map(from_to, newer)),
        "{} and {} times on an older one".format(*map(from_to, older)),
        f"{amx[0]:.2f} and {amx[1]:.2f} times on an Intel one with AMX",
        f"its training step | {steps['float32'][0]:.2f} times as fast in fp32 and",
        f"{from_to(steps['bfloat16'])} times in bf16, on an Intel",
    ]
    claims = (ROOT / "results/CLAIMS.md").read_text(encoding="utf-8").splitlines()[2].strip("*")
    compared += table_of_hops(hops)
    assert [each for each in [*compared, claims] if each not in said] == []


def test_bits_per_byte_of_the_card_are_those_of_the_results():
    found = json.loads((ROOT / "results/demo.json").read_text(encoding="utf-8"))["text"]["bits_per_byte"]
    row = re.search(r"^\| bits per byte \| (.*) \|$", TEXT["MODEL_CARD.md"], flags=re.MULTILINE)[1]
    assert row.split(" | ") == [f"{bits:.4f}" for bits in found.values()]


def test_public_names_are_in_the_reference():
    reference = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/api").glob("*.md"))
    owners = {name: getattr(getattr(modeling_looped, name), "__module__", "") for name in modeling_looped.__all__}
    shown = set(re.findall(r"^::: (\S+)$", reference, flags=re.MULTILINE))
    named = {name for name in owners if f"`{name}`" in reference}
    assert [
        name for name, owner in owners.items() if not {f"modeling_looped.{name}", owner} & shown | named & {name}
    ] == []


# Paths


def test_links_lead_somewhere():
    broken = []
    for page, text in TEXT.items():
        text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            whole = (ROOT / page).parent / path if path else ROOT / page
            if not re.match(r"\w+:", target) and (not whole.exists() or (anchor and anchor not in anchors(whole))):
                broken.append((page, target))
    assert broken == []


def anchors(page: Path) -> set[str]:
    """As GitHub and the site make them of headings."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_paths_exist():
    tree = TEXT["docs/architecture.md"].split("## What is where")[1].split("```")[1]
    folders, paths = {}, []  # the folder that each indent is in
    for line in tree.strip().splitlines():
        indent = len(line) - len(line.lstrip())
        inside = "".join(folders[width] for width in sorted(folders) if width < indent)
        for name in re.match(r"((?:[\w.]+(?:/|\.\w+) ?)+)", line.strip())[0].split():
            paths.append(inside + name)
            if name.endswith("/"):
                folders = {width: folder for width, folder in folders.items() if width < indent} | {indent: name}
    assert len(paths) > 60
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_page_is_in_the_site():
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    pages = [name.removeprefix("docs/") for name in TEXT]
    assert [name for name in pages if name not in listed] == []
