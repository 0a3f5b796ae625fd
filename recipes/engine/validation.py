"""Loss and bits per byte on held-out rows while a model trains, at every depth."""

import math

import torch
from accelerate import Accelerator
from torch.nn.functional import pad

from looped_recipes.common.metrics import depth_of_loss
from looped_recipes.common.ratios import ratio, standard_error
from looped_recipes.common.token_losses import next_token_losses
from looped_recipes.data.packing import PackedRows
from looped_recipes.settings.recipe import Recipe, RecipeError
from modeling_looped.cross_entropy import IGNORE_INDEX

from .compiling import begin_step
from .distributed import to_shards
from .tensor_parallel import data_rank


@torch.no_grad()
def validate(accelerator: Accelerator, model, config, recipe: Recipe, validation: PackedRows) -> dict[str, float]:
    """Return cross-entropy and bits per byte over rows spread over the split, at every depth. Every process
    calls it."""
    size = recipe.training.micro_batch_size
    chosen = spread_rows(len(validation), recipe.evaluation.rows)
    count = len(chosen)
    index, world = data_rank(accelerator)
    mine = list(range(count))[index::world]
    loops = recipe.evaluation.loops or list(range(1, config.num_loops + 1))
    sums = torch.zeros(len(loops), device=accelerator.device, dtype=torch.float64)
    nats = torch.zeros(len(loops), count, device=accelerator.device, dtype=torch.float64)
    labels, bytes_of_rows = torch.zeros_like(sums[0]), torch.zeros_like(nats[0])
    model.eval()
    for i in range(equal_batches(accelerator, count, size)):
        begin_step(recipe.training.compile == "cuda_graphs")
        rows = mine[i * size : (i + 1) * size]
        # a process without rows left runs row 0 and does not count it: FSDP needs all processes in every pass
        batch = validation.batch([chosen[row] for row in rows or [0]])
        num_bytes = validation.num_bytes(batch["labels"])
        before_texts = validation.bytes_before_texts(batch["labels"], num_bytes).to(accelerator.device)
        num_bytes = num_bytes.to(accelerator.device)
        batch = {key: value.to(accelerator.device) for key, value in batch.items()}
        losses = losses_at(model, config, loops, batch)
        labelled = torch.zeros_like(losses[0])
        labelled[:, :-1] = (batch["labels"][:, 1:] != IGNORE_INDEX).double()
        has_bytes = labelled * (num_bytes > 0)
        if rows:
            sums += (losses * labelled).sum((1, 2))
            labels += labelled.sum()
            nats[:, rows] = (losses * has_bytes).sum(-1)
            bytes_of_rows[rows] = (num_bytes * has_bytes).sum(-1) - before_texts
    model.train()
    to_shards(model)
    sums, labels, nats, bytes_of_rows = (
        accelerator.reduce(t, reduction="sum") for t in (sums, labels, nats, bytes_of_rows)
    )
    if not labels:
        raise RecipeError(f"none of the {count} rows of validation has a token to predict: choose another text for it")
    bits, errors = (f(nats, bytes_of_rows) / math.log(2) for f in (ratio, standard_error))
    metrics = {}
    for i, k in enumerate(loops):
        metrics[f"validation/loss_at_{k}"] = (sums[i] / labels).item()
        metrics[f"validation/bits_per_byte_at_{k}"] = bits[i].item()
    if count > 1:  # standard error over rows, at the depth where it is largest
        metrics["validation/bits_per_byte_error"] = errors.max().item()
    metrics["validation/loss"] = metrics[f"validation/loss_at_{depth_of_loss(loops, config.num_loops)}"]
    return metrics


def spread_rows(available: int, count: int) -> list[int]:
    """Return at most `count` rows at equal distances: the first ones are of the first files of a folder alone."""
    count = min(count, available)
    return [number * available // count for number in range(count)]


def depths_in_one_pass(config) -> bool:
    """Return whether the state after each loop of a deep pass equals the final state of a pass of that depth."""
    return config.reads_run_depth is None


def losses_at(model, config, loops: list[int], batch: dict) -> torch.Tensor:
    """Return cross-entropy at every depth and position, [depths, rows, length]; 0 at the last position, which has no
    target."""
    if depths_in_one_pass(config):
        outputs = model(**batch, num_loops=max(loops), output_logits=False, output_loop_losses=True, use_cache=False)
        return outputs.loop_token_losses.double()[[k - 1 for k in loops]]
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    passes = (model(**inputs, num_loops=k, use_cache=False).logits for k in loops)
    return torch.stack([pad(next_token_losses(logits, batch["labels"]), (0, 1)) for logits in passes]).double()


def equal_batches(accelerator: Accelerator, count: int, size: int) -> int:
    """Return the number of passes of `size` rows that every process makes so that all together cover `count` rows."""
    per_process = -(-count // data_rank(accelerator).world)
    return -(-per_process // size)
