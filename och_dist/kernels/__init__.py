"""Computations on one block: ndarrays in, values out. No I/O, no Dask, no hidden randomness."""
