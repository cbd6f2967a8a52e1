"""Locations on disks and in object stores, locks, logs of lines, and records."""
