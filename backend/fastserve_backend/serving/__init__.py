"""The Triton side: the python-backend model, its wire format, and the launcher of tritonserver.

``launch`` runs in the process that starts the server, ``model`` and all that it imports in the
server's stub process. What uses ``triton_python_backend_utils`` can be imported only there.
"""
