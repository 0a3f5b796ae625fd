"""Scoring of tokens: their log-likelihoods, greedy misses and loops at all depths, from as few passes as possible."""

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator
from lm_eval.models.utils_hf import pad_and_concat
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from modeling_looped import generator_of
from modeling_looped.exit_criteria import ExitRule


logger = logging.getLogger(__name__)
TOKENS_READ = 256  # whose logits are in memory at a time


class TokenScorer(HFLM):
    """The part of `LoopedLM` that scores tokens."""

    depths: list[int]  # in ascending order
    rule: ExitRule | None
    state_seed: int | None

    def tokens_of_document(self, text: str) -> list[int]:
        """Return the tokens of a text alone: `score_documents` begins with a start token, and the tokenizer's own
        would be scored behind it as the first token of the text."""
        return self.tok_encode(text, add_special_tokens=False)

    def score_documents(self, documents: list[list[int]], disable_tqdm: bool = False) -> list[torch.Tensor]:
        """Return for each document the sums of `score_tokens`, [depths, 3], but greedy misses are not always counted.
        Each token is predicted once, from as much of its document as fits.
        """
        windows = []
        for number, document in enumerate(documents):
            for window in get_rolling_token_windows(document, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((number, *make_disjoint_window(window)))
        sums = torch.zeros(len(self.depths), 3, len(documents), dtype=torch.float64)
        owners = torch.tensor([number for number, *_ in windows], dtype=torch.long)
        sums.index_add_(2, owners, self.score_tokens(windows, disable_tqdm, is_text=True))
        return list(sums.unbind(2))

    @torch.no_grad()
    def score_tokens(self, requests, disable_tqdm: bool = False, keep=None, is_text: bool = False) -> torch.Tensor:
        """Return sums over the continuation of each request (key, context, continuation), [depths, 3, requests]: the
        log-likelihood, the number of tokens that greedy decoding would not choose, and the loops.

        Requests with equal inputs, such as choices of one token, share a row. keep(requests, numbers, sums) is called
        after every batch with the indices of its requests. is_text: continuations are long and greedy misses are not
        needed, so that with several depths no logits are kept.
        """
        too_long = sum(len(context) + len(continuation) - 1 > self.max_length for _, context, continuation in requests)
        if too_long:
            logger.warning(
                f"{too_long} of {len(requests)} requests are longer than max_length={self.max_length} tokens: their "
                "contexts lose their beginning"
            )
        groups = defaultdict(list)
        for number, (_, context, continuation) in enumerate(requests):
            if not context or not 1 <= len(continuation) <= self.max_length:
                raise ValueError(
                    f"a context of {len(context)} and a continuation of {len(continuation)} tokens cannot be scored: "
                    f"one needs at least 1, the other between 1 and max_length={self.max_length}"
                )
            shares = self.logits_cache and not is_text
            groups[(tuple(context + continuation[:-1]), None if shares else number)].append(number)
        ordered = sorted(groups.values(), key=lambda numbers: -len(requests[numbers[0]][1] + requests[numbers[0]][2]))
        sums = torch.zeros(len(self.depths), 3, len(requests), dtype=torch.float64)
        automatic = self.batch_size == "auto"
        first_of_each = [requests[numbers[0]] for numbers in ordered]
        chunks = Collator.get_chunks(
            ordered,
            n=0 if automatic else self.batch_size,
            fn=(lambda position, _: self._batch_scheduler(position, first_of_each)) if automatic else None,
        )
        if automatic:
            self.batch_sizes = {}  # drop sizes of other requests
        progress = tqdm(total=len(requests), desc="Scoring", disable=disable_tqdm or self.rank != 0)
        for chunk in chunks:
            tokens = self._tokens_of(chunk, requests)
            with self.autocast():
                scores = self._way_to_score(is_text)(tokens)
            sums.index_add_(2, tokens.owners, scores.double().cpu())
            numbers = [number for group in chunk for number in group]
            if keep is not None:
                keep(requests, numbers, sums)
            progress.update(len(numbers))
        progress.close()
        return sums

    def autocast(self):
        """Return a context that runs in `mixed_precision_dtype`, if that is set."""
        return torch.autocast(
            self.device.type, self.mixed_precision_dtype, enabled=self.mixed_precision_dtype is not None
        )

    def _way_to_score(self, is_text: bool) -> Callable[["ScoredTokens"], torch.Tensor]:
        if self.rule is not None and self.rule.selection == "stop":
            return self._from_exits
        return self._from_losses if is_text and self.rule is None and len(self.depths) > 1 else self._from_logits

    def _tokens_of(self, chunk: list[list[int]], requests) -> "ScoredTokens":
        """Return the rows of a chunk, padded right, and the positions at which they predict the continuations."""
        rows, places, targets, owners, inputs = [], [], [], [], []
        for row, group in enumerate(chunk):
            for number in group:
                _, context, continuation = requests[number]
                tokens = (context + continuation)[-(self.max_length + 1) : -1]
                rows += [row] * len(continuation)
                places += range(len(tokens) - len(continuation), len(tokens))
                targets += continuation
                owners += [number] * len(continuation)
            inputs.append(torch.tensor(tokens, device=self.device))
        states = None if self.state_seed is None else pad_sequence([self._first_state(x) for x in inputs], True)
        input_ids = pad_and_concat(max(map(len, inputs)), inputs, padding_side="right")
        rows, places, targets = (torch.tensor(x, device=self.device) for x in (rows, places, targets))
        return ScoredTokens(input_ids, rows, places, targets, torch.tensor(owners), states)

    def _first_state(self, tokens: torch.Tensor) -> torch.Tensor:
        """Draw h_0 of a row, seeded by `state_seed` and its tokens, so that it does not depend on its batch."""
        key = ("initial_state", self.state_seed, tuple(tokens.tolist()))
        return self.model.sample_initial_state(1, len(tokens), generator_of(*key, device=self.device))[0]

    def _from_losses(self, tokens: "ScoredTokens") -> torch.Tensor:
        """Return [depths, 3, tokens] from the cross-entropy after every loop."""
        labels = torch.full_like(tokens.input_ids, -100)
        labels[tokens.rows, tokens.places] = tokens.targets
        losses = self.losses_at_depths(tokens.input_ids, labels, initial_state=tokens.initial_state)
        log_p, depths = -losses[:, tokens.rows, tokens.places], torch.tensor(self.depths, device=labels.device)
        return torch.stack([log_p, torch.zeros_like(log_p), depths[:, None].expand_as(log_p)], dim=1)

    def losses_at_depths(self, input_ids: torch.Tensor, shift_labels: torch.Tensor, **options) -> torch.Tensor:
        """Return the loss of every label, [depths, rows, length], from one pass that keeps no logits."""
        how = {"num_loops": self.depths[-1], "output_logits": False, "output_loop_losses": True, "use_cache": False}
        outputs = self.model(input_ids, shift_labels=shift_labels, **how, **options)
        return outputs.loop_token_losses[[depth - 1 for depth in self.depths]]

    def _from_logits(self, tokens: "ScoredTokens") -> torch.Tensor:
        """Return [depths, 3, tokens] from the logits after every loop, read only where continuations are predicted."""
        outputs = self._states_of(tokens.input_ids, initial_state=tokens.initial_state, use_cache=False)
        return torch.cat([self._read(outputs, part) for part in tokens.split(TOKENS_READ)], dim=2)

    def _read(self, outputs, tokens: "ScoredTokens") -> torch.Tensor:
        length = tokens.input_ids.shape[1]
        asked, answers = (tokens.rows * length + tokens.places).unique(return_inverse=True)  # choices may share them
        every_loop = self._reads_every_loop
        loops = range(1, self.depths[-1] + 1) if every_loop else self.depths
        log_p, misses = [], []
        watch = ExitCount(self.rule, len(tokens.targets), self.depths[-1], self.device)
        for loop in loops:
            states = outputs.loop_readout_states[loop - 1] if every_loop else outputs.last_hidden_state
            states = states.flatten(0, 1)[asked][None]  # [1, positions, width]
            logits = self.model.logits_after_loop(states, loop - 1) if every_loop else self.model.logits(states)
            logits = logits[0, answers]  # [tokens, vocabulary]
            log_p.append(self._log_p(logits, tokens.targets))
            misses.append(logits.argmax(-1) != tokens.targets)
            if self.rule is not None:
                seen = outputs.loop_hidden_states
                watch.read(loop, self.model, seen and seen[loop - 1][tokens.rows, tokens.places], logits)
        taken = torch.stack([watch.loops.clamp(max=depth) for depth in self.depths])  # [depths, tokens]
        chosen = taken - 1 if every_loop else torch.zeros_like(taken)
        log_p, misses = (torch.stack(of_loops).gather(0, chosen) for of_loops in (log_p, misses))
        return torch.stack([log_p.double(), misses.double(), taken.double()], dim=1)

    def _from_exits(self, tokens: "ScoredTokens") -> torch.Tensor:
        """Return [depths, 3, tokens] from a pass for each depth, in which every token stops at its exit."""
        kept = tokens.places.unique()  # in ascending order
        of_depths = []
        for depth in self.depths:
            outputs = self.model(
                tokens.input_ids,
                num_loops=depth,
                exit_rule=self.rule,
                initial_state=tokens.initial_state,
                logits_to_keep=kept,
                use_cache=False,
            )
            parts = [self._read_exits(outputs, kept, part) for part in tokens.split(TOKENS_READ)]
            of_depths.append(torch.cat(parts, dim=1))
        return torch.stack(of_depths)

    def _read_exits(self, outputs, kept: torch.Tensor, tokens: "ScoredTokens") -> torch.Tensor:
        """Return [3, tokens]. kept: the positions of `outputs.logits`."""
        logits = outputs.logits[tokens.rows, torch.searchsorted(kept, tokens.places)]  # [tokens, vocabulary]
        misses, loops = logits.argmax(-1) != tokens.targets, outputs.token_loops[tokens.rows, tokens.places]
        return torch.stack([self._log_p(logits, tokens.targets).double(), misses, loops])

    def _log_p(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities, in float32 at least, as in the cross-entropy, unless `softmax_dtype` is given."""
        dtype = self.softmax_dtype or torch.promote_types(logits.dtype, torch.float32)
        return F.log_softmax(logits, dim=-1, dtype=dtype).gather(-1, targets[:, None])[:, 0]

    @property
    def _reads_every_loop(self) -> bool:
        return len(self.depths) > 1 or self.rule is not None

    def _states_of(self, input_ids: torch.Tensor, **options):
        """Run the deepest pass, with the states from which all depths and exits are read."""
        return self.model.get_decoder()(
            input_ids,
            num_loops=self.depths[-1],
            output_loop_readout_states=self._reads_every_loop,
            output_loop_hidden_states=self.rule is not None and self.rule.criterion.needs != "logits",
            **options,
        )


class ScoredTokens(NamedTuple):
    input_ids: torch.Tensor  # [rows, length]
    rows: torch.Tensor  # [tokens] row of input_ids
    places: torch.Tensor  # [tokens] position in the row that predicts the target
    targets: torch.Tensor  # [tokens]
    owners: torch.Tensor  # [tokens] index of the request, on the CPU
    initial_state: torch.Tensor | None  # [rows, length, width]

    def split(self, size: int) -> "list[ScoredTokens]":
        parts = zip(*(each.split(size) for each in (self.rows, self.places, self.targets, self.owners)))
        return [ScoredTokens(self.input_ids, *part, self.initial_state) for part in parts]


class ExitCount:
    """Counts the loops after which each token exits; without a rule, all tokens run all loops."""

    def __init__(self, rule: ExitRule | None, tokens: int, deepest: int, device):
        self.rule, self.memory = rule, {}
        self.loops = torch.full((tokens,), deepest, device=device)
        self.running = torch.ones_like(self.loops, dtype=torch.bool)

    def read(self, loop: int, model, state: torch.Tensor | None, logits: torch.Tensor):
        passed, self.memory = self.rule.read(loop, model, state, lambda: logits, self.memory)
        if passed is not None:
            exits = self.running & passed
            self.loops[exits] = loop
            self.running &= ~exits
