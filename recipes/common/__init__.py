"""What training and evaluation share: formulas, metrics, charts, files, results as JSON, command lines."""
