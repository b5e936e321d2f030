"""This package answers the requests of Ollama's clients, in its forms."""
