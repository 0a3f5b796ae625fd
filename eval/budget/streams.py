"""Texts as one stream of tokens, scored in windows of equal length (Fully Looped, appendix A.4).

Every text, also an empty one, is preceded by the start token of documents. A window is scored without the tokens
before it; its last target is the first input of the next window. An incomplete window at the end is left out.
Perplexity counts every target, including start tokens between texts; bits per byte count targets that encode bytes.
"""

import glob
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from looped_eval.common.model_folder import start_token
from looped_eval.harness.looped_lm import LoopedLM
from looped_recipes.common.files import lines_of
from looped_recipes.common.token_losses import token_losses
from looped_recipes.data.tokenizers import Encoder, bytes_before_a_text, token_bytes
from looped_recipes.settings.yaml_files import shortly

from .row_scores import RowScores


# the file that the public code of the Fully Looped Transformer evaluates as WikiText-2; each line is a text
STREAMS = {
    "wikitext_2": "https://huggingface.co/datasets/Salesforce/wikitext/resolve/main/wikitext-2-v1/"
    "test-00000-of-00001.parquet"
}


def parse_stream(argument: str) -> tuple[str, str]:
    """Parse NAME=FILE, or a NAME in STREAMS, into (name, file)."""
    name, equals, path = argument.partition("=")
    if not equals and name in STREAMS:
        return name, STREAMS[name]
    if not name or not path:
        raise ValueError(f"--stream {argument!r}: write NAME=FILE, or one of {', '.join(STREAMS)}")
    if "://" not in path and not Path(path).is_file():
        raise ValueError(f"--stream {argument!r}: there is no file {path!r}")
    return name, path


def texts_of(path: str) -> Iterator[str]:
    """Yield the field `text` of each row of a parquet file, or of each line of JSON; null is an empty text."""
    if path.endswith(".parquet"):
        from datasets import load_dataset

        file = path if "://" in path else glob.escape(str(Path(path).absolute()))  # brackets are no patterns
        try:
            rows = load_dataset("parquet", data_files=file, split="train", streaming=True)
        except Exception as error:  # many libraries raise it
            if "://" not in path:
                raise
            raise ValueError(
                f"{path} cannot be fetched ({type(error).__name__}: {shortly(str(error))}): check the network, or "
                "name a file that was fetched before, --stream NAME=FILE"
            ) from error
        if rows.column_names is not None and "text" not in rows.column_names:
            raise ValueError(f"{path} has no column 'text'; it has {', '.join(rows.column_names)}")
        yield from (row["text"] or "" for row in rows)
        return
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path!r} (looked from {Path.cwd()})")
    for number, line in enumerate(lines_of(path), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: expected a JSON object with a field 'text'") from error
        if not (text is None or isinstance(text, str)):
            raise ValueError(f"{path}, line {number}: the field 'text' holds {shortly(text)}, which is no text")
        yield text or ""


def windows(tokenizer, texts: Iterable[str], length: int, limit: int | None = None, group: int = 1) -> torch.Tensor:
    """Return int64 [windows, length + 1], which overlap by one token. limit: the most tokens to predict.

    The number of windows is a multiple of `group`.
    """
    encoder = Encoder(tokenizer, "start")
    encoder.starts = [start_token(tokenizer)]
    pieces, size = [np.zeros(0, dtype=np.int64)], 0
    for ids in encoder(texts):
        pieces.append(np.array(ids, dtype=np.int64))
        size += len(ids)
        if limit is not None and size > limit:
            break
    size = size if limit is None else min(size, limit + 1)
    count = (size - 1) // length // group * group
    if count < 1:
        raise ValueError(
            f"the stream has {size} tokens, fewer than {group} window(s) of {length} and one more: give more text, or "
            "a smaller --max-length"
        )
    return torch.from_numpy(np.concatenate(pieces)[: count * length + 1]).unfold(0, length + 1, length)


@torch.no_grad()
def score_windows(lm: LoopedLM, rows: torch.Tensor) -> RowScores:
    """Score windows at every depth from one pass."""
    lengths = token_bytes(lm.tokenizer)
    num_bytes = lengths[rows[:, 1:]]
    begin_texts = (rows[:, :-1] == start_token(lm.tokenizer)) & (num_bytes > 0)
    added = bytes_before_a_text(lm.tokenizer, lengths) * begin_texts
    nats, byte_nats = torch.zeros(2, len(lm.depths), len(rows), dtype=torch.float64)
    size = 8 if lm.batch_size == "auto" else lm.batch_size
    for start in tqdm(range(0, len(rows), size), desc="Scoring windows", disable=lm.rank != 0):
        part = slice(start, start + size)
        with lm.autocast():
            losses = losses_of(lm, rows[part].to(lm.device)).double().cpu()
        nats[:, part] = losses.sum(-1)
        byte_nats[:, part] = (losses * (num_bytes[part] > 0)).sum(-1)
    tokens = torch.full((len(rows),), rows.shape[1] - 1, dtype=torch.float64)
    return RowScores(nats, byte_nats, tokens, (num_bytes - added).sum(-1).double())


def losses_of(lm: LoopedLM, rows: torch.Tensor) -> torch.Tensor:
    """Return losses [depths, rows, length]."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    if len(lm.depths) > 1:
        return lm.losses_at_depths(inputs, targets)
    return token_losses(lm.model(inputs, num_loops=lm.depths[0], use_cache=False).logits, targets)[None]
