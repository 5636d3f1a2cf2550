"""Why a result in parts is not that of the whole batch: one ordered list of causes.

Three ask the same question, each from its own figures: the looks at steps
(``verify/look_causes.py``), the looks at the pair's outputs
(``verify/output_looks.py``), and ``splitcheck`` (``splitting/split_causes.py``).
All fill one record, and have their own words and remedies for the answer
(``verify/verdicts.py``, ``splitting/cause_words.py``).

Imports ``batch``, ``devices`` and packages below them.

Runs in the caller's thread.

- ``counts`` has what a loss may divide by: rows, labels, masks;
- ``vectors`` finds factors, and weights with which parts add up to the whole;
- ``evidence`` is the record, and has the kinds of causes in their order;
- ``cause_list`` finds the first that fits;
- ``batch_normalisation`` names layers that tie the rows of a part to each other.
"""
