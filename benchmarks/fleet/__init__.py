"""A fleet of simulated servers behind gateways, and the ways to choose a server for a request."""
