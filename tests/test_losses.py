"""Every loss against its formula: naive, in float64, one row at a time, on full logits, with plain autograd."""

import copy
import weakref
from functools import wraps

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from looped_recipes.engine.compiling import fusible_cross_entropy_of
from modeling_looped import ExitRule, LoopedForCausalLM, cross_entropy
from modeling_looped.cross_entropy import shift
from modeling_looped.layers import rotary_tables
from modeling_looped.losses import exit_log_probabilities

from .helpers import quick_and_slow, random_ids, tiny_config, tiny_model
from .helpers_llama import make_looped, tokens, unroll


LOSSES = {
    "terminal": {},
    "terminal_penalty": {"norm_penalty": 0.03},
    "per_loop": {"loop_loss": "per_loop"},
    "per_loop_penalty": {"loop_loss": "per_loop", "norm_penalty": 0.03},
    "last_third": {"loop_loss": "last_third"},
    "last_third_penalty": {"loop_loss": "last_third", "norm_penalty": 0.03},
    "exit_weighted_raw": {"loop_loss": "exit_weighted", "exit_gate": "raw", "exit_entropy_weight": 0.2},
    "exit_weighted_normed": {"loop_loss": "exit_weighted", "exit_gate": "normed", "norm_penalty": 0.03},
    "exit_weighted_logits_raw": {"loop_loss": "exit_weighted_logits", "exit_gate": "raw"},
    "exit_weighted_logits_normed": {"loop_loss": "exit_weighted_logits", "exit_gate": "normed", "norm_penalty": 0.03},
    "terminal_anchor": {"scale_anchor": 0.3, "scale_anchor_target": 1.7},
    "per_loop_latent": {"loop_loss": "per_loop", "latent_loss": 0.4},
    "terminal_latent_anchor": {"latent_anchor": 0.4, "embedding_scale": 1.5},
    "exit_weighted_all": {
        "loop_loss": "exit_weighted",
        "exit_gate": "raw",
        "norm_penalty": 0.03,
        "scale_anchor": 0.3,
        "latent_loss": 0.2,
        "latent_anchor": 0.1,
    },
    "gate_raw": {"loop_loss": "gate", "exit_gate": "raw"},
    "gate_normed": {"loop_loss": "gate", "exit_gate": "normed"},
}
SOME_LOSSES = quick_and_slow(LOSSES, "terminal", "per_loop_penalty", "exit_weighted_normed", "gate_raw")
READOUTS = {
    "rmsnorm": {},
    "layernorm": {"readout_norm": "layernorm"},
    "raw": {"readout_norm": "none"},
    "final_only": {"readout_norm": "final_only"},
    "final_raw": {"readout_norm": "final_raw", "inter_loop_norm": "shared"},
    "alpha": {"readout_norm": "alpha", "num_readout_alphas": 2},
    "final_alpha": {"readout_norm": "final_alpha", "readout_alpha": 0.3, "readout_alpha_learned": False},
    "taper": {"readout_norm": "taper"},
    "softcap": {"logit_softcap": 2.0},
    "tied": {"tie_word_embeddings": True},
    "shared_norm": {"inter_loop_norm": "shared"},
    "coda": {"num_prelude_layers": 1, "num_coda_layers": 2},
    "coda_of_normed": {"num_coda_layers": 1, "coda_input": "norm"},
    "coda_of_projected": {"num_coda_layers": 1, "coda_input": "linear"},
}
RUNS = {
    "trained_depth": {},
    "shallower": {"num_loops": 2},
    "one_loop": {"num_loops": 1},
    "deeper": {"num_loops": 5},
    "depth_of_each_row": {"num_loops": [1, 3, 2]},
    "truncated": {"backprop_loops": 2},
    "truncated_depth_of_each_row": {"num_loops": [1, 4, 2], "backprop_loops": 2},
}
OTHER_READOUTS = ("final_raw", "alpha", "final_alpha", "taper")  # one function, which all losses call
OF_STATES = ("terminal_anchor", "per_loop_latent", "terminal_latent_anchor")  # nothing of a readout is in these
PENALISED = [loss for loss in LOSSES if loss not in ("terminal", "per_loop", "last_third")]  # they contain those
IGNORE = -100


# The reference: the blocks are the model's, all that a loss reads is written out


def rms_norm(norm, x):
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def readout_norm(model, x):
    norm = model.model.norm
    if model.config.readout_norm == "taper":
        return norm.gate * rms_norm(norm, x) + (1 - norm.gate) * norm.scale * norm.linear_weight * x
    if model.config.readout_norm != "layernorm":
        return rms_norm(norm, x)
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def states_of_row(model, ids, depth, backprop_loops):
    """H_1..H_depth of one row, [1, length, hidden] each, and what runs a section of blocks."""
    trunk = model.model
    x = trunk.embed_tokens(ids[None]) * model.config.embedding_scale
    positions = rotary_tables(*trunk.rotary_emb(x, position_ids=torch.arange(len(ids))[None]))

    def run(blocks, x):
        for block in blocks:
            x = block(x, site=trunk.site(0), position_embeddings=positions)
        return x

    first, states = run(trunk.prelude, x), []
    x = first
    for loop in range(depth):
        if backprop_loops is not None and loop < depth - backprop_loops:
            with torch.no_grad():
                states.append(run(trunk.core, x))
        else:
            states.append(run(trunk.core, x))
        x = readout_norm(model, states[-1]) if model.config.inter_loop_norm == "shared" else states[-1]
        if backprop_loops is not None and loop + 1 <= depth - backprop_loops:
            x = x.detach()
    return states, run, first if backprop_loops is None or depth <= backprop_loops else first.detach()


def read(model, x, depth):
    """What the head reads at loop `depth`."""
    kind, trained = model.config.readout_norm, depth >= model.config.num_loops
    if kind == "none" or (kind == "final_only" and not trained) or (kind == "final_raw" and trained):
        return x
    if kind == "alpha" or (kind == "final_alpha" and trained):
        part, scale = model.model.alpha_readout, x.square().mean(-1, keepdim=True).sqrt()
        loop = min(depth, model.config.num_readout_alphas) - 1
        alpha = model.config.readout_alpha if part.logit is None else torch.sigmoid(part.logit[loop])
        return part.log_scale[loop].exp() ** (1 - alpha) * scale**alpha * x / scale
    return readout_norm(model, x)


