"""What one constructor option or one argument of a call switches on, by its name.

Imports ``distributed``, ``verify``, ``step`` and the packages below them.

The engine calls each option in the caller's thread; schedules run their sub-steps in
the workers' threads.
"""
