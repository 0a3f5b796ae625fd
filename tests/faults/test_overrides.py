"""Recipes in other encodings, and settings of a command line: read as they are written, or refused."""

import pytest

from looped_recipes.settings.recipe import RecipeError, load_recipe
from tests.faults.campaign import assert_good
from tests.faults.campaign_overrides import trials


def test_overrides_and_encodings_are_read_as_they_are_written_or_refused(tmp_path):
    assert_good(trials(0, tmp_path), 300, least_right=15)


@pytest.mark.slow
def test_many_overrides_and_encodings_are_read_as_they_are_written_or_refused(tmp_path):
    assert_good(trials(1, tmp_path), 5000, least_right=250)


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
