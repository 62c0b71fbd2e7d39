"""What a chat model writes: content, reasoning and calls of tools, told apart by its format."""
