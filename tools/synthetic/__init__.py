"""Models of real shape with random weights, written by make_synthetic_model.py."""
