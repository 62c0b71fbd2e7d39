"""Policies: who runs in the next iteration. Pure decisions, no wall clock, no data moved.

An iteration is what the engine calls a step.
"""
