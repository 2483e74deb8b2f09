"""One file per hashing method, one base, one registry. A method is imported by its file; the registry knows them all."""
