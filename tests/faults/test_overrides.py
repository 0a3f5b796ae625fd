"""Settings of a command line that YAML would read as something else are refused."""

import pytest

from looped_recipes.settings.recipe import RecipeError, load_recipe


@pytest.mark.parametrize("value", ['"é"#', '"a" # b', "a # b", "a\nb"])
def test_what_yaml_would_cut_or_fold_is_refused(tmp_path, value):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("training: {steps: 6}\n")
    with pytest.raises(RecipeError, match="stands for .* in YAML: put the value in quotes"):
        load_recipe(recipe, [f"training.output_dir={value}"])


def test_a_refused_value_is_quoted_in_one_line(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("training: {steps: 6}\n")
    with pytest.raises(RecipeError, match=r"start_token=2020 \] would have no effect"):
        load_recipe(recipe, ["data.start_token='2020\u2028]'"])
