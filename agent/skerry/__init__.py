"""Skerry: a language model that lives in a fixed amount of memory on a small, hot, shared board."""

__version__ = "0.1.0"
