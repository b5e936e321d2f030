"""This package is `vkmoe serve`: its command, the flags of llama-server, and what it hosts."""
