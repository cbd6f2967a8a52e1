"""Places on disk and in object stores, locks, logs of lines, records."""
