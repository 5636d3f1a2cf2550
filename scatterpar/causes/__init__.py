"""Why a result in parts is not that of the whole batch: one ordered list of causes.

``splitcheck`` and the looks of ``verify`` ask the same question, each from its own
figures. Both fill one record, and have their own words for the answer.

Imports ``batch``, ``devices`` and packages below them.

Runs in the caller's thread.

- ``counts`` has what a loss may divide by: rows, labels, masks;
- ``vectors`` finds factors, and weights with which parts add up to the whole;
- ``evidence`` is the record, ``ordered`` the list.
"""
