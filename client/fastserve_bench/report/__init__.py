"""The report of a load test: what each job saw (``records``), what that means for a system
(``summary``, ``objectives``), and how it is shown.

Simulations and measurements of a real server are reported by the same code. Only what shows it
needs rich or a library of plots: figures are also made of records where neither is installed.
"""
