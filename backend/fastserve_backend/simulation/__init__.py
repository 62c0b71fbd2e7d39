"""The engine's own loop, policies and KV decisions on a virtual clock and modelled ranks."""
