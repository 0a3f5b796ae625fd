"""The parts of a training run."""
