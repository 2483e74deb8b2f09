"""The name that start commands know: ``dask worker --preload och_dist.worker``."""

from och_dist.cluster.worker import dask_setup

__all__ = ["dask_setup"]
