"""An HTTP server that speaks OpenAI's API in front of a tritonserver that serves ``fastserve``.

It needs the extra ``gateway``. ``command.run_gateway`` starts it.
"""
