"""What lies on disk or in an object store: objects, arrays, versions; corpora, models, indexes and results."""

from __future__ import annotations

from och_dist.store.arrays import (
    ArraySpec,
    Codec,
    create_array,
    find_chunk,
    open_array,
    open_layout,
    plain_crc,
    read_rows,
    stored_chunks,
    write_chunk,
)
from och_dist.store.corpus import (
    MAX_ID_BYTES,
    MAX_PARTITIONS,
    Corpus,
    CorpusRef,
    IdLayout,
    Segment,
    find_corpus,
    id_hashes,
    id_keys,
    ids_prefix,
    open_corpus,
    vectors_prefix,
)
from och_dist.store.index import (
    ANNOUNCEMENT,
    CHUNK_ROWS,
    MODELS,
    ChunkRecord,
    CodeChunk,
    Index,
    IndexRef,
    IndexSegment,
    Job,
    Tombstones,
    find_index,
    list_jobs,
    model_objects,
    next_version,
    open_version,
    put_bitmap,
    read_bitmap,
    row_ranges,
    stored_bitmaps,
)
from och_dist.store.manifest import (
    StoredArray,
    Version,
    canonical,
    commit,
    pack_numbers,
    read_latest,
    read_version,
    seal,
    sha256,
    unseal,
    version_key,
    version_numbers,
)
from och_dist.store.model import (
    Model,
    check_expected,
    copy_model,
    is_address,
    load_model,
    model_on_worker,
    save_model,
    split_model_path,
)
from och_dist.store.objects import TEMPORARY, LocalObjects, Objects, open_objects, write_text
from och_dist.store.results import (
    Neighbors,
    RadiusNeighbors,
    StoredNeighbors,
    check_output,
    join_neighbors,
    no_neighbors,
    open_neighbors,
    read_about,
    save_histograms,
    save_neighbors,
    save_radius,
)
from och_dist.store.runs import begin_run, end_run, holder, locked, read_run, run_numbers
from och_dist.store.tables import (
    PARTITION_ROWS,
    TABLES,
    TablePartition,
    cut_segment,
    find_tables,
    has_tables,
    open_tables,
    remove_tables,
    table_arrays,
    write_tables,
)
