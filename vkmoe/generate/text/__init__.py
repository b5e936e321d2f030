"""This package turns texts into token ids and back, as the metadata of a model file says."""
