"""Lossless self-speculation in a pipeline: several tokens of a row are in flight, each at its own loop.

After a few loops a token is read out and proposes the next one, which starts with the next pass while the first token
runs on: one pass of the core runs all tokens in flight of all rows. Every loop has separate keys and values, which
earlier tokens have written before a later token reaches that loop, so a token computes the same as in plain decoding.
The emitted token is chosen only from logits at full depth, by the same code as in plain decoding. If it differs from
the proposal, the tokens after it are dropped, and the row goes on from the right token. A token whose first proposal
was unsure proposes again at a deeper loop; if the proposal changes, the row starts anew from there at once.

With sampling, proposals and full depth are chosen with the same noise at each position, and every token keeps the
distribution of plain sampling. `proposals.py` decides at which loops tokens propose, and whether drafting pays at all.
"""

from dataclasses import dataclass, field
from time import perf_counter

import torch
import torch.distributed as dist
from transformers.utils import logging

from .graph_decoding import next_logits
from .proposals import FEWEST_RECORDS, SURE, Planner, ProbeReading
from .row_engine import RowEngine
from .row_graphs import AFTER
from .row_passes import Tokens, TokensOfEngine, enter
from .tensors import on_device


logger = logging.get_logger(__name__)

PROBE_EVERY = 16  # tokens of every n-th entry into the pipeline are probes: read out after every loop, to measure


def speculate(engine: RowEngine):
    """Replace `_sample` of transformers: decode with self-speculation."""
    pipeline = Pipeline(engine)
    while pipeline.selector.running():
        pipeline.tick()
    result = engine.output()
    if not torch.is_tensor(result):
        result.acceptance_rate = pipeline.accepted / pipeline.compared if pipeline.compared else None
        result.passes_per_token = pipeline.row_passes / pipeline.verified if pipeline.verified else None
        result.stopped_drafting = pipeline.stopped_drafting
    return result


def readout_cost(config) -> float:
    """Return the weights of the head over those of one loop; from the config, since quantisers replace layers."""
    sizes = config.block_sizes("core")
    attention = 2 * config.head_dim * (sizes.num_attention_heads + sizes.num_key_value_heads)
    mlp = (3 if config.mlp_gated else 2) * sizes.intermediate_size
    loop = config.num_core_layers * sizes.hidden_size * (attention + mlp)
    return config.vocab_size * config.hidden_size / loop


@dataclass(eq=False)
class InFlight:
    """A token of a row on its way through the loops."""

    row: int
    place: int  # in the cache
    id: int
    is_probe: bool  # read out after every loop
    loops: int = 0  # loops that it has run
    proposal: int | None = None  # id that it proposes for the token after it
    is_sure: bool = False
    readings: list[tuple[int, bool]] = field(default_factory=list)  # of a probe: best id, whether it was sure
    is_dropped: bool = False


