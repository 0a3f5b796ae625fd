"""How often decoding would wait for a GPU: per token, beside transformers' Llama, counted on a CPU."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers import TINY, random_ids, tiny_model
from tests.helpers_waits import Waits


LOOPS, SHORT, LONG = 6, 4, 12  # SHORT and LONG: tokens
ENDLESS = {"eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_loops=LOOPS, exit_gate="raw", loop_loss="per_loop", **ENDLESS)


def waits(model, number: int, rows: int, **how):
    ids = random_ids(rows, 6)
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "return_dict_in_generate": True, **how}
    with Waits() as found:
        output = model.generate(ids, max_new_tokens=number, **settings)
    return found, output


def of_a_token(model, rows: int = 1, **how):
    """Reads in the mean, and copies of numbers to the device, after the first tokens; and the loops of each token."""
    (short, _), (long, output) = (waits(model, number, rows, **how) for number in (SHORT, LONG))
    reads = (long.reads.total() - short.reads.total()) / (LONG - SHORT)
    return reads, long.copies - short.copies, output.get("token_loops")


@pytest.mark.parametrize("how", [{}, {"eos_token_id": 98}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.some(1)
def test_at_full_depth_as_often_as_llama(model, how):
    shape = {name: TINY[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **shape, **ENDLESS)).eval()
    of_llama, copies, _ = of_a_token(llama, 2, **how)
    assert not copies and of_llama > 0
    assert of_a_token(model, 2, **how)[:2] == (of_llama, copies)


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("criterion", ["logit_margin", "latent_diff", "gate"])
@pytest.mark.some(3)
def test_with_exits_once_per_check_and_token(model, criterion, interval):
    """Of readings that decide nothing, none is read back; the limit is known beforehand, and so is no check."""
    never = {"logit_margin": 1e9, "latent_diff": 0, "gate": 1.0}[criterion]
    how = {"exit_criterion": criterion, "exit_threshold": never, "exit_interval": interval}
    reads, copies, loops = of_a_token(model, eos_token_id=98, **how)
    assert (loops == LOOPS).all() and not copies
    assert reads == math.ceil((LOOPS - 1) / interval) + 1


@pytest.mark.parametrize("reads_every", [2, 3, LOOPS])
@pytest.mark.parametrize("criterion", ["logit_margin", "latent_diff"])
@pytest.mark.some(2)
def test_with_exits_that_are_read_late(model, criterion, reads_every):
    """Once per so many checks, at the last loop, and for the token."""
    never = {"logit_margin": 1e9, "latent_diff": 0}[criterion]
    how = {"exit_criterion": criterion, "exit_threshold": never, "exit_read_interval": reads_every}
    reads, copies, loops = of_a_token(model, eos_token_id=98, **how)
    assert (loops == LOOPS).all() and not copies
    assert reads == (LOOPS - 1) // reads_every + 2


@pytest.mark.parametrize("criterion", ["logit_margin", "latent_diff", "gate"])
@pytest.mark.some(1)
def test_rows_that_exit_apart_copy_nothing_that_waits(model, criterion):
    threshold = {"logit_margin": 0.5, "latent_diff": 0.2, "gate": 0.9}[criterion]
    _, copies, loops = of_a_token(model, 3, exit_criterion=criterion, exit_threshold=threshold)
    assert len(loops.unique()) > 1 and not copies


def test_what_is_counted():
    x = torch.arange(4)
    with Waits() as found:
        x.sum().item(), x.tolist(), bool(x[0] > 2), x[x > 1], x.nonzero(), x[[0, 1]], torch.tensor([1])
    assert found.reads.total() == 5 and found.copies.total() == 2
