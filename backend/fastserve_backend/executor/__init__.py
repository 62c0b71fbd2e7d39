"""Who carries out a step: real ranks."""
