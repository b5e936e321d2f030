"""Checks of `vkmoe serve` by libraries that others wrote; try_clients.py runs them.

A file for each library has up to four functions, `chat`, `stream`, `tools` and `structured`. Each
takes the server's address, and raises if the library is not served. What a library does not have,
its file has not. These files run where the libraries are, without vkmoe.
"""
