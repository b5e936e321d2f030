"""Records the program of a model, whole or cut into segments, and runs what is recorded."""
