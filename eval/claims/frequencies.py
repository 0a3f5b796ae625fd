"""Loss without a model: tokens predicted by their frequencies alone."""

from pathlib import Path

import numpy as np

from looped_eval.common.held_out import prepared_data, run_data


def loss_of_frequencies(run: Path) -> float:
    """Return the loss of the run's held-out tokens under the token frequencies of its training data."""
    prepared = prepared_data(run, run_data(run))
    train, validation = (
        np.concatenate([np.asarray(shard, dtype=np.int64) for shard in rows.shards])
        for rows in (prepared.train, prepared.validation)
    )
    counts = np.bincount(train, minlength=int(validation.max()) + 1) + 1.0
    return float(-np.log(counts / counts.sum())[validation].mean())
