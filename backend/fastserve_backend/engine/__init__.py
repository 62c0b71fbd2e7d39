"""What turns requests into iterations: admission, the step loop, delivery, restarts of ranks."""
