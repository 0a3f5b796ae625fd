"""A page where every token is coloured by its loops."""
