"""``scatterpar.doctor()``: what a machine has, whether it computes exactly, and how fast.

A user of the engine, which never imports it. The room is not named after the function, which is
``scatterpar.doctor``: a module of that name would take its place on import.
"""
