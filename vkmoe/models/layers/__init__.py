"""Appends the parts of a layer to a program: attention, the feed-forward, and their inputs."""
