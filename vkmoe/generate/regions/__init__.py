"""Knows which tokens lie in the KV caches and in host memory; saves them to files, and back."""