class Pipeline:
    def __init__(self, engine: RowEngine):
        self.engine, self.selector, self.trunk = engine, engine.selector, engine.trunk
        self.num_loops, options, config = engine.limits[0], engine.options, engine.model.config
        most_ahead = options.draft_tokens or self.num_loops - 1
        first = None if options.draft_loops == "auto" else options.draft_loops
        has_graphs = engine.graphs is not None
        self.planner = Planner(self.num_loops, first, most_ahead, readout_cost(config), has_graphs)
        self.flight: list[InFlight] = []
        self.held: dict[str, torch.Tensor] = {}  # tensors of the tokens in flight: state, ids, embedded, rotary
        self.of_row: list[list[InFlight]] = [[] for _ in range(engine.num_rows)]  # oldest first
        self.noises: dict[tuple[int, int], torch.Tensor] = {}  # by row and place of the token before
        # tokens at places below this one have a position, and their successors are needed
        self.end = engine.held_before + engine.config.max_length - 1
        if config.position_embedding == "learned":
            self.end = min(self.end, config.max_position_embeddings)
        self.entries = self.row_passes = self.verified = self.compared = self.accepted = 0
        self.taken_together = 0  # calls of `take_tokens`
        self.stopped_drafting = False

    def tick(self):
        """Run one loop of all tokens in flight (all loops if there is no plan), then emit and propose tokens."""
        if self.planner.has_graphs and self.planner.plan is None and not self.flight and not self.probes_next:
            self.take_tokens()
            return
        start, verified = perf_counter(), self.verified
        self.enter_tokens()
        everything = list(range(len(self.flight)))
        tokens, passes = self.tokens(everything), 1
        if self.planner.plan is None and all(token.loops == 0 and not token.is_probe for token in self.flight):
            passes = self.num_loops
            state = tokens.run_all_loops(passes)
        else:
            state = tokens.run_loop([token.loops for token in self.flight], self.held["state"])
        self.row_passes += passes * sum(map(bool, self.of_row))
        for token in self.flight:
            token.loops += passes
        if reads := sorted(filter(self.is_read, everything), key=lambda i: self.flight[i].row):
            logits = self.tokens(reads).read_logits([self.flight[i].loops for i in reads], state[reads])[:, -1]
            self.verify(reads, logits)
            self.propose(reads, logits)
        elif state.device.type == "cuda":
            # nothing was read back: wait here, so that the time of this pass is measured
            torch.cuda.current_stream(state.device).synchronize()
        work = len(everything) + round(len(reads) * self.planner.readout_cost)
        self.planner.add_passes(passes, work, perf_counter() - start, self.verified - verified)
        self.held["state"] = self.trunk.to_next_loop(state)
        self.keep([i for i in everything if not self.flight[i].is_dropped])

    def take_tokens(self):
        """Emit the next token of every row, without proposals, by one graph."""
        start, rows = perf_counter(), self.selector.running()
        tokens = [InFlight(row, place, -1, False) for row, place in zip(rows, self.engine.last_places(rows))]
        logits, loops = next_logits(self.engine, rows, self.num_loops), [self.num_loops] * len(rows)
        self.engine.emit(rows, logits[:, -1], loops, self.noise_of(tokens))
        self.noises.clear()
        self.entries, self.verified = self.entries + 1, self.verified + len(rows)
        self.row_passes += self.num_loops * len(rows)
        self.taken_together += 1
        if self.taken_together > AFTER + 1:  # its graph was recorded before
            self.planner.add_passes(self.num_loops, len(rows), perf_counter() - start, len(rows))

    # Tokens that enter and leave the pipeline

    @property
    def probes_next(self) -> bool:
        return len(self.planner.records) < FEWEST_RECORDS or (self.entries + 1) % PROBE_EVERY == 0

    def enter_tokens(self):
        """Start in each row its last token, or the one proposed last. Without a plan all rows start together."""
        new, plan, is_probe = [], self.planner.plan, self.probes_next
        for row in self.selector.running() if plan is not None or not self.flight else ():
            before = self.of_row[row][-1] if self.of_row[row] else None
            if before is None:
                (place,), id = self.engine.last_places([row]), self.selector.last[row]
            elif before.proposal is None or plan is None or len(self.of_row[row]) > plan.ahead:
                continue
            else:
                place, id = before.place + 1, before.proposal
            new.append(InFlight(row, place, id, is_probe))
            self.of_row[row].append(new[-1])
        if not new:
            return
        self.entries += 1
        ids = on_device([[token.id] for token in new], self.selector.ids.device)
        tokens = enter([self.group(new)], ids)
        held = {"state": self.trunk.initial_state(tokens.embedded, None), "ids": ids, "embedded": tokens.embedded}
        if tokens.rotary is not None:
            held["rotary"] = tokens.rotary
        if self.flight:
            held = {name: torch.cat([self.held[name], tensor]) for name, tensor in held.items()}
        self.flight, self.held = self.flight + new, held

    def group(self, tokens: list[InFlight]) -> TokensOfEngine:
        return TokensOfEngine(self.engine, [token.row for token in tokens], [token.place for token in tokens])

    def tokens(self, members: list[int]) -> Tokens:
        """Return the tokens in flight at these indices, in the order of `members`."""
        held = self.held
        if members != list(range(len(self.flight))):
            index = on_device(members, held["ids"].device)
            held = {name: tensor[index] for name, tensor in held.items() if name != "state"}
        group = self.group([self.flight[i] for i in members])
        return Tokens([group], held["ids"], held["embedded"], held.get("rotary"))

    def keep(self, members: list[int]):
        if len(members) < len(self.flight):
            self.flight = [self.flight[i] for i in members]
            index = on_device(members, self.held["state"].device, torch.long)
            self.held = {name: tensor[index] for name, tensor in self.held.items()}

    def drop(self, row: int, first: int):
        """Drop the tokens of a row from index `first` on."""
        for token in self.of_row[row][first:]:
            token.is_dropped = True
        del self.of_row[row][first:]

    # Readouts

    def is_read(self, i: int) -> bool:
        token = self.flight[i]
        return token.loops == self.num_loops or token.is_probe or self.may_propose(token)

    def may_propose(self, token: InFlight) -> bool:
        plan = self.planner.plan
        if plan is None or token.place + 1 >= self.end:
            return False
        if token.proposal is None:
            return token.loops >= plan.first
        return token.loops == plan.second and not token.is_sure

    def noise_of(self, tokens: list[InFlight]) -> torch.Tensor | None:
        """Return the noise for the successors of these tokens, [tokens, vocabulary]: the same at every call."""
        if not self.selector.config.do_sample:
            return None
        keys = [(token.row, token.place) for token in tokens]
        new = [key for key in keys if key not in self.noises]
        shape = (len(new), self.engine.model.config.vocab_size)
        self.noises.update(zip(new, torch.empty(shape, device=self.selector.ids.device).exponential_()))
        return torch.stack([self.noises[key] for key in keys])

    def verify(self, reads: list[int], logits: torch.Tensor):
        """Emit the successors of tokens that have reached full depth, and drop what was started wrongly after them."""
        members = [member for member, i in enumerate(reads) if self.flight[i].loops == self.num_loops]
        if not members:
            return
        tokens = [self.flight[reads[member]] for member in members]
        rows, loops = [token.row for token in tokens], [self.num_loops] * len(tokens)
        self.engine.emit(rows, logits[members], loops, self.noise_of(tokens))
        probed = any(token.is_probe for token in tokens)
        for token in tokens:
            token.is_dropped = True
            self.noises.pop((token.row, token.place), None)
            said = self.selector.last[token.row]
            self.count(token, said)
            goes_on = token.proposal == said and self.selector.unfinished[token.row]
            if goes_on:
                del self.of_row[token.row][0]
            else:
                self.drop(token.row, 0)
        if probed:
            self.choose_plan()

    def count(self, token: InFlight, said: int):
        self.verified += 1
        if token.proposal is not None:
            self.compared += 1
            self.accepted += token.proposal == said
        if token.is_probe:
            self.planner.records.append([ProbeReading(id == said, is_sure) for id, is_sure in token.readings])

    def choose_plan(self):
        rows = len(self.selector.running())
        if not rows:
            return
        self.planner.choose_plan(rows)
        if (self.engine.model.tp_size or 1) > 1:  # ranks must run the same passes, but each measures its own times
            mesh, plan = self.engine.model._device_mesh, [self.planner.plan]
            dist.broadcast_object_list(plan, group=mesh.get_group(mesh.ndim - 1), group_src=0)
            self.planner.plan = plan[0]
        if self.planner.plan is None and not self.planner.needs_trial(rows) and not self.stopped_drafting:
            self.stopped_drafting = True
            drafts = f"draft_loops={self.engine.options.draft_loops!r}"
            logger.warning_once(
                f"{drafts} does not pay here, so tokens come one by one; logging at level INFO says why"
            )
            logger.info(f"{drafts} does not pay: {self.planner.reason(rows)}")

    def propose(self, reads: list[int], logits: torch.Tensor):
        """Read out tokens before full depth: record the readings of probes, and update the proposals that are due."""
        members = [member for member, i in enumerate(reads) if not self.flight[i].is_dropped]
        if not members:
            return
        tokens = [self.flight[reads[member]] for member in members]
        lengths = [token.place + 1 - self.engine.held_before for token in tokens]
        said, lead = self.selector.guess(
            [token.row for token in tokens], lengths, logits[members], self.noise_of(tokens)
        )
        for token, id, is_sure, length in zip(tokens, said.tolist(), (lead >= SURE).tolist(), lengths):
            if token.is_probe:
                token.readings.append((id, is_sure))
            if token.is_dropped or not self.may_propose(token):
                continue
            if id != token.proposal:
                self.drop(token.row, self.of_row[token.row].index(token) + 1)
                self.selector.write_guess(token.row, length, id)
            token.proposal, token.is_sure = id, is_sure
