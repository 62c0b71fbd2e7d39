"""The Triton side: the python-backend model, its wire format, and the launcher of tritonserver.

``launch`` runs in the process that starts the server. ``triton_model`` and its imports run in the
server's stub process. Modules that use ``triton_python_backend_utils`` can be imported only there.
"""
