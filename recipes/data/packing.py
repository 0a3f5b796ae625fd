"""Pack documents into rows of equal length, without padding.

Both packings produce one long stream of tokens; a row is a window of `sequence_length` tokens, one every `stride`
tokens. The model shifts labels itself, so a row holds exactly `sequence_length` tokens and its last one has no target:
each row loses one target in `sequence_length`, and a step sees exactly rows * sequence_length tokens.
"""

import copy
from bisect import bisect_right, insort
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from modeling_looped.cross_entropy import IGNORE_INDEX


def best_fit(
    documents: Sequence[np.ndarray], length: int, keep: bool, num_starts: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return full rows, each beginning with a document, and the documents left over when no more row can be filled.

    A row repeatedly takes the largest document that fits into its free space; if none fits, the shortest is cropped to
    fill it. The part that is cropped off is lost (Parcae), or with `keep` becomes another document, if it is more than
    one token, which begins with the first `num_starts` tokens of the cropped one (its start token, if documents have
    one).
    """
    pool = sorted((len(document), number) for number, document in enumerate(documents))
    documents = list(documents)
    remaining = sum(size for size, _ in pool)
    rows = []
    while remaining >= length:
        row, space = [], length
        while space:
            fitting = bisect_right(pool, (space, len(documents))) - 1
            size, number = pool.pop(max(fitting, 0))
            document = documents[number]
            row.append(document[:space])
            remaining -= size
            if size - space > 1 and keep:  # one token is mostly an end token
                documents.append(np.concatenate([document[:num_starts], document[space:]]))
                insort(pool, (len(documents[-1]), len(documents) - 1))
                remaining += len(documents[-1])
            space -= min(size, space)
        rows.append(np.concatenate(row))
    return rows, [documents[number] for number in sorted(number for _, number in pool)]


def document_positions(tokens: np.ndarray, mark: int, after: bool) -> np.ndarray:
    """Return position ids [rows, length] that restart at 0 at every `mark`, or with `after` at the token after it."""
    places = np.broadcast_to(np.arange(tokens.shape[-1]), tokens.shape)
    begins = tokens == mark
    if after:
        begins = np.pad(begins[:, :-1], ((0, 0), (1, 0)))
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=-1)


class PackedRows:
    """The rows of one split: windows of the token stream that its memory-mapped shards form together."""

    def __init__(
        self,
        shards: Sequence[np.ndarray],
        sequence_length: int,
        stride: int,
        start: int,  # the token that begins documents, or ends them if start_ends
        token_bytes: torch.Tensor,  # [vocabulary]
        learn_start: bool,  # predict `start`; not needed where it always follows an end token
        document_masking: bool,
        start_ends: bool,  # `start` is the last token of documents, and they have no start token
        bytes_before_a_text: int = 0,  # which tokenizers add to its first token
    ):
        self.shards = list(shards)
        # the position in the stream where each shard begins, and at last the length of the stream
        self.begins = np.cumsum([0] + [len(shard) for shard in shards])
        self.sequence_length, self.stride, self.start = sequence_length, stride, start
        self.token_bytes, self.learn_start, self.document_masking = token_bytes, learn_start, document_masking
        self.start_ends, self.bytes_before_a_text = start_ends, bytes_before_a_text

    @property
    def num_tokens(self) -> int:
        return int(self.begins[-1])

    def __len__(self) -> int:
        return max(0, (self.num_tokens - self.sequence_length) // self.stride + 1)

    def of_length(self, length: int) -> "PackedRows":
        """Return rows of `length` tokens of the same stream, no token twice; these rows if they are as long."""
        if length == self.sequence_length:
            return self
        rows = copy.copy(self)
        rows.sequence_length = rows.stride = length
        return rows

    def tokens(self, index: int) -> np.ndarray:
        """Return one row, int64 [sequence_length]; it may cross shards."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        begin = index * self.stride
        end = begin + self.sequence_length
        first = int(np.searchsorted(self.begins, begin, side="right")) - 1
        last = int(np.searchsorted(self.begins, end, side="left"))
        pieces = [
            self.shards[shard][max(0, begin - self.begins[shard]) : end - self.begins[shard]]
            for shard in range(first, last)
        ]
        return np.concatenate(pieces, dtype=np.int64)

    def batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return input_ids and labels (not shifted), int64 [rows, sequence_length]; also position_ids with masking."""
        tokens = np.stack([self.tokens(index) for index in indices])
        input_ids = torch.from_numpy(tokens)
        labels = input_ids.clone()
        if not self.learn_start:  # the start token is certain after an end token: no loss
            labels[input_ids == self.start] = IGNORE_INDEX
        batch = {"input_ids": input_ids, "labels": labels}
        if self.document_masking:
            batch["position_ids"] = torch.from_numpy(document_positions(tokens, self.start, self.start_ends))
        return batch

    def num_bytes(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the bytes of each position's target, int64 [rows, sequence_length]: 0 where there is no loss.

        Bits per byte are the sum of the losses at positions with bytes, divided by ln 2 times the sum of these bytes,
        without `bytes_before_texts`.
        """
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        return self.token_bytes[targets.clamp(min=0)].masked_fill(targets == IGNORE_INDEX, 0)

    def bytes_before_texts(self, labels: torch.Tensor, num_bytes: torch.Tensor) -> torch.Tensor:
        """Return how many of the targets' bytes, `num_bytes`, are in no text, int64 [rows]: the tokenizer added them
        before texts. Of texts that nothing marks (document_tokens="none") none are known; one too many is taken for
        what was cropped off a document, which begins with the start token, too."""
        is_start = (labels == self.start) | (labels == IGNORE_INDEX)  # no other token is without a label
        return self.bytes_before_a_text * (is_start & (num_bytes > 0)).sum(-1)
