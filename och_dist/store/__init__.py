"""What lies on disk or in an object store: corpora, models, indexes, and the files vectors come from."""
