"""What looks after stores: verify, repair, delete, compact, collect; and whether all is fit for a job."""

from __future__ import annotations

from och_dist.upkeep.compaction import compact
from och_dist.upkeep.deletion import delete
from och_dist.upkeep.fitness import doctor
from och_dist.upkeep.housekeeping import gc, inspect, status
from och_dist.upkeep.verification import check_jobs, verify
