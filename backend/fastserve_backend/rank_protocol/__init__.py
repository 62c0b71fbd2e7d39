"""What the engine and its ranks say to each other, and what each knows of the other."""
