"""What a recipe or a sweep says: read from YAML, with the range of every number, and what goes with what."""
