"""Table 2 of the readout paper."""
