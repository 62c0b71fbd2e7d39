"""What any program needs of its system: files, clocks, logs, processes."""
