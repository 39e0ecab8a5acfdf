"""A Flower app that trains with user-level privacy."""
