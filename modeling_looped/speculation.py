"""Lossless self-speculation: draft a few tokens with few loops, verify them together at full depth.

The verification continues where the drafts stopped: their states after `draft_loops` loops, and the keys and values
that they left in the cache, are those of the full run, so no loop of any token is run twice. What is emitted is
chosen from the full-depth logits and nothing else, by the same code as in plain decoding; a draft only decides how
many tokens one verification yields. With sampling, draft and verification race against the same noise, which leaves
the distribution of every token that of plain sampling.
"""

import torch

from .engine import RowEngine, Tokens, joined, read_logits, run_loop


ACCEPTANCE_DECAY = 0.9  # of the running acceptance rate, per drafted token
PROBE_EVERY = 16  # rounds without drafts, until acceptance is measured again


def speculate(engine: RowEngine):
    """`_sample` of transformers, speculating."""
    decoder = Speculator(engine)
    while decoder.selector.running():
        decoder.round()
    result = decoder.engine.output()
    if not torch.is_tensor(result):
        result.acceptance_rate = decoder.accepted / decoder.drafted if decoder.drafted else None
    return result


def readout_cost(config) -> float:
    """Weights of the head over those of one loop; from the config, since quantisers replace layers."""
    sizes = config.block_sizes("core")
    attention = 2 * config.head_dim * (sizes.num_attention_heads + sizes.num_key_value_heads)
    mlp = (3 if config.mlp_gated else 2) * sizes.intermediate_size
    loop = config.num_core_layers * sizes.hidden_size * (attention + mlp)
    return config.vocab_size * config.hidden_size / loop


class Speculator:
    def __init__(self, engine: RowEngine):
        self.engine, self.selector, self.config = engine, engine.selector, engine.config
        self.num_loops, self.draft_loops = engine.limits[0], engine.options.draft_loops
        self.drafted = self.accepted = self.idle_rounds = 0
        self.acceptance = 1.0  # running estimate
        self.readout_cost = readout_cost(engine.model.config)

    def room(self, rows: list[int]) -> int:
        """The most that may be drafted: within every row's length, and within the positions that the model knows."""
        longest, model_config = max(self.selector.lengths[row] for row in rows), self.engine.model.config
        room = min(self.engine.options.draft_tokens, self.config.max_length - longest - 1)
        if model_config.position_embedding == "learned":
            room = min(room, model_config.max_position_embeddings - longest)
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
        rows = self.selector.running()
        drafts, places = self.draft_length(rows), self.engine.last_places(rows)
        noises = [self.noise(rows) for _ in range(drafts + 1)] if self.config.do_sample else [None] * (drafts + 1)
        parts, states = [], []  # the last token and the drafts after it
        for ahead in range(drafts + 1):
            ids, here = self.selector.last_tokens(rows, ahead), [place + ahead for place in places]
            tokens = self.engine.enter(rows, ids, here)
            state = self.engine.trunk.initial_state(tokens.embedded, None)
            if drafts:
                state = self.run_loops(tokens, state, 0, self.draft_loops)
                if ahead < drafts:
                    logits = read_logits([tokens], [self.draft_loops] * len(rows), state)
                    self.selector.propose(rows, logits[:, -1], ahead, noises[ahead])
                state = self.engine.trunk.to_next_loop(state)
            parts.append(tokens)
            states.append(state)
        guesses = {
            row: self.selector.ids[row, self.selector.lengths[row] : self.selector.lengths[row] + drafts].tolist()
            for row in rows
        }
        tokens, loops = joined(parts), [self.num_loops] * len(rows)
        first = self.draft_loops if drafts else 0
        state = self.run_loops(tokens, torch.cat(states, dim=1), first, self.num_loops)
        logits = read_logits([tokens], loops, state)
        self.engine.cache.leave_in_deeper_loops(rows, loops, places, drafts + 1)
        self.emit(rows, logits, guesses, noises)

    def noise(self, rows: list[int]) -> torch.Tensor:
        shape = (len(rows), self.engine.model.config.vocab_size)
        return torch.empty(shape, device=self.selector.ids.device).exponential_()

    def run_loops(self, tokens: Tokens, state: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """H after `end` loops, from what loop `first` starts from."""
        for loop in range(first, end):
            state = state if loop == first else self.engine.trunk.to_next_loop(state)
            state = run_loop([tokens], [loop] * len(tokens.rows), state)
        return state

    def emit(self, rows: list[int], logits: torch.Tensor, guesses: dict[int, list[int]], noises: list):
        """Tokens as plain decoding would choose them, for as long as the drafts guess them right.

        logits: at full depth, of the last token and its drafts, [rows, drafts + 1, vocabulary].
        """
        going, drafts = rows, logits.shape[1] - 1
        for i in range(drafts + 1):
            members = [rows.index(row) for row in going]
            noise = None if noises[i] is None else noises[i][members]
            self.selector.emit(going, logits[members, i], [self.num_loops] * len(going), noise)
            if i == drafts:
                return
            right = [row for row in going if guesses[row][i] == self.selector.last[row]]
            for row in going:
                self.count(row in right)
            going = [row for row in right if self.selector.unfinished[row]]
            if not going:
                return

    def count(self, accepted: bool):
        self.drafted += 1
        self.accepted += accepted
        self.acceptance = ACCEPTANCE_DECAY * self.acceptance + (1 - ACCEPTANCE_DECAY) * accepted