def logits_of_state(model, state, depth, run, softcapped=True):
    config, x = model.config, state
    if config.coda_input == "norm":
        x = readout_norm(model, x)
    elif config.coda_input == "linear":
        x = x @ model.model.coda_proj.weight.T
    x = read(model, run(model.model.coda, x), depth)
    logits = (x @ model.lm_head.weight.T)[0]
    return softcap(config, logits) if softcapped else logits


def softcap(config, logits):
    return logits if config.logit_softcap is None else config.logit_softcap * torch.tanh(logits / config.logit_softcap)


def cross_entropies(logits, targets):
    return logits.exp().sum(-1).log() - logits[torch.arange(len(targets)), targets]


def losses_of_states(model, first, states, targets, keep):
    """Sum over the labelled positions of one row."""
    config, depth, total = model.config, len(states), 0.0
    states = [state[0][keep] for state in states]
    mean_square = sum(state.square().mean(-1) for state in states) / depth
    total = config.norm_penalty * mean_square.sum()
    rms = mean_square.mean().sqrt()
    total = total + config.scale_anchor * len(mean_square) * (rms - config.scale_anchor_target) ** 2
    goal = (config.embedding_scale * model.model.embed_tokens.weight[targets[keep]]).detach()
    steps = zip([first[0][keep], *states], states)
    for k, (before, after) in enumerate(steps):
        step = (goal - before.detach()) / (depth - k)
        total = total + config.latent_loss * (after - before - step).square().mean(-1).sum() / depth
    return total + config.latent_anchor * (states[-1] - goal).square().mean(-1).sum()


def stop_and_stay(model, state):
    """lambda = sigmoid(gate) and 1 - lambda, [length] each; the second not by subtraction, which cancels."""
    if model.config.exit_gate == "normed":
        state = readout_norm(model, state)
    if model.config.loop_loss == "gate":
        state = state.detach()
    gate = (state @ model.exit_gate.weight.T + model.exit_gate.bias)[0, :, 0]
    return 1 / (1 + torch.exp(-gate)), 1 / (1 + torch.exp(gate))


def exit_distribution(model, states):
    """p_k, [length] for every loop."""
    left, probabilities = 1.0, []
    for state in states[:-1]:
        stop, stay = stop_and_stay(model, state)
        probabilities.append(left * stop)
        left = left * stay
    return [*probabilities, left * torch.ones(states[0].shape[1], dtype=states[0].dtype)]


def exit_weighted_logits(model, states, run):
    """sum_k p_k logits_k, [length, vocabulary]; a softcap acts on the sum."""
    logits = [logits_of_state(model, state, k, run, softcapped=False) for k, state in enumerate(states, start=1)]
    return softcap(model.config, sum(p[:, None] * z for p, z in zip(exit_distribution(model, states), logits)))


