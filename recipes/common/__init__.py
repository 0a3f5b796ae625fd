"""Code shared by training and evaluation: formulas, metrics, charts, files, results as JSON, command lines."""
