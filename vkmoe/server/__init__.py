"""This package serves a model over HTTP, in the forms that other programs speak already."""
