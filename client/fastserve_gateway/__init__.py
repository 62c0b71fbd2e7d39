"""An HTTP server in front of a tritonserver that serves ``fastserve``.

It speaks OpenAI's APIs for completions, chat completions and responses, and Anthropic's messages.
It needs the extra ``gateway``. ``command.run_gateway`` starts it.
"""
