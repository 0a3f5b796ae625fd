"""Rows whose keys and values lie in pages, read by the compiled kernel of flex attention, decode as on the CPU without
pages. On a CPU pages are copied instead."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from modeling_looped import SharedPasses
from tests.gpu.test_decoding import WAYS, decode, exiting_model
from tests.helpers import random_ids


pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_compiler")]


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("way", ["logit_margin", "mixed_depths_and_exits", "speculation"])
def test_rows_in_pages(way, softcap, device):
    """In float32: the kernel takes no wider numbers. Logits of the tokens that the CPU chose."""
    ways = {**WAYS, "mixed_depths_and_exits": {**WAYS["mixed_depths"], **WAYS["latent_diff"]}}
    model = exiting_model(head_dim=16, attention_softcap=softcap).float()
    if softcap is not None:
        model.set_attn_implementation("eager")
    expected = decode(model, "cpu", **ways[way], output_logits=True)
    model.set_attn_implementation("flex_attention")
    found = decode(model, device, **ways[way], output_logits=True)
    same = (found.sequences.cpu() == expected.sequences).all(1)
    assert same.any()  # a token that rounding decides changes all after it
    logits, wanted = (torch.stack(result.logits).cpu()[:, same] for result in (found, expected))
    torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)


def test_requests_share_pages(device):
    model = exiting_model(head_dim=16).float()
    settings = {"max_new_tokens": 200, "do_sample": False, "pad_token_id": 0, **WAYS["logit_margin"]}
    prompts = [random_ids(1, 5 + 40 * i, seed=i) for i in range(6)]
    alone = [model.generate(prompt, **settings) for prompt in prompts]
    model.to(device).set_attn_implementation("flex_attention")
    with SharedPasses(model, max_rows=4) as passes, ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda prompt: passes.generate(prompt.to(device), **settings).cpu(), prompts))
    assert sum(torch.equal(*pair) for pair in zip(found, alone)) >= 3  # of the rest rounding decides a token
    assert len(passes.pages.core.free) == passes.pages.core.num_pages > 0
