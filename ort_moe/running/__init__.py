"""Runs models: sessions with our ops, and steps of a decode graph on fixed buffers."""
