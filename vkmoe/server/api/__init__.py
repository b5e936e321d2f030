"""This package answers: one module for each form of request that clients send."""
