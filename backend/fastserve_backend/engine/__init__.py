"""What turns requests into steps: admission, the step loop, delivery, restarts of ranks."""
