"""The papers' measurements on one model."""
