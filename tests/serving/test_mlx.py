"""mlx-lm on a CPU against the model: its own looped model reads what `looped convert --to nanbeige` writes, and its
logits are the same. `pip install 'mlx[cpu]' mlx-lm` on Linux; elsewhere this is skipped."""

from pathlib import Path

import numpy as np
import pytest
import torch

from looped_recipes.convert import main as convert
from tests.helpers import random_ids, tiny_model


mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
mlx_lm = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed")


@pytest.mark.parametrize(
    "fields", [{}, {"inter_loop_norm": "shared", "num_key_value_heads": 2}, {"tie_word_embeddings": True}]
)
def test_its_logits_are_ours(fields, tmp_path: Path):
    from mlx_lm.models.cache import make_prompt_cache

    model, ids = tiny_model(**fields), random_ids(2, 20)
    model.save_pretrained(tmp_path / "ours")
    convert([str(tmp_path / "ours"), str(tmp_path / "out"), "--to", "nanbeige"])
    engine, _ = mlx_lm.load_model(tmp_path / "out")
    cache = make_prompt_cache(engine)
    parts = [engine(mx.array(part.tolist()), cache=cache) for part in (ids[:, :12], *ids[:, 12:].split(1, dim=1))]
    with torch.no_grad():
        np.testing.assert_allclose(np.concatenate(parts, axis=1), model(ids).logits.numpy(), rtol=0, atol=1e-4)
