"""Hashing methods: one file each, scikit-learn contract, pure NumPy."""
