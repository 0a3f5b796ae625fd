"""The model card of a run, and pushing its folder to the Hub."""

import glob
from contextlib import contextmanager
from pathlib import Path

import yaml
from huggingface_hub import CommitOperationAdd, HfApi

from looped_recipes.common.checksums import LIST, check_folder, listed_in
from looped_recipes.common.errors import CommandError, first_line
from looped_recipes.common.flops import sizes
from looped_recipes.common.metrics import last_validation, read_metrics
from looped_recipes.data.sources import looks_like_path
from looped_recipes.settings.recipe import PATHS, Recipe


CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [looped, {injection}]
{license}---

# {name}

A looped language model: {layers} unique layers ({prelude} before the loop, {core} in it, {coda} after), trained with
{loops} loops. {parameters:,} parameters. Made with Looped; every number below is from this run.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{place}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{place}", trust_remote_code=False)  # it has no code of its own
inputs = tokenizer("Once", return_tensors="pt")
ids = model.generate(**inputs, max_new_tokens=20)  # {loops} loops
ids = model.generate(**inputs, max_new_tokens=20, num_loops=1)  # any other depth
print(tokenizer.decode(ids[0]))
```

{code}

## Validation at every depth

| loops | cross-entropy | bits per byte |
|---|---|---|
{table}

{steps} steps of {tokens_per_step:,} tokens of `{source}`, seed {seed}.

## Recipe

```yaml
{recipe}
```
"""


OUR_CODE = "With `import modeling_looped` before, nothing asks for `trust_remote_code`."
OWN_CODE = """Its class is in `{}`, which needs modeling_looped installed: by `pip install .` in a clone of Looped,
or from the wheel that `pip wheel --no-deps .` makes there."""


def model_card(recipe: Recipe, config, metrics_path: str | Path, folder: Path, steps: int) -> str:
    """Return the README of a model exported to `folder`, filled with data of its run. steps: training steps before the
    export."""
    run, own = Path(metrics_path).absolute().parent, recipe.training.model_file
    place = recipe.training.push_to_hub or f"./{folder.absolute().name}"  # no repository has a name like ./folder
    records = [record for record in read_metrics(metrics_path) if record["step"] < steps]
    losses, bits = (last_validation(records, measure) for measure in ("loss", "bits_per_byte"))
    rows = (f"| {k} | {losses[k]:.4f} | {bits[k]:.4f} |" for k in losses)
    return CARD.format(
        name=recipe.training.push_to_hub or run.name,
        place=place,
        code=OUR_CODE if own is None else OWN_CODE.format(Path(own).name),
        injection=config.injection,
        license=yaml.safe_dump({"license": recipe.training.license}) if recipe.training.license else "",
        layers=config.num_layers,
        prelude=config.num_prelude_layers,
        core=config.num_core_layers,
        coda=config.num_coda_layers,
        loops=config.trained_depth,
        parameters=sizes(config).total,
        table="\n".join(rows),
        steps=steps,
        tokens_per_step=recipe.training.rows_per_step * recipe.data.sequence_length,
        source=without_place(recipe.data.source),
        seed=recipe.training.seed,
        recipe=yaml.safe_dump(without_places(recipe.to_dict()), sort_keys=False).strip(),
    )


def without_places(recipe: dict) -> dict:
    """Replace paths in a recipe by file or folder names: paths on this machine are of no use to readers."""
    return {
        section: {
            key: without_place(value) if key in PATHS.get(section, ()) else value for key, value in fields.items()
        }
        for section, fields in recipe.items()
    }


def without_place(name: str | None) -> str | None:
    is_place = name is not None and (looks_like_path(name) or Path(name).expanduser().exists())
    return Path(name).name if is_place else name


def create_repository(name: str):
    """Create the repository before training, so that a wrong name or login is found early. One that exists may be read
    only: it is also asked how a file would be uploaded, which takes the right to write."""
    with errors_of_the_hub(
        f"can not push to {name!r}",
        "run `hf auth login` with a token that may write there, or leave training.push_to_hub out",
    ):
        HfApi().create_repo(name, exist_ok=True)
        HfApi().preupload_lfs_files(name, [CommitOperationAdd("README.md", b"#")])  # uploads no text


def push(folder: str | Path, name: str) -> str:
    """Upload the files of an exported folder, not what its user has added there, and return the address."""
    check_folder(folder)
    names = (LIST, *listed_in(Path(folder)))
    with errors_of_the_hub(
        f"could not push {folder} to {name!r}",
        f"the model is whole there; try `hf upload {name} {folder}`, which uploads all that is in the folder",
    ):
        return str(
            HfApi().upload_folder(
                repo_id=name, folder_path=str(folder), allow_patterns=[glob.escape(file) for file in names]
            )
        )


@contextmanager
def errors_of_the_hub(what: str, advice: str):
    try:
        yield
    except Exception as error:  # of the Hub's client, of files, and of an HTTP client that depends on the version
        raise CommandError(f"{what}: {first_line(error).rstrip('.')}; {advice}") from error