def reference_row(model, ids, targets, depth, backprop_loops=None):
    """Sum of the loss over the labelled positions of one row; and the cross-entropies, [loops, labelled positions]."""
    config, keep = model.config, targets != IGNORE
    states, run, first = states_of_row(model, ids, depth, backprop_loops)
    logits = [logits_of_state(model, state, k, run)[keep] for k, state in enumerate(states, start=1)]
    ce = [cross_entropies(z, targets[keep]) for z in logits]

    if config.loop_loss == "terminal":
        total = ce[-1].sum()
    elif config.loop_loss == "per_loop":
        total = sum(ce).sum() / depth
    elif config.loop_loss == "last_third":
        read = ce[2 * depth // 3 :]
        total = sum(read).sum() / len(read)
    elif config.loop_loss == "exit_weighted":
        p = [p[keep] for p in exit_distribution(model, states)]
        total = sum(
            (p[k] * ce[k]).sum() + config.exit_entropy_weight * (p[k] * p[k].log()).sum() for k in range(depth)
        )
    elif config.loop_loss == "exit_weighted_logits":
        total = cross_entropies(exit_weighted_logits(model, states, run)[keep], targets[keep]).sum()
    else:
        total = 0.0 * ce[-1].detach().sum()
        for k in range(1, depth):
            helped = (ce[k - 1] - ce[k]).clamp(min=0).detach()
            go_on = 1 / (1 + torch.exp(-50 * (helped - 0.005)))
            stop, stay = (p[keep] for p in stop_and_stay(model, states[k]))
            total = total - (go_on * stay.log() + (1 - go_on) * stop.log()).sum() / depth
    return total + losses_of_states(model, first, states, targets, keep), torch.stack(ce).detach()


def reference_loss(model, ids, labels, num_loops=None, backprop_loops=None, items=None):
    depths = num_loops if isinstance(num_loops, list) else [num_loops or model.config.num_loops] * len(ids)
    targets = torch.cat([labels[:, 1:], torch.full((len(labels), 1), IGNORE)], dim=1)
    rows = [reference_row(model, *row, backprop_loops) for row in zip(ids, targets, depths)]
    return sum(total for total, _ in rows) / ((targets != IGNORE).sum() if items is None else items)


# Helpers


def float64_model(**fields):
    return tiny_model(**{"attention_dropout": 0.0, **fields}).double()


def batch(batch_size=3, length=7, seed=0):
    """Ids, and labels of which some are ignored: at either end, in the middle, and different ones in every row."""
    ids = random_ids(batch_size, length, seed=seed)
    labels = ids.clone()
    labels[torch.rand(labels.shape, generator=torch.Generator().manual_seed(seed)) < 0.3] = IGNORE
    labels[0, -2:] = IGNORE
    return ids, labels


def gradients(model, loss):
    """Gradients of every parameter, zero where there is none."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def assert_same(model, found, wanted, rtol=1e-9, atol=1e-11):
    """Equal losses, equal gradients of every parameter."""
    torch.testing.assert_close(found.detach(), wanted.detach(), rtol=rtol, atol=atol, check_dtype=False)
    found, wanted = gradients(model, found), gradients(model, wanted)
    assert any(gradient.abs().max() > 1e-6 for gradient in wanted.values())
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


# The formulas


@pytest.mark.parametrize(
    ("loss", "readout"),
    [
        (loss, readout)
        for loss in PENALISED
        for readout in READOUTS
        if readout not in OTHER_READOUTS or loss in ("per_loop_penalty", "exit_weighted_logits_normed", "gate_raw")
        if loss not in OF_STATES or readout in ("rmsnorm", "coda")
    ],
)
@pytest.mark.covering
@pytest.mark.some(8)
def test_value_and_gradients_follow_the_formula(loss, readout):
    fields = {**LOSSES[loss], **READOUTS[readout]}
    if fields.get("exit_gate") == "normed" and readout in ("raw", "alpha"):
        fields["exit_gate"] = "raw"  # there is no norm to read
    model = float64_model(**fields)
    if readout == "taper":
        model.model.norm.gate.fill_(0.6)
        model.model.norm.scale.fill_(1.7)
    ids, labels = batch()
    assert_same(model, model(ids, labels=labels, output_logits=False).loss, reference_loss(model, ids, labels))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("loss", PENALISED)
@pytest.mark.covering
@pytest.mark.some(6)
def test_formula_at_every_depth(loss, run):
    model = float64_model(**LOSSES[loss], readout_norm="final_only", num_prelude_layers=1, num_coda_layers=1)
    ids, labels = batch()
    found = model(ids, labels=labels, output_logits=False, **RUNS[run]).loss
    wanted = reference_loss(model, ids, labels, **RUNS[run])
    if loss.startswith("gate") and run == "one_loop":  # there is no loop to go on to
        assert found == wanted == 0
    else:
        assert_same(model, found, wanted)


def test_losses_of_states_end_with_the_last_loop_of_a_row():
    model, (ids, labels) = float64_model(**LOSSES["exit_weighted_all"]), batch()
    depths = [1, 3, 2]
    found = model(ids, labels=labels, num_loops=depths, output_logits=False).loss
    assert_same(model, found, reference_loss(model, ids, labels, depths))


@pytest.mark.parametrize("loss", LOSSES)
def test_returned_logits_do_not_change_the_loss(loss):
    model = tiny_model(**LOSSES[loss])
    ids, labels = batch()
    assert_same(model, model(ids, labels=labels).loss, model(ids, labels=labels, output_logits=False).loss, 1e-4, 1e-6)


def own_loss(logits, labels, vocab_size, num_items_in_batch=None, **_):
    """As one writes it for any causal LM, with labels that it shifts."""
    targets = labels[:, 1:].flatten()
    items = (targets != IGNORE).sum() if num_items_in_batch is None else num_items_in_batch
    return 3 * F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum", ignore_index=IGNORE) / items


def test_a_loss_function_of_ones_own_is_called_or_refused():
    ids, labels = batch()
    model = tiny_model()
    expected = 3 * model(ids, labels=labels).loss
    model.loss_function = own_loss
    torch.testing.assert_close(model(ids, labels=labels).loss, expected)
    for arguments in ({"output_logits": False}, {"output_loop_losses": True}, {"logits_to_keep": 1}):
        with pytest.raises(ValueError, match="a loss_function was set, which reads logits"):
            model(ids, labels=labels, **arguments)
    model = tiny_model(loop_loss="per_loop")
    model.loss_function = own_loss
    with pytest.raises(ValueError, match="loop_loss='per_loop'"):
        model(ids, labels=labels)


def three_arguments(logits, labels, vocab_size):
    return own_loss(logits, labels, vocab_size)


def weighted_loss(logits, labels, vocab_size, token_weights=None, num_items_in_batch=None, **_):
    assert num_items_in_batch is None  # the caller gives none
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return losses @ (token_weights[:, 1:] if token_weights is not None else torch.ones(labels[:, 1:].shape)).flatten()


@pytest.mark.parametrize("function", [three_arguments, weighted_loss])
def test_a_loss_function_is_called_as_a_llama_calls_it(function):
    looped = make_looped(num_core_layers=2, num_loops=2)
    llama, ids = unroll(looped), tokens()
    given = {"token_weights": ids / 61} if function is weighted_loss else {}
    wanted = []
    for model in (llama, looped):
        model.loss_function = function
        wanted.append(model(ids, labels=ids, **given).loss)
    torch.testing.assert_close(wanted[1], wanted[0])
    assert function is three_arguments or not torch.isclose(looped(ids, labels=ids).loss, wanted[0])


@pytest.mark.parametrize("loss", SOME_LOSSES)
def test_another_label_may_be_ignored(loss):
    ids, labels = batch()
    model = float64_model(**LOSSES[loss])
    named = labels.masked_fill(labels == IGNORE, 3).masked_fill(labels == 5, 3)
    wanted = reference_loss(model, ids, named.masked_fill(named == 3, IGNORE))
    assert_same(model, model(ids, labels=named, ignore_index=3, output_logits=False).loss, wanted)


def test_a_llama_ignores_the_same_label():
    looped, ids = make_looped(num_core_layers=2, num_loops=2), tokens()
    of_llama = unroll(looped)(ids, labels=ids, ignore_index=int(ids[0, 3])).loss
    torch.testing.assert_close(looped(ids, labels=ids, ignore_index=int(ids[0, 3])).loss, of_llama)
    assert not torch.isclose(looped(ids, labels=ids).loss, of_llama)


@pytest.mark.parametrize("loss", LOSSES)
def test_loop_losses_are_the_means_of_every_depth(loss):
    model = float64_model(**LOSSES[loss])
    ids, labels = batch()
    output = model(ids, labels=labels, num_loops=[2, 3, 1], output_loop_losses=True)
    targets = torch.cat([labels[:, 1:], torch.full((len(labels), 1), IGNORE)], dim=1)
    rows = [reference_row(model, *row)[1] for row in zip(ids, targets, [2, 3, 1])]
    wanted = [torch.cat([row[k] for row in rows if k < len(row)]).mean() for k in range(3)]
    torch.testing.assert_close(output.loop_losses, torch.stack(wanted))
    assert not output.loop_losses.requires_grad
    labels[1] = IGNORE  # of the only row that runs a third loop
    found = model(ids, labels=labels, num_loops=[2, 3, 1], output_loop_losses=True).loop_losses
    assert found.isnan().tolist() == [False, False, True]


@pytest.mark.parametrize("loss", ["per_loop", "exit_weighted_raw", "gate_raw"])
def test_small_chunks_give_the_same(loss, monkeypatch):
    model = float64_model(**LOSSES[loss])
    ids, labels = batch()
    whole = gradients(model, model(ids, labels=labels).loss)
    calls = []
    decode = LoopedForCausalLM.logits_after_loop

    @wraps(decode)
    def spy(self, hidden, k):
        calls.append(len(hidden))
        return decode(self, hidden, k)

    monkeypatch.setattr(LoopedForCausalLM, "logits_after_loop", spy)
    monkeypatch.setitem(cross_entropy.LOGITS_PER_CHUNK, "cpu", 2 * model.config.vocab_size)
    chunked = gradients(model, model(ids, labels=labels).loss)
    assert max(calls) == 2 and sum(calls) == model.config.num_loops * int((labels[:, 1:] != IGNORE).sum())
    for name in whole:
        torch.testing.assert_close(chunked[name], whole[name], rtol=1e-10, atol=1e-12)


def test_gradients_of_many_chunks_are_summed_in_single_precision(monkeypatch):
    """A sum in bfloat16 stops growing at 256 times its terms."""
    monkeypatch.setitem(cross_entropy.LOGITS_PER_CHUNK, "cpu", 8)  # one token
    weight = torch.zeros(8, 4, dtype=torch.bfloat16, requires_grad=True)
    head = cross_entropy.Head(lambda hidden, loop: hidden @ weight.T, [weight])
    state, labels = torch.ones(1, 600, 4, dtype=torch.bfloat16), torch.zeros(600, dtype=torch.long)
    weights = torch.ones(1, 600)
    total, _ = cross_entropy.weighted_cross_entropy(head, [state], torch.arange(600), labels, weights, None, 8)
    total.backward()
    of_label = torch.tensor([1.0] + [0.0] * 7)
    expected = (600 * (1 / 8 - of_label)).bfloat16()[:, None].expand(-1, 4)
    torch.testing.assert_close(weight.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", [cross_entropy.cross_entropy_of, fusible_cross_entropy_of])
def test_cross_entropy_of_logits(way, dtype):
    """Rows that are near to sure of their label too, whose gradient is a small difference."""
    rows, vocab_size = 40, 99
    logits, labels = 4 * torch.randn(rows, vocab_size, dtype=torch.float64), torch.randint(vocab_size, (rows,))
    logits[torch.arange(10), labels[:10]] += 20
    logits, weights = logits.to(dtype), torch.rand(rows, dtype=torch.promote_types(dtype, torch.float32))
    exact = logits.double().clone().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    (expected * weights).sum().backward()
    gradient = torch.full_like(logits, torch.nan)
    losses = way(logits, labels, weights, gradient)
    assert losses.dtype == weights.dtype
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    # of a sure row w p - w is a difference of numbers near to 1, in float32
    rounding = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-7} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(gradient, exact.grad.to(dtype), **rounding)
    assert torch.equal(way(logits, labels, weights, None), losses)


# transformers' conventions


@pytest.mark.parametrize("output_logits", [True, False])
@pytest.mark.parametrize(
    "loss", ["terminal", "terminal_penalty", "per_loop_penalty", "exit_weighted_normed", "gate_normed"]
)
class TestConventions:
    @pytest.fixture
    def model(self, loss):
        return float64_model(**LOSSES[loss])

    @pytest.fixture
    def tolerance(self, loss, output_logits):
        """The plain loss, on logits that are returned, is transformers' own, which is in fp32 whatever it is given."""
        return (1e-5, 1e-7) if loss == "terminal" and output_logits else (1e-9, 1e-11)

    @pytest.mark.covering
    def test_shifted_labels_are_taken_as_they_are(self, model, output_logits, tolerance):
        ids, labels = batch()
        longer = torch.cat([labels, torch.full((len(labels), 1), IGNORE)], dim=1)
        shifted = longer[:, 1:]
        assert not shifted.is_contiguous()  # as a slice of the Trainer's is not
        found = model(ids, shift_labels=shifted, output_logits=output_logits).loss
        assert_same(model, found, reference_loss(model, ids, labels), *tolerance)
        both = model(ids, labels=ids, shift_labels=shifted, output_logits=output_logits).loss
        torch.testing.assert_close(both, found, rtol=0, atol=0)

    @pytest.mark.parametrize("as_tensor", [False, True])
    @pytest.mark.covering
    def test_num_items_is_the_denominator(self, model, output_logits, as_tensor, tolerance):
        ids, labels = batch()
        items = torch.tensor(29) if as_tensor else 29
        found = model(ids, labels=labels, num_items_in_batch=items, output_logits=output_logits).loss
        assert_same(model, found, reference_loss(model, ids, labels, items=29), *tolerance)

    @pytest.mark.covering
    def test_the_share_of_a_process_in_the_labels_may_be_below_one(self, model, output_logits):
        """As half of the single label of two processes, whose mean is then that label's loss."""
        ids, labels = batch()
        one, half = (
            model(ids, labels=labels, num_items_in_batch=torch.tensor(items), output_logits=output_logits).loss
            for items in (1.0, 0.5)
        )
        torch.testing.assert_close(half, 2 * one)

    @pytest.mark.covering
    def test_accumulated_micro_batches_are_the_batch(self, model, output_logits, tolerance):
        ids, labels = batch(batch_size=4)
        items = int((labels[:, 1:] != IGNORE).sum())
        whole = gradients(model, model(ids, labels=labels, output_logits=output_logits).loss)
        model.zero_grad()
        for rows in (slice(0, 1), slice(1, 4)):
            output = model(ids[rows], labels=labels[rows], num_items_in_batch=items, output_logits=output_logits)
            output.loss.backward()
        for name, parameter in model.named_parameters():
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found, whole[name], rtol=tolerance[0], atol=tolerance[1])

    @pytest.mark.parametrize("items", [None, 0, 13])
    @pytest.mark.covering
    def test_no_labels_no_loss(self, model, output_logits, items):
        ids, labels = batch()
        labels = torch.full_like(labels, IGNORE)
        loss = model(ids, labels=labels, num_items_in_batch=items, output_logits=output_logits).loss
        assert loss == 0
        assert all(not gradient.any() for gradient in gradients(model, loss).values())

    def test_a_row_without_labels_counts_nowhere(self, model, output_logits, tolerance):
        ids, labels = batch()
        labels[1] = IGNORE
        found = model(ids, labels=labels, output_logits=output_logits).loss
        assert_same(model, found, model(ids[[0, 2]], labels=labels[[0, 2]], output_logits=False).loss, *tolerance)

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    @pytest.mark.covering
    def test_evaluation_takes_no_gradients(self, model, output_logits, mode, monkeypatch):
        ids, labels = batch()
        wanted = model(ids, labels=labels, output_logits=output_logits).loss.detach()

        def refuse(*args, **kwargs):
            raise AssertionError("a gradient is taken")

        monkeypatch.setattr(torch.autograd, "grad", refuse)
        with mode():
            found = model(ids, labels=labels, output_logits=output_logits).loss
        assert not found.requires_grad
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("loss", SOME_LOSSES)
def test_padding_on_the_left_is_no_token(loss):
    model = float64_model(**LOSSES[loss])
    ids, labels = batch(batch_size=2)
    padded_ids = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], dim=1)
    padded_labels = torch.cat([torch.full((2, 3), IGNORE), labels], dim=1)
    labels[:, 0] = padded_labels[:, 3] = IGNORE  # or the last pad would learn to predict the first token
    mask = torch.cat([torch.zeros(2, 3, dtype=torch.long), torch.ones_like(ids)], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = {"input_ids": padded_ids, "attention_mask": mask, "position_ids": positions, "labels": padded_labels}
    found = model(**padded, output_logits=False).loss
    assert_same(model, found, reference_loss(model, ids, labels))


# Exit probabilities


def test_exit_probabilities_sum_to_one_in_half_precision():
    values = torch.tensor([-30.0, -6.25, 0.0, 6.25, 30.0])
    gates = torch.cartesian_prod(*[values] * 4).T  # [loops, combinations]
    stop, stay = 1 / (1 + torch.exp(-gates.double())), 1 / (1 + torch.exp(gates.double()))
    wanted = [stop[0], stop[1] * stay[0], stop[2] * stay[1] * stay[0], stay[2] * stay[1] * stay[0]]
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        found = exit_log_probabilities(gates.to(dtype), 3).exp()
        torch.testing.assert_close(found.sum(0), torch.ones_like(found[0]), rtol=1e-6, atol=0)
        torch.testing.assert_close(found.double(), torch.stack(wanted), rtol=2e-5, atol=0)


@pytest.mark.parametrize("bias", [-30.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_model_that_never_wants_to_stop_does_at_the_last_loop(dtype, bias):
    model = tiny_model(exit_gate="normed").to(dtype)
    with torch.no_grad():
        model.exit_gate.weight.zero_()
        model.exit_gate.bias.fill_(bias)
    p = model(random_ids(3, 5), num_loops=[1, 4, 3], output_exit_probabilities=True).exit_probabilities
    wanted = torch.zeros(3, 5, 4)
    for row, last in enumerate([0, 3, 2]):
        wanted[row, :, last if bias < 0 else 0] = 1
    torch.testing.assert_close(p.float(), wanted, rtol=0, atol=1e-6)


def test_exit_probabilities_of_a_model_follow_the_formula():
    model = float64_model(exit_gate="normed")
    ids = random_ids(2, 5)
    found = model(ids, num_loops=[4, 2], output_exit_probabilities=True).exit_probabilities
    for row, depth in enumerate([4, 2]):
        states, _, _ = states_of_row(model, ids[row], depth, None)
        wanted = exit_distribution(model, states) + [torch.zeros(5, dtype=torch.float64)] * (4 - depth)
        torch.testing.assert_close(found[row], torch.stack(wanted, dim=-1))


@pytest.mark.parametrize("gate", ["raw", "normed"])
def test_gate_loss_trains_the_gate_alone(gate):
    model = tiny_model(loop_loss="gate", exit_gate=gate)
    ids, labels = batch()
    model(ids, labels=labels).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert trained == {"exit_gate.weight", "exit_gate.bias"}


# Under the tools of training


@pytest.mark.parametrize("loss", SOME_LOSSES)
@pytest.mark.parametrize("backprop_loops", [None, 1])
@pytest.mark.covering
def test_bfloat16_autocast_stays_near(loss, backprop_loops):
    model = tiny_model(**LOSSES[loss])
    ids, labels = batch(batch_size=8, length=16)
    wanted = model(ids, labels=labels, backprop_loops=backprop_loops).loss
    with torch.autocast("cpu", torch.bfloat16):
        found = model(ids, labels=labels, backprop_loops=backprop_loops).loss
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=0.03, atol=0)  # 0.003 at most
    found, wanted = gradients(model, found), gradients(model, wanted)
    for name, gradient in wanted.items():
        assert found[name].dtype == gradient.dtype
        if gradient.norm() > 1e-4:
            # 0.995 at least
            assert torch.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0) > 0.97, name


def test_operations_are_counted_by_torch():
    """As many as of logits that are kept, each compared with a label."""
    model, ids = float64_model(loop_loss="per_loop"), random_ids(2, 6)
    with FlopCounterMode(display=False) as ours:
        model(ids, shift_labels=ids, output_logits=False, use_cache=False).loss.backward()
    with FlopCounterMode(display=False) as naive:
        logits = torch.stack(model(ids, output_loop_logits=True, output_logits=False, use_cache=False).loop_logits)
        torch.nn.functional.cross_entropy(logits.flatten(0, 2), ids.flatten().repeat(len(logits))).backward()
    assert ours.get_total_flops() == naive.get_total_flops() > 0


@pytest.mark.parametrize("loop_embedding", ["none", "learned"])
def test_operations_of_loops_without_gradients_are_counted_by_torch(loop_embedding):
    """A loop has twice as many in the backward pass as in the forward pass, where attention keeps its scores: of a
    kernel that makes them again torch counts that too, since 2.15 also on a CPU."""
    model, ids = float64_model(injection="add", loop_embedding=loop_embedding), random_ids(2, 6)
    model.set_attn_implementation("eager")

    def operations(backward: bool, **arguments) -> int:
        with FlopCounterMode(display=False) as counter:
            loss = model(ids, shift_labels=ids, output_logits=False, use_cache=False, **arguments).loss
            if backward:
                loss.backward()
        return counter.get_total_flops()

    of_one_loop = operations(False, num_loops=4) - operations(False, num_loops=3)
    saved = operations(True, num_loops=4) - operations(True, num_loops=4, backprop_loops=1)
    assert saved == 3 * 2 * of_one_loop > 0


@pytest.mark.parametrize("exits", [{}, {"exit_rule": ExitRule("kl", 0.0)}], ids=["plain", "exits"])
def test_numbers_of_numpy_keep_the_logits_of_those_of_python(exits):
    model, (ids, _) = float64_model(), batch()
    for of_numpy, of_python in ((np.int64(2), 2), (np.array([1, 3]), torch.tensor([1, 3]))):
        kept, expected = (model(ids, logits_to_keep=keep, **exits).logits for keep in (of_numpy, of_python))
        assert torch.equal(kept, expected) and kept.shape[1] == 2


def test_logits_in_another_order_change_no_loss():
    model, (ids, labels) = float64_model(), batch()
    wanted = model(ids, labels=labels).loss
    backwards = torch.arange(ids.shape[1]).flip(0)
    out = model(ids, labels=labels, logits_to_keep=backwards)
    torch.testing.assert_close(out.loss.double(), wanted.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(out.logits, model(ids).logits[:, backwards])


@pytest.mark.parametrize("loss", SOME_LOSSES)
@pytest.mark.parametrize("by_mask", [False, True])
def test_labels_of_the_logits_that_are_kept(loss, by_mask):
    """As ms-swift gives them: those of a number of last positions or, of one row, those of labelled positions, which
    lie one before their labels."""
    model, (ids, labels) = float64_model(**LOSSES[loss]), batch()
    labels[:, :3] = IGNORE
    keep = len(labels[0]) - 2
    kept = labels[:, -keep:]
    if by_mask:
        ids, labels = ids[1:2], labels[1:2]
        is_labelled = labels[0] != IGNORE
        kept = F.pad(labels[:, is_labelled], (1, 0), value=IGNORE)
        keep = F.pad(is_labelled[1:], (0, 1), value=True)
    wanted, found = model(ids, labels=labels), model(ids, labels=kept, logits_to_keep=keep)
    torch.testing.assert_close(found.loss.double(), wanted.loss.double(), rtol=1e-6, atol=0)
    assert found.logits.shape[:2] == kept.shape
    already = model(ids, shift_labels=shift(kept), logits_to_keep=keep).loss
    torch.testing.assert_close(already, found.loss, rtol=0, atol=0)
    with pytest.raises(ValueError, match="one label per token, or per token of logits_to_keep"):
        model(ids, labels=kept[:, 1:], logits_to_keep=keep)


@pytest.mark.parametrize("loss", SOME_LOSSES)
def test_gradient_checkpointing_changes_nothing(loss):
    model = float64_model(**LOSSES[loss], num_prelude_layers=1, num_coda_layers=1).train()
    ids, labels = batch()
    plain = model(ids, labels=labels, output_logits=False).loss
    wanted = gradients(model, plain)
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    checkpointed = model(ids, labels=labels, output_logits=False).loss
    torch.testing.assert_close(checkpointed, plain, rtol=0, atol=0)
    for name, gradient in gradients(model, checkpointed).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss", PENALISED)
@pytest.mark.parametrize("run", ["trained_depth", "truncated_depth_of_each_row"])
@pytest.mark.covering
def test_head_with_hooks_is_left_to_autograd(loss, run):
    """As a head is that FSDP shards by itself: its weights are there only while it runs."""
    model = float64_model(**LOSSES[loss])
    model.lm_head.register_forward_pre_hook(lambda module, arguments: None)
    ids, labels = batch()
    found = model(ids, labels=labels, output_logits=False, **RUNS[run]).loss
    assert_same(model, found, reference_loss(model, ids, labels, **RUNS[run]))


@pytest.mark.parametrize("loss", [name for name in LOSSES if not name.startswith("gate")])
@pytest.mark.parametrize("output_logits", [True, False])
@pytest.mark.covering
@pytest.mark.some(5)
def test_adapter_on_the_head_is_used_and_trained(loss, output_logits):
    base = float64_model(**LOSSES[loss])
    merged = copy.deepcopy(base)
    settings = peft.LoraConfig(target_modules=["lm_head"], r=3, lora_alpha=6, init_lora_weights=False)
    adapted = peft.get_peft_model(base, settings).double().eval()
    head = base.lm_head
    a, b = head.lora_A["default"].weight, head.lora_B["default"].weight
    with torch.no_grad():
        merged.lm_head.weight += 2 * b @ a
    ids, labels = batch()
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if loss == "terminal" and output_logits else {"rtol": 1e-9, "atol": 1e-11}

    found, wanted = adapted(input_ids=ids, labels=labels, output_logits=output_logits).loss, None
    wanted = reference_loss(merged, ids, labels)
    torch.testing.assert_close(found.double(), wanted, **tolerance)
    gradient = gradients(merged, wanted)["lm_head.weight"]
    found.backward()
    torch.testing.assert_close(a.grad, 2 * b.T @ gradient, **tolerance)
    torch.testing.assert_close(b.grad, 2 * gradient @ a.T, **tolerance)
    assert head.base_layer.weight.grad is None


class Tempered(LoopedForCausalLM):
    """With a readout of its own, which it learns."""

    def __init__(self, config):
        super().__init__(config)
        self.sharpness = torch.nn.Parameter(torch.tensor(1.5))

    def logits(self, hidden_states):
        return super().logits(hidden_states) * self.sharpness


@pytest.mark.parametrize("loss", ["per_loop", "last_third"])
def test_a_readout_that_a_subclass_learns_is_trained(loss):
    model = tiny_model(Tempered, loop_loss=loss, num_loops=3)
    ids = random_ids(2, 9)
    model(ids, labels=ids).loss.backward()
    found = model.sharpness.grad.clone()
    model.zero_grad()
    logits = model(ids, output_loop_logits=True).loop_logits
    counted = logits if loss == "per_loop" else logits[2:]
    terms = [torch.nn.functional.cross_entropy(each[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) for each in counted]
    torch.stack(terms).mean().backward()
    torch.testing.assert_close(found, model.sharpness.grad)


@pytest.mark.parametrize("method", ["logits", "softcapped", "logits_after_loop", "_read_out", "readout", "_read"])
def test_a_replaced_part_of_the_readout_is_trained(method):
    model, (ids, labels) = float64_model(loop_loss="per_loop"), batch()
    owner = model if hasattr(model, method) else model.model
    sharpness, run = torch.nn.Parameter(torch.tensor(1.5)), getattr(owner, method)
    setattr(owner, method, lambda *arguments, **named: sharpness * run(*arguments, **named))
    (found,) = torch.autograd.grad(model(ids, labels=labels, output_logits=False).loss, sharpness)
    logits = torch.stack(model(ids, output_loop_logits=True).loop_logits)[:, :, :-1]
    targets = labels[:, 1:].expand(len(logits), -1, -1)
    loss = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), ignore_index=IGNORE)
    torch.testing.assert_close(found, torch.autograd.grad(loss, sharpness)[0])


def test_a_norm_that_runs_otherwise_is_left_to_autograd():
    model, ids = tiny_model(loop_loss="per_loop", num_loops=3), random_ids(2, 9)
    shift, run = torch.nn.Parameter(torch.zeros(model.config.hidden_size)), model.model.norm.forward
    model.model.norm.forward = lambda x: run(x) + shift
    model(ids, labels=ids).loss.backward()
    assert shift.grad is not None and shift.grad.norm() > 0


@pytest.mark.parametrize("loss", ["terminal", "per_loop", "last_third"])
def test_a_gradient_passes_the_hooks_of_a_parameter_once(loss):
    model, ids = tiny_model(loop_loss=loss, num_loops=3), random_ids(2, 9)
    watched = [model.lm_head.weight, model.model.norm.weight, model.model.core[0].mlp.up_proj.weight]
    model(ids, labels=ids).loss.backward()
    expected = [weight.grad * 0.5 for weight in watched]
    model.zero_grad()
    for weight in watched:
        weight.register_hook(lambda gradient: gradient * 0.5)
    model(ids, labels=ids).loss.backward()
    torch.testing.assert_close([weight.grad for weight in watched], expected)


def test_second_derivatives_of_a_loss_over_loops_are_refused():
    model, ids = tiny_model(loop_loss="per_loop", num_loops=2, attn_implementation="eager"), random_ids(2, 9)
    loss = model(ids, labels=ids).loss
    with pytest.raises(NotImplementedError, match="no second derivatives: compute it from output_loop_logits=True"):
        torch.autograd.grad(loss, model.lm_head.weight, create_graph=True)


@pytest.mark.parametrize("loss", ["terminal", "per_loop", "last_third", "exit_weighted_all", "gate_raw"])
def test_losses_under_transforms_of_torch(loss):
    """There the positions without a label stay in the sums, with weight 0."""
    model, (ids, labels) = float64_model(**LOSSES[loss]), batch()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def of(parameters):
        return torch.func.functional_call(model, parameters, (ids,), {"labels": labels}).loss

    found, found_loss = torch.func.grad_and_value(of)(parameters)
    expected_loss = model(ids, labels=labels).loss
    torch.testing.assert_close(found_loss, expected_loss.detach())
    torch.testing.assert_close(found, gradients(model, expected_loss))


@pytest.mark.filterwarnings("ignore")  # torch.ao is on its way out, and has no gradients
def test_the_loss_of_a_model_whose_layers_are_int8():
    model, ids = tiny_model(loop_loss="per_loop", num_loops=3), random_ids(2, 9)
    model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    outputs = model(ids, labels=ids, output_loop_logits=True)
    terms = [
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        for logits in outputs.loop_logits
    ]
    # rounded to the range of all tokens of a product, which are fewer here
    torch.testing.assert_close(outputs.loss, torch.stack(terms).mean(), rtol=1e-3, atol=0.0)


def test_scaled_loss_scales_the_gradients():
    model = float64_model(loop_loss="per_loop")
    ids, labels = batch()
    once = gradients(model, model(ids, labels=labels).loss)
    scaled = gradients(model, 1024 * model(ids, labels=labels).loss)
    for name in once:
        torch.testing.assert_close(scaled[name], 1024 * once[name])


# Memory


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive: what an allocator would be asked for, without its noise."""

    def __init__(self):
        super().__init__()
        self.bytes = self.peak = self.largest = 0
        self.alive = {}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for tensor in tree_iter(result):
            if torch.is_tensor(tensor):
                self.count(tensor)
        return result

    def count(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self.largest = max(self.largest, tensor.numel())
        if key not in self.alive:
            self.alive[key] = weakref.ref(storage, lambda _: self.free(key, size))
            self.bytes += size
            self.peak = max(self.peak, self.bytes)

    def free(self, key, size):
        del self.alive[key]
        self.bytes -= size


def memory_of_a_step(ids, output_logits, train=True, hooked=False, **fields):
    torch.manual_seed(0)
    config = tiny_config(vocab_size=8192, num_loops=4, max_position_embeddings=256, **fields)
    model = LoopedForCausalLM(config)
    if hooked:
        model.lm_head.register_forward_pre_hook(lambda module, arguments: None)
    with LiveTensors() as live, torch.set_grad_enabled(train):
        loss = model(ids, labels=ids, output_logits=output_logits).loss
        if train:
            loss.backward()
    return live


@pytest.mark.parametrize("output_logits", [True, False])
@pytest.mark.parametrize("loss", ["per_loop", "exit_weighted_raw", "gate_raw"])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.covering
@pytest.mark.some(1)
def test_logits_of_all_loops_are_never_held(loss, output_logits, train):
    ids = random_ids(4, 128, vocab_size=8192)
    terminal = memory_of_a_step(ids, output_logits, train)
    found = memory_of_a_step(ids, output_logits, train, **LOSSES[loss])
    logits_of_one_loop = ids.numel() * 8192
    assert terminal.peak > logits_of_one_loop  # the measure sees what it is to see
    assert found.largest <= logits_of_one_loop
    assert found.peak <= 1.15 * terminal.peak


@pytest.mark.parametrize("loss", ["per_loop", "exit_weighted_raw", "gate_raw"])
@pytest.mark.some(1)
def test_head_with_hooks_makes_its_logits_again(loss):
    ids = random_ids(4, 128, vocab_size=8192)
    terminal = memory_of_a_step(ids, False, hooked=True)
    found = memory_of_a_step(ids, False, hooked=True, **LOSSES[loss])
    assert found.peak <= 1.15 * terminal.peak


def test_chunks_bound_the_memory(monkeypatch):
    """Without returned logits, a step holds the logits of a chunk, however many tokens there are."""
    monkeypatch.setitem(cross_entropy.LOGITS_PER_CHUNK, "cpu", 32 * 8192)
    for rows in (1, 4):
        live = memory_of_a_step(random_ids(rows, 128, vocab_size=8192), False, loop_loss="per_loop")
        assert live.largest <= 32 * 8192


def test_the_measure_of_memory_sees_all_loops():
    """The same step, written so that it holds the logits of every loop, is found out."""
    ids = random_ids(4, 128, vocab_size=8192)
    terminal = memory_of_a_step(ids, True)
    torch.manual_seed(0)
    model = LoopedForCausalLM(tiny_config(vocab_size=8192, num_loops=4, max_position_embeddings=256))
    with LiveTensors() as live:
        logits = model(ids, output_loop_logits=True).loop_logits
        ce = [torch.nn.functional.cross_entropy(z[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) for z in logits]
        (sum(ce) / 4).backward()
    assert live.peak > 2 * terminal.peak


# The loss of exit-weighted logits


@pytest.mark.parametrize("num_loops", [3, 1, [1, 4, 2]])
def test_exit_weighted_logits_are_the_mean_of_the_logits_under_the_exit_distribution(num_loops):
    fields = {"loop_loss": "exit_weighted_logits", "exit_gate": "normed", "readout_norm": "final_raw"}
    model = float64_model(**fields, num_coda_layers=1)
    ids, labels = batch()
    outputs = model(
        ids,
        labels=labels,
        num_loops=num_loops,
        output_exit_logits=True,
        output_exit_probabilities=True,
        output_loop_logits=True,
        output_loop_losses=True,
    )
    wanted = sum(p[..., None] * z for p, z in zip(outputs.exit_probabilities.unbind(-1), outputs.loop_logits))
    torch.testing.assert_close(outputs.exit_logits, wanted)
    targets = labels[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(wanted[:, :-1].flatten(0, 1), targets, ignore_index=IGNORE)
    torch.testing.assert_close(outputs.loss, loss)
    deepest = torch.nn.functional.cross_entropy(
        outputs.loop_logits[0][:, :-1].flatten(0, 1), targets, ignore_index=IGNORE
    )
    torch.testing.assert_close(outputs.loop_losses[0], deepest)
    kept = model(ids, num_loops=num_loops, output_exit_logits=True, logits_to_keep=2)
    assert kept.loop_logits is None and kept.exit_probabilities is None
    torch.testing.assert_close(kept.exit_logits, wanted[:, -2:])


def test_exit_weighted_logits_take_the_head_once_and_in_chunks(monkeypatch):
    """Never the logits of all loops, nor of all tokens."""
    model = float64_model(loop_loss="exit_weighted_logits", exit_gate="raw", num_loops=5)
    ids, labels = batch()
    whole = gradients(model, model(ids, labels=labels, output_logits=False).loss)
    rows, logits_of = [], LoopedForCausalLM.logits

    @wraps(logits_of)
    def spy(self, hidden):
        rows.append(len(hidden))
        return logits_of(self, hidden)

    monkeypatch.setattr(LoopedForCausalLM, "logits", spy)
    monkeypatch.setitem(cross_entropy.LOGITS_PER_CHUNK, "cpu", 4 * model.config.vocab_size)
    chunked = gradients(model, model(ids, labels=labels, output_logits=False).loss)
    assert max(rows) == 4 and sum(rows) == int((labels[:, 1:] != IGNORE).sum())
    for name in whole:
        torch.testing.assert_close(chunked[name], whole[name], rtol=1e-10, atol=1e-12)


def test_exit_weighted_logits_need_a_gate():
    with pytest.raises(ValueError, match="output_exit_logits needs an exit gate"):
        tiny_model()(random_ids(1, 4), output_exit_logits=True)


# Losses of states


def test_a_scale_anchor_holds_each_row_at_its_target():
    """At the target there is no loss, and rows do not make up for each other."""
    model = float64_model(scale_anchor=1.0, num_loops=1)
    ids = random_ids(2, 6)
    states = model(ids, output_loop_hidden_states=True).loop_hidden_states[0][:, :-1]
    squares = states.square().mean((1, 2))
    plain = float64_model(num_loops=1)(ids, labels=ids, output_logits=False).loss
    for target in (squares.mean().sqrt().item(), squares[0].sqrt().item()):
        model.config.scale_anchor_target = target
        found = model(ids, labels=ids, output_logits=False).loss - plain
        torch.testing.assert_close(found, (squares.sqrt() - target).square().mean())
        assert found > 1e-6


def test_a_latent_loss_is_zero_for_states_that_walk_straight_to_the_next_embedding():
    """Blocks whose output is the whole way to the target in equal shares."""
    model = float64_model(latent_loss=1.0, latent_anchor=1.0, num_loops=4, num_core_layers=1)
    ids = random_ids(2, 6)
    embeddings = model.model.embed_tokens.weight
    goal = embeddings[torch.cat([ids[:, 1:], ids[:, :1]], dim=1)]
    step = (goal - embeddings[ids]) / 4
    model.model.core[0].forward = lambda x, *args, **kwargs: x + step
    walking = model(ids, labels=ids, output_logits=False).loss

    def without_latent_losses():
        model.config.latent_loss = model.config.latent_anchor = 0.0
        return model(ids, labels=ids, output_logits=False).loss

    torch.testing.assert_close(walking, without_latent_losses())
    step = step * 1.1
    model.config.latent_loss = 1.0
    assert model(ids, labels=ids, output_logits=False).loss > without_latent_losses() + 1e-4


@pytest.mark.parametrize("depths", [4, [4, 2, 1]], ids=str)
def test_a_latent_loss_leaves_what_came_before_the_last_loops_alone(depths):
    """h_0 of a row is a constant like the states after it, where its first loop has no gradient."""
    model, ids = float64_model(latent_loss=1.0, num_loops=4, tie_word_embeddings=False), random_ids(3, 6)
    given = []
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: given.append(output))
    loss = model(ids, labels=ids, num_loops=depths, backprop_loops=1, output_logits=False).loss
    (gradient,) = torch.autograd.grad(loss, given[0], allow_unused=True)  # of inputs; targets are looked up after them
    if depths == 4:
        assert gradient is None  # and not 0, at the cost of a backward pass
    else:
        assert gradient.flatten(1).any(1).tolist() == [False, False, True]


def test_targets_of_states_are_embeddings_without_noise():
    """NEFTune adds noise to embeddings in training; the losses of states compare with the table itself."""
    from transformers.integrations.neftune import neftune_post_forward_hook

    model, (_, labels) = float64_model(latent_anchor=0.1), batch()
    model.train()
    table = model.get_input_embeddings()
    wanted = table(labels.clamp(min=0))
    table.neftune_noise_alpha = 5
    table.register_forward_hook(neftune_post_forward_hook)
    assert not torch.equal(table(labels.clamp(min=0)), wanted)
    torch.testing.assert_close(model._latent_targets(labels), model.model.scaled(wanted), rtol=0, atol=0)
    assert table.training
