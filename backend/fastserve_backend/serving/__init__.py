"""The Triton side: the python-backend model, its wire format, and the launcher of tritonserver.

Only ``model``, ``streaming`` and ``metrics`` run inside the server's stub process and may use
``triton_python_backend_utils``; ``launch`` runs in the process that starts the server.
"""
