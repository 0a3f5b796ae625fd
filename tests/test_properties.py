"""What holds for every config of the family, tested on random ones, in float64."""

import copy
import tempfile
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache

from looped_eval.halting.calibration import never
from looped_recipes.engine.distributed import gradients_may_be_missing
from modeling_looped import LoopedForCausalLM
from modeling_looped.exit_criteria import CRITERIA

from .helpers import initial_state_of, random_ids
from .strategies import MAX_LENGTH, VOCAB_SIZE, cuts, depths, examples, looped_configs, random_model


CACHES = {
    "of the config": lambda config: DynamicCache(config=config),
    "without arguments": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=MAX_LENGTH),
}


def ids_of(batch_size: int, length: int) -> torch.LongTensor:
    return random_ids(batch_size, length, VOCAB_SIZE)


def assert_equal_to_rounding(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def run_in_pieces(model, ids, pieces: list[int], cache, num_loops, initial_state=None, **kwargs) -> torch.Tensor:
    logits, start = [], 0
    for piece in pieces:
        part = slice(start, start + piece)
        state = None if initial_state is None else initial_state[:, part]
        logits.append(
            model(ids[:, part], past_key_values=cache, num_loops=num_loops, initial_state=state, **kwargs).logits
        )
        start += piece
    return torch.cat(logits, dim=1)


@examples(25)
@given(st.data(), looped_configs(), st.sampled_from(sorted(CACHES)), st.integers(2, 12))
def test_token_by_token_with_a_cache_equals_no_cache(data, config, kind, length):
    model, ids = random_model(config), ids_of(2, length)
    num_loops, state = data.draw(depths(config)), initial_state_of(model, 2, length)
    with torch.no_grad():
        whole = model(ids, num_loops=num_loops, initial_state=state, use_cache=False).logits
    cached = run_in_pieces(model, ids, [1] * length, CACHES[kind](config), num_loops, state)
    assert_equal_to_rounding(cached, whole)


@examples(25)
@given(st.data(), looped_configs(), st.sampled_from(sorted(CACHES)), st.integers(2, 14))
def test_a_prompt_in_pieces_equals_the_whole(data, config, kind, length):
    """With rows of mixed depth too."""
    model, ids = random_model(config), ids_of(3, length)
    num_loops = data.draw(st.one_of(depths(config), st.lists(depths(config), min_size=3, max_size=3)))
    pieces, state = data.draw(cuts(length)), initial_state_of(model, 3, length)
    with torch.no_grad():
        whole = model(ids, num_loops=num_loops, initial_state=state, use_cache=False).logits
    chunked = run_in_pieces(model, ids, pieces, CACHES[kind](config), num_loops, state)
    assert_equal_to_rounding(chunked, whole)


@examples(25)
@given(st.data(), looped_configs(), st.integers(1, 9), st.integers(1, 5))
def test_a_left_padded_row_equals_the_row_alone(data, config, length, padding):
    model, ids = random_model(config), ids_of(2, padding + length)
    num_loops = data.draw(depths(config))
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # as generate passes them
    with torch.no_grad():
        alone = model(ids[1:, padding:], num_loops=num_loops).logits
        batch = model(ids, attention_mask=mask, position_ids=positions, num_loops=num_loops).logits
        by_mask_alone = model(ids, attention_mask=mask, num_loops=num_loops).logits
    assert_equal_to_rounding(batch[1:, padding:], alone)
    # here RoPE counts the padding too, and its tables are float32 in transformers
    torch.testing.assert_close(by_mask_alone[1:, padding:], alone, rtol=1e-5, atol=1e-5)

    cache, pieces, start = DynamicCache(config=config), [], 0
    for piece in data.draw(cuts(padding + length)):
        part = slice(start, start + piece)
        start += piece
        with torch.no_grad():
            out = model(
                ids[:, part],
                attention_mask=mask[:, :start],
                position_ids=positions[:, part],
                past_key_values=cache,
                num_loops=num_loops,
            )
        pieces.append(out.logits)
    assert_equal_to_rounding(torch.cat(pieces, dim=1)[1:, padding:], alone)


@examples(25)
@given(st.data(), looped_configs(), st.integers(1, 7))
def test_rows_of_mixed_depth_equal_rows_alone(data, config, length):
    model, ids = random_model(config), ids_of(4, length)
    row_depths = data.draw(st.lists(depths(config), min_size=4, max_size=4))
    state = initial_state_of(model, 4, length)
    with torch.no_grad():
        batch = model(ids, num_loops=row_depths, initial_state=state, use_cache=False).logits
        for row, depth in enumerate(row_depths):
            own_state = None if state is None else state[row : row + 1]
            alone = model(ids[row : row + 1], num_loops=depth, initial_state=own_state, use_cache=False).logits
            assert_equal_to_rounding(batch[row : row + 1], alone)


@examples(15)
@given(st.data(), looped_configs(eos_token_id=None), st.sampled_from([None, "static"]), st.integers(1, 9))
def test_generating_in_a_padded_batch_of_mixed_depth_equals_rows_alone(data, config, cache_implementation, length):
    """With a cache against without one."""
    model, ids = random_model(config), ids_of(3, length)
    row_depths = data.draw(st.lists(depths(config), min_size=3, max_size=3))
    padding = data.draw(st.lists(st.integers(0, length - 1), min_size=3, max_size=3))
    mask = (torch.arange(length) >= torch.tensor(padding)[:, None]).long()
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    batch = model.generate(
        ids, attention_mask=mask, num_loops=row_depths, cache_implementation=cache_implementation, **arguments
    )
    for row, (depth, pad) in enumerate(zip(row_depths, padding)):
        alone = model.generate(ids[row : row + 1, pad:], num_loops=depth, use_cache=False, **arguments)
        assert batch[row, length:].tolist() == alone[0, length - pad :].tolist()


@examples(25)
@given(st.data(), looped_configs(residual_depth="trained"), st.integers(1, 7))
def test_logits_of_every_loop_are_those_of_a_run_of_that_depth(data, config, length):
    """Bit for bit, as the shapes are the same."""
    model, ids = random_model(config), ids_of(2, length)
    deepest, state = data.draw(depths(config)), initial_state_of(model, 2, length)
    with torch.no_grad():
        every = model(
            ids, num_loops=deepest, initial_state=state, output_loop_logits=True, output_loop_hidden_states=True
        )
        assert len(every.loop_logits) == len(every.loop_hidden_states) == deepest
        for k in range(1, deepest + 1):
            run = model(ids, num_loops=k, initial_state=state, output_loop_hidden_states=True)
            assert torch.equal(every.loop_logits[k - 1], run.logits)
            assert torch.equal(every.loop_hidden_states[k - 1], run.loop_hidden_states[-1])


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@examples(25)
@given(st.data(), looped_configs(attention_dropout=0.1, residual_dropout=0.1, embedding_dropout=0.1))
def test_gradient_checkpointing_changes_nothing(data, config):
    model, ids = random_model(config).train(), ids_of(3, 6)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.2, -100)
    arguments = {
        "labels": labels,
        "num_loops": data.draw(st.one_of(depths(config), st.lists(depths(config), min_size=3, max_size=3))),
        "backprop_loops": data.draw(st.one_of(st.none(), depths(config))),
        "initial_state": initial_state_of(model, 3, 6),
    }
    deepest = np.max(arguments["num_loops"])
    with_gradient = range(max(0, deepest - (arguments["backprop_loops"] or deepest)), deepest)
    assume(any(map(config.makes_keys, with_gradient)))  # else it is refused

    def loss_and_gradients():
        model.zero_grad()
        torch.manual_seed(3)  # the same dropout
        loss = model(ids, **arguments).loss
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters()}

    loss, gradients = loss_and_gradients()
    model.gradient_checkpointing_enable()
    checkpointed_loss, checkpointed_gradients = loss_and_gradients()
    assert torch.equal(checkpointed_loss, loss)
    for name, gradient in gradients.items():
        if gradient is None:
            assert checkpointed_gradients[name] is None, name
        else:
            assert_equal_to_rounding(checkpointed_gradients[name], gradient)


