"""Lossless self-speculation: draft a few tokens with few loops, verify them together at full depth.

The verification continues where the drafts stopped: their states after `draft_loops` loops, and the keys and values
that they left in the cache, are those of the full run, so no loop of any token is run twice. What is emitted is
chosen from the full-depth logits and nothing else, by the same code as in plain decoding; a draft only decides how
many tokens one verification yields. With sampling, draft and verification race against the same noise, which leaves
the distribution of every token that of plain sampling.
"""

import torch

from .continuous import ContinuousDecoder
from .depth import check_count


MEMORY = 0.9  # of the running acceptance rate, per drafted token
PROBE_EVERY = 16  # rounds without drafts, until acceptance is measured again


def check_draft(model_config, config, num_loops: int):
    """Refuse what cannot be drafted. `config` is a generation config, `num_loops` the depth of the run."""
    draft_loops, draft_tokens = config.draft_loops, config.draft_tokens
    if draft_loops is None:
        return
    check_count("draft_loops", draft_loops)
    check_count("draft_tokens", draft_tokens)
    if draft_loops >= num_loops:
        raise ValueError(
            f"draft_loops={draft_loops} must be below num_loops={num_loops}, or a draft costs a full run: lower it, "
            "or pass draft_loops=None"
        )
    if torch.is_tensor(config.num_loops):
        raise ValueError("draft_loops needs one num_loops for all rows")
    if config.exit_criterion is not None:
        raise ValueError(
            f"draft_loops={draft_loops} gives the output of full depth and exit_criterion={config.exit_criterion!r} "
            "that of early exits: pass one of the two as None"
        )
    if model_config.residual_depth == "run":
        raise ValueError(
            "with residual_depth='run' the first loops of a deep run are not a shallow run, so it cannot be drafted"
        )


def speculate(model, input_ids, processors, criteria, config, streamer, model_kwargs):
    """`_sample` of transformers, speculating."""
    decoder = Speculator(model, input_ids, processors, criteria, config, streamer, model_kwargs)
    while decoder.emission.running():
        decoder.round()
    result = decoder.result()
    if not torch.is_tensor(result):
        result.acceptance_rate = decoder.accepted / decoder.drafted if decoder.drafted else None
    return result


class Speculator(ContinuousDecoder):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.num_loops, self.draft_loops = self.limits[0], self.config.draft_loops
        self.drafted = self.accepted = self.idle_rounds = 0
        self.acceptance = 1.0  # running estimate, from an optimist
        core = sum(p.numel() for p in self.trunk.core.parameters())
        self.readout_cost = self.model.lm_head.weight.numel() / core  # in loops

    def room(self, rows: list[int]) -> int:
        """The most that may be drafted: within every row's length, and within the positions that the model knows."""
        longest = max(self.emission.lengths[row] for row in rows)
        room = min(self.config.draft_tokens, self.config.max_length - longest - 1)
        if self.model.config.position_embedding == "learned":
            room = min(room, self.model.config.max_position_embeddings - longest)
        return max(room, 0)

    def draft_length(self, rows: list[int]) -> int:
        """The number of drafts that yields most tokens per weight read: 0 where acceptance is too low to pay."""
        room = self.room(rows)
        if not room:
            return 0

        def tokens_per_loop(drafts: int) -> float:
            tokens = sum(self.acceptance**i for i in range(drafts + 1))
            drafting = (drafts + 1) * self.draft_loops + drafts * self.readout_cost
            return tokens / (drafting + self.num_loops - self.draft_loops + self.readout_cost)

        best = max(range(room + 1), key=tokens_per_loop)
        self.idle_rounds = 0 if best else self.idle_rounds + 1
        if self.idle_rounds >= PROBE_EVERY:
            self.idle_rounds = 0
            return 1
        return best

    def round(self):
        """Draft, verify, emit: at least one token for every running row."""
        rows = self.emission.running()
        drafts = self.draft_length(rows)
        starts = [self.places[row] for row in rows]  # of the last token in the cache
        noises = [self.noise(rows) for _ in range(drafts + 1)] if self.config.do_sample else [None] * (drafts + 1)

        tensors = []  # of the last token and the drafts after it
        for ahead in range(drafts + 1):
            token = self.enter(rows, self.emission.last_tokens(rows, ahead))
            state = self.trunk.initial_state(token["embedded"], None)
            for loop in range(self.draft_loops if drafts else 0):
                state = self.one_loop(rows, loop, state, token)
                if loop + 1 == self.draft_loops and ahead < drafts:
                    logits = self.logits(rows, state, token, self.draft_loops)[:, -1]
                    self.emission.propose(rows, logits, ahead, noises[ahead])
                state = self.trunk.between(state)
            tensors.append({**token, "state": state})

        guesses = {
            row: self.emission.ids[row, self.emission.lengths[row] : self.emission.lengths[row] + drafts].tolist()
            for row in rows
        }
        self.emit(rows, self.verify(rows, starts, tensors), guesses, noises)
        for row, start in zip(rows, starts):
            # all but the last token emitted are now in the cache
            self.places[row] = start + len(self.emitted[row])

    def noise(self, rows: list[int]) -> torch.Tensor:
        shape = (len(rows), self.model.config.vocab_size)
        return torch.empty(shape, device=self.emission.ids.device).exponential_()

    def one_loop(self, rows: list[int], loop: int, state: torch.Tensor, token: dict, length: int = 1):
        context = self.context(rows, [loop] * len(rows), token, length)
        return self.trunk.core_pass(state, token["embedded"], 0, loop == 0, self.scale, context)

    def logits(self, rows: list[int], state: torch.Tensor, token: dict, loops: int, length: int = 1):
        context = self.context(rows, [0] * len(rows), token, length) if len(self.trunk.coda) else None
        return self.model.logits(self.trunk.readout(self.trunk.run_coda(state, context), loops))

    def verify(self, rows: list[int], starts: list[int], tensors: list[dict]) -> torch.Tensor:
        """Full-depth logits of the last token and its drafts, [rows, drafts + 1, vocabulary]."""
        for row, start in zip(rows, starts):
            self.places[row] = start + 1  # back to the first of them
        chunk = {name: torch.cat([token[name] for token in tensors], dim=1) for name in tensors[0]}
        state, length = chunk.pop("state"), len(tensors)
        for loop in range(self.draft_loops if length > 1 else 0, self.num_loops):
            state = self.one_loop(rows, loop, state, chunk, length)
            if loop + 1 < self.num_loops:
                state = self.trunk.between(state)
        logits = self.logits(rows, state, chunk, self.num_loops, length)
        for row, start in zip(rows, starts):
            self.places[row] = start + length
        return logits

    def emit(self, rows: list[int], logits: torch.Tensor, guesses: dict[int, list[int]], noises: list):
        """Tokens as plain decoding would choose them, for as long as the drafts guess them right."""
        self.emitted = {row: [] for row in rows}
        going, drafts = rows, logits.shape[1] - 1
        for i in range(drafts + 1):
            members = [rows.index(row) for row in going]
            noise = None if noises[i] is None else noises[i][members]
            self.emission.emit(going, logits[members, i], [self.num_loops] * len(going), noise)
            right = []
            for row in going:
                token = self.emission.last[row]
                self.emitted[row].append(token)
                if i < drafts:
                    matches = guesses[row][i] == token
                    self.count(matches)
                    if matches and self.emission.unfinished[row]:
                        right.append(row)
            going = right
            if not going:
                break

    def count(self, accepted: bool):
        self.drafted += 1
        self.accepted += accepted
        self.acceptance = MEMORY * self.acceptance + (1 - MEMORY) * accepted
