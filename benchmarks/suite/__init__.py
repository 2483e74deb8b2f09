"""The benchmark suite behind ``python -m benchmarks``."""
