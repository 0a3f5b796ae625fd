"""Dense models that are made to loop: recipes, and the small one that a CPU trains."""
