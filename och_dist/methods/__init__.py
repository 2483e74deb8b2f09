"""One file per hashing method, one base, one registry, which loads a method when it is asked for."""
