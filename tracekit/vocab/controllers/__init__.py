"""Controllers, one file each; adding one is adding a file."""
