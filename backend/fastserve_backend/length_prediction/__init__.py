"""Output lengths, predicted from the words of prompts; docs/length_prediction.md explains it."""
