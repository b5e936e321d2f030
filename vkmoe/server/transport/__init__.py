"""Carries requests and answers: connections and their bounds, streams, and how serving ends."""
