"""Who computes: one worker per replica, with the caller's context and a random stream.

The engine, the pair and ``step`` come in here. All threads of the package start in
``workers``; nothing here knows what a loss is.
"""
