"""All papers, in the order of the ledger."""

from .depth import DEPTH
from .fully_looped import FULLY_LOOPED
from .parcae import PARCAE_PAPER
from .readout import READOUT
from .residual_scaling import RESIDUAL_SCALING


PAPERS = [RESIDUAL_SCALING, FULLY_LOOPED, PARCAE_PAPER, READOUT, DEPTH]
