"""What a training run is made of."""