@examples(15)
@given(looped_configs())
def test_saving_and_loading_keeps_every_bit(config):
    model, ids = random_model(config), ids_of(2, 5)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = copy.deepcopy(LoopedForCausalLM.from_pretrained(folder, dtype=torch.float64).eval())

    def fields_of(config):
        return {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}

    assert fields_of(loaded.config) == fields_of(config)
    weights, loaded_weights = model.state_dict(), loaded.state_dict()
    assert weights.keys() == loaded_weights.keys()
    for name in weights:
        assert torch.equal(weights[name], loaded_weights[name]), name
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)


@examples(40)
@given(
    # keys are aligned, whatever the buffer; plain decoding cuts them to a window, which is masked here: other shapes
    looped_configs(residual_depth="trained", hidden_size=16, head_dim=8, window_pattern=None),
    st.sampled_from(sorted(CRITERIA)),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.data(),
)
def test_continuous_depth_is_plain_decoding_bit_for_bit_where_shapes_are_equal(config, criterion, dtype, data):
    """Rows that never exit stay in step, so every product has the shape it has in plain decoding: no bit differs."""
    if criterion == "gate" and config.exit_gate == "none":
        criterion = "logit_margin"
    model, batch_size = random_model(config).to(dtype), data.draw(st.integers(1, 3), label="rows")
    ids, num_loops = ids_of(batch_size, 5), data.draw(depths(config), label="num_loops")
    how = {"max_new_tokens": 6, "do_sample": False, "num_loops": num_loops, "pad_token_id": 0, "eos_token_id": None}
    how |= {"return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(ids, **how)
    apart = model.generate(ids, exit_criterion=criterion, exit_threshold=never(criterion), **how)
    assert torch.equal(apart.sequences, plain.sequences)
    assert all(torch.equal(a, b) for a, b in zip(apart.logits, plain.logits, strict=True))
    assert (apart.token_loops == num_loops).all()


@examples(200)
@given(st.data(), looped_configs())
def test_no_gradient_is_missing_where_none_is_foretold(data, config):
    """DDP waits for every parameter that it is not told of."""
    model, ids = random_model(config).train(), ids_of(2, 6)
    state, drawn = initial_state_of(model, 2, 6), data.draw(depths(config))
    for is_drawn, backprop_loops in product((False, True), (None, 1, 2)):
        if gradients_may_be_missing(config, is_drawn, backprop_loops):
            continue
        model.zero_grad()
        num_loops = drawn if is_drawn else config.num_loops
        try:
            outputs = model(ids, labels=ids, num_loops=num_loops, backprop_loops=backprop_loops, initial_state=state)
        except ValueError as error:
            assert "backprop_loops" in str(error)  # none of the last loops makes keys
            continue
        outputs.loss.backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
