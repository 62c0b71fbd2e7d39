"""The report of a load test: records of jobs (``records``), what they say about a system
(``summary``, ``objectives``), and tables and figures.

Simulations and real servers are reported by the same code. Only tables and figures need rich or a
library of plots.
"""
