"""What training and evaluation share: recipes, metrics, measures, results as JSON, command lines."""
