"""The pieces of the check, in the order in which they are run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import NamedTuple


@dataclass
class Setting:
    """Where and how the pieces run."""

    out: Path
    device: str = "cuda"
    tiny: bool = False  # sizes at which a CPU runs everything in minutes; the numbers mean nothing
    text: str = "embedded"  # `data.source` of the trainings
    named: list[str] = field(default_factory=list)  # measurements to run; empty: all

    @property
    def dtype(self) -> str:
        return "float32" if self.device == "cpu" else "bfloat16"


class Measurement(NamedTuple):
    name: str
    run: Callable[[], dict]


class Aim(NamedTuple):
    what: str
    number: str  # key in a result
    least: float | None = None
    most: float | None = None

    def is_met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    @property
    def words(self) -> str:
        bound = f"at least {self.least}" if self.least is not None else f"at most {self.most}"
        return f"{self.what}: {bound}"


@dataclass
class Piece:
    """A part of the check, which runs in a separate process.

    module: a file beside this one, by default named like the piece. Its `measurements(setting, **arguments)` yields
    the measurements.
    """

    name: str
    what: str
    expected: int  # seconds on an H100, estimated from operations and bytes, or from the progress of a first run
    limit: int  # seconds
    aims: list[Aim] = field(default_factory=list)
    module: str | None = None
    arguments: dict = field(default_factory=dict)

    def measurements(self, setting: Setting) -> Iterator[Measurement]:
        module = import_module(f"{__package__}.{self.module or self.name}")
        return module.measurements(setting, **self.arguments)


PIECES = [
    Piece("machine", "what is there: packages, rates of products and of memory", 40, 120),
    Piece(
        "tests",
        "the tests marked gpu, but for those of compiling",
        180,
        480,
        [Aim("failed tests", "failed", most=0)],
        arguments={"piece": "tests", "compiling": False},
    ),
    Piece(
        "training_speed",
        "utilisation of training steps at 370M to 1.5B parameters",
        300,
        560,
        [Aim("MFU of training", "mfu", least=0.45)],
    ),
    Piece(
        "against_llama",
        "a training step of C layers and N loops against Llama of C * N layers, compiled alike",
        80,
        300,
        [
            Aim("speed over Llama", "speedup_over_llama", least=1.0),
            Aim("speed over Llama, wished", "speedup_over_llama", least=1.15),
        ],
    ),
    Piece(
        "memory",
        "peak memory of a per-loop training step over a terminal one",
        30,
        180,
        [Aim("memory of a per-loop loss", "per_loop_over_terminal", most=1.1)],
    ),
    Piece(
        "training_options",
        "what compiling, kernels and activations that are computed again gain and cost in a training step",
        240,
        540,
    ),
    Piece(
        "real",
        "one real training, recipes/gpu/real.yaml",
        210,
        570,
        [
            Aim("share of time in checkpoints", "checkpoint_share", most=0.01),
            Aim("all losses are numbers", "finite", least=1),
        ],
        module="real_training",
    ),
    Piece(
        "bandwidth",
        "decoding at batch 1 against the limits of bandwidth",
        150,
        400,
        [Aim("share of the bandwidth limit", "best_over_memory_limit", least=0.6)],
    ),
    Piece(
        "graphs",
        "decoding whose passes are CUDA graphs, over the same kernel by kernel",
        40,
        180,
        [
            Aim("speed of graphs in plain decoding", "plain_speedup", least=1.0),
            Aim("speed of graphs in decoding with exits", "exits_speedup", least=1.0),
        ],
    ),
    Piece(
        "exits",
        "decoding with early exit over what FLOPs predict",
        120,
        400,
        [Aim("exits over what FLOPs predict", "over_prediction", least=0.8)],
    ),
    Piece(
        "pages",
        "passes of many requests by pages under flex attention, over attention request by request",
        60,
        240,
        [Aim("time of a pass by pages", "pages_over_apart", most=1.0)],
    ),
    Piece(
        "speculation",
        "self-speculation on the trained model",
        40,
        200,
        [Aim("speed of self-speculation", "best_speedup", least=1.5)],
    ),
    Piece(
        "compiled_tests",
        "the tests marked gpu of compiling and CUDA graphs",
        300,
        580,
        [Aim("failed tests", "failed", most=0)],
        module="tests",
        arguments={"piece": "compiled_tests", "compiling": True},
    ),
    Piece(
        "residual_scaling",
        "residual scaling, figures 2 and 4, at width 768",
        200,
        580,
        module="growth",
    ),
    Piece("lt_flt", "LT against FLT, 127M and 12 loops", 360, 580, module="sweeps", arguments={"sweep": "lt_flt"}),
    Piece("readout", "readouts at 44M, 8,000 steps", 530, 590, module="sweeps", arguments={"sweep": "readout"}),
    Piece("rdm", "RDM and Parcae at 100M, three rates", 450, 590, module="sweeps", arguments={"sweep": "rdm"}),
]
NAMES = [piece.name for piece in PIECES]
