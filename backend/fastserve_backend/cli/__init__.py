"""The command line: one file a command, and the flags that commands share."""
