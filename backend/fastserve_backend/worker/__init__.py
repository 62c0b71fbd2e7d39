"""A rank: one ``torch.distributed`` subprocess that runs the model.

Read `worker` (the main loop), then `model_runner` (a step), then `step_inputs` and `sampler`. The
engine imports nothing from here, because this package imports torch.
"""
